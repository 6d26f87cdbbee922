/* Shares files between threads, each of which uses memory that later calls find again. Included by the C files of this
 * folder that work on several files at a time. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum { MOST_THREADS = 64, MOST_KEPT_MEMORIES = 16 };

/* What is done with each file. bytes: of a memory, which is zeros at first. is_large: whether a memory is not to be
 * kept. release: frees what it refers to. kept: memories that no thread uses; no lock guards them, so that a process
 * may fork at any time. */
struct task {
    void (*work)(void *memory, void *files, int64_t number);
    int (*is_large)(const void *memory);
    void (*release)(void *memory);
    size_t bytes;
    void *kept[MOST_KEPT_MEMORIES];
};

struct share {
    struct task *task;
    void *files;
    int64_t count, next;
};

/* NULL if there is no memory. */
static void *take_memory(struct task *task) {
    for (int i = 0; i < MOST_KEPT_MEMORIES; i++) {
        void *memory = __atomic_exchange_n(&task->kept[i], NULL, __ATOMIC_ACQUIRE);
        if (memory)
            return memory;
    }
    return calloc(1, task->bytes);
}

static void give_memory_back(struct task *task, void *memory) {
    int large = task->is_large(memory);
    for (int i = 0; i < MOST_KEPT_MEMORIES && !large; i++) {
        void *none = NULL;
        if (__atomic_compare_exchange_n(&task->kept[i], &none, memory, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            return;
    }
    task->release(memory);
    free(memory);
}

static void *do_share(void *argument) {
    struct share *share = argument;
    void *memory = take_memory(share->task);
    if (!memory)
        return NULL;
    for (int64_t i; (i = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED)) < share->count;)
        share->task->work(memory, share->files, i);
    give_memory_back(share->task, memory);
    return NULL;
}

/* Does a task on `count` files in this many threads, the calling one included. */
static void share_files(struct task *task, void *files, int64_t count, int64_t threads) {
    struct share share = {task, files, count, 0};
    pthread_t others[MOST_THREADS];
    int64_t started = 0;
    while (started < threads - 1 && started < count - 1 && started < MOST_THREADS &&
           !pthread_create(&others[started], NULL, do_share, &share))
        started++;
    do_share(&share);
    for (int64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
}
