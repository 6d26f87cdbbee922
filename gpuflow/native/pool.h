/* Threads that share the items of jobs. */

#ifndef GPUFLOW_POOL_H
#define GPUFLOW_POOL_H

#include <stdint.h>

struct pool;

/* Works on an item of a job. memory: of the thread, NULL at first; later items find what this sets. */
typedef void (*item_work)(void *job, int64_t item, void **memory);

/* Works on items 0 to count - 1 of a job in this many threads, the calling one included; the others end afterwards.
 * release: frees a thread's memory. */
void run_in_threads(int64_t threads, item_work work, void (*release)(void *memory), void *job, int64_t count);

/* Starts threads. release: frees a thread's memory when the pool ends. Returns NULL if no thread can be started. */
struct pool *new_pool(int64_t threads, void (*release)(void *memory));

/* Ends the threads once they have done all jobs, and frees the pool. */
void gpuflow_free_pool(struct pool *pool);

/* Has the threads work on items 0 to count - 1 of a job, and waits until all are done. Items of jobs that were given
 * earlier come first, so that no thread is idle while a job ends. Several threads may call this at a time. */
void run_on_pool(struct pool *pool, item_work work, void *job, int64_t count);

#endif
