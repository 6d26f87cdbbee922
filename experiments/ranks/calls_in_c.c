/* A thread without Python that repeats calls of nvJPEG's batched decoding: see calls_in_c.py. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct functions {
    int (*set_device)(int);
    int (*create_event)(void **, unsigned);
    int (*record_event)(void *, void *);
    int (*wait_for_event)(void *);
    int (*initialize)(void *, void *, int, int, int);
    int (*set_region)(void *, int, int, int, int);
    int (*decode)(void *, void *, const void *, const void *, const void *, void *const *, void *);
};

/* state: its number among the states. data, lengths, images, parameters: as nvjpegDecodeBatchedEx takes them. regions:
 * the x, y, width and height of the part of each image that is written. */
struct call {
    void *handle, *state;
    int64_t number_of_state, count, format;
    const void *data, *lengths, *images;
    void *const *parameters;
    const int64_t (*regions)[4];
};

enum { STATES = 16, BLOCKING = 1 | 2 /* cudaEventBlockingSync | cudaEventDisableTiming */ };

static struct functions f;
static const struct call *calls;
static int64_t count_of_calls;
static int device;
static void *stream;
static pthread_t thread;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int64_t asked, done, failures, stopped;

static void repeat_calls(void **events, int64_t *sizes) {
    for (int64_t i = 0; i < count_of_calls; i++) {
        const struct call *one = &calls[i];
        int64_t state = one->number_of_state;
        f.wait_for_event(events[state]); /* as gpuflow's buffers and states do */
        if (sizes[state] != one->count) {
            failures += f.initialize(one->handle, one->state, (int)one->count, 1, (int)one->format) != 0;
            sizes[state] = one->count;
        }
        for (int64_t j = 0; j < one->count; j++) {
            const int64_t *region = one->regions[j];
            int x = (int)region[0], y = (int)region[1], width = (int)region[2], height = (int)region[3];
            failures += f.set_region(one->parameters[j], x, y, width, height) != 0;
        }
        failures += 0 != f.decode(one->handle, one->state, one->data, one->lengths, one->images, one->parameters, stream);
        f.record_event(events[state], stream);
    }
}

static void *run(void *unused) {
    void *events[STATES];
    int64_t sizes[STATES] = {0};
    f.set_device(device);
    for (int i = 0; i < STATES; i++)
        f.create_event(&events[i], BLOCKING);
    for (;;) {
        pthread_mutex_lock(&mutex);
        while (asked == done && !stopped)
            pthread_cond_wait(&changed, &mutex);
        int64_t end = stopped;
        pthread_mutex_unlock(&mutex);
        if (end)
            return unused;
        repeat_calls(events, sizes);
        pthread_mutex_lock(&mutex);
        done++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }
}

int calls_start(const struct functions *functions, const struct call *first, int64_t count, int on_device, void *on_stream) {
    f = *functions, calls = first, count_of_calls = count, device = on_device, stream = on_stream;
    asked = done = failures = stopped = 0;
    return pthread_create(&thread, NULL, run, NULL);
}

/* Ask for all calls once more; wait while `ahead` such requests are open. Returns 1 after `seconds`. */
int calls_ask(int64_t ahead, int64_t seconds) {
    struct timespec limit;
    int late = 0;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += seconds;
    pthread_mutex_lock(&mutex);
    while (asked - done >= ahead && !late)
        late = pthread_cond_timedwait(&changed, &mutex, &limit) != 0;
    asked++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    return late;
}

/* End the thread. Returns how many calls failed. */
int64_t calls_stop(void) {
    pthread_mutex_lock(&mutex);
    stopped = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    pthread_join(thread, NULL);
    return failures;
}
