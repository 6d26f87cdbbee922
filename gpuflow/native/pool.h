/* Threads that share the items of jobs. */

#ifndef GPUFLOW_POOL_H
#define GPUFLOW_POOL_H

#include <stdint.h>

struct pool;

/* Which memory of a thread the items of a job use. */
enum memory_kind { FOR_CHUNKS, FOR_REWRITING, FOR_CHECKS, MEMORY_KINDS };

/* How items of a job are worked on. run: memory is the thread's, NULL at first; later items find what it sets.
 * release: frees that memory. */
struct work {
    void (*run)(void *job, int64_t item, void **memory);
    void (*release)(void *memory);
    enum memory_kind memory;
};

/* Starts threads. Returns NULL if none can be started. */
struct pool *gpuflow_new_pool(int64_t threads);

/* Ends the threads once they have done all jobs, and frees the pool. */
void gpuflow_free_pool(struct pool *pool);

/* Has the threads work on items 0 to count - 1 of a job, and waits until all are done. Items of jobs that were given
 * earlier come first, so that no thread is idle while a job ends. Several threads may call this at a time.
 * pool: NULL for the calling thread, which then frees the memory of the items. */
void run_on_pool(struct pool *pool, const struct work *work, void *job, int64_t count);

#endif
