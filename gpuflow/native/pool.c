/* Threads that share the items of jobs: see pool.h. A forked child has none of a pool's, and must not call that. */

#define _GNU_SOURCE

#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NICENESS = 10 };

/* A job in the queue, in the memory of the thread that waits for it. next: the first item that no thread has taken. */
struct job {
    const struct work *work;
    void *context;
    int64_t count, next, done;
    struct job *following;
    pthread_cond_t end;
};

/* lock: guards all that follows. first, last: jobs of which items are left. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t change;
    struct job *first, *last;
    int is_ending;
    int64_t count;
    pthread_t threads[];
};

/* Takes an item of the first job. */
static struct job *take_item(struct pool *pool, int64_t *item) {
    struct job *job = pool->first;
    *item = job->next++;
    if (job->next == job->count)
        pool->first = job->following;
    return job;
}

/* Lowers the priority of this thread. Threads that keep all cores at work make a thread that wakes up wait for a core;
 * if that one holds the interpreter, the whole program waits with it. */
static void give_way(void) {
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_BATCH, &none);
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICENESS);
}

static void *serve(void *argument) {
    struct pool *pool = argument;
    void *memory[MEMORY_KINDS] = {NULL};
    const struct work *works[MEMORY_KINDS] = {NULL};
    give_way();
    pthread_mutex_lock(&pool->lock);
    while (pool->first || !pool->is_ending) {
        if (!pool->first) {
            pthread_cond_wait(&pool->change, &pool->lock);
            continue;
        }
        int64_t item;
        struct job *job = take_item(pool, &item);
        pthread_mutex_unlock(&pool->lock);
        const struct work *work = works[job->work->memory] = job->work;
        work->run(job->context, item, &memory[work->memory]);
        pthread_mutex_lock(&pool->lock);
        if (++job->done == job->count)
            pthread_cond_signal(&job->end);
    }
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < MEMORY_KINDS; i++)
        if (works[i])
            works[i]->release(memory[i]);
    return NULL;
}

struct pool *gpuflow_new_pool(int64_t threads) {
    struct pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof *pool->threads);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->change, NULL);
    sigset_t all, before; /* signals are for the threads of the interpreter */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->count < threads && !pthread_create(&pool->threads[pool->count], NULL, serve, pool)) {
        pthread_setname_np(pool->threads[pool->count], "gpuflow_native");
        pool->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->count)
        return pool;
    gpuflow_free_pool(pool);
    return NULL;
}

void gpuflow_free_pool(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->is_ending = 1;
    pthread_cond_broadcast(&pool->change);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->change);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void run_on_pool(struct pool *pool, const struct work *work, void *context, int64_t count) {
    if (count < 1)
        return;
    if (!pool) {
        void *memory = NULL;
        for (int64_t item = 0; item < count; item++)
            work->run(context, item, &memory);
        work->release(memory);
        return;
    }
    struct job job = {.work = work, .context = context, .count = count};
    pthread_cond_init(&job.end, NULL);
    pthread_mutex_lock(&pool->lock);
    if (pool->first)
        pool->last->following = &job;
    else
        pool->first = &job;
    pool->last = &job;
    pthread_cond_broadcast(&pool->change);
    while (job.done < count)
        pthread_cond_wait(&job.end, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_destroy(&job.end);
}
