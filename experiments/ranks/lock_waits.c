// Records where threads wait for locks of pthreads, and how long each has Python's interpreter, for LD_PRELOAD. The
// functions are called by lock_waits.py.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FRAMES 14
#define OWN_FRAMES 2  // of this file, in each backtrace
#define PLACES 2048

typedef struct {
    const char *kind;
    void *frames[FRAMES];
    int depth, holds_interpreter;
    uint64_t count, ns;
} Place;

typedef struct Table {
    Place places[PLACES];  // a hash table: places beyond its size are not recorded
    uint64_t since, times, held;  // when it took the interpreter, how often it did, and for how many ns in all
    int thread;
    struct Table *next;
} Table;

static Table *tables;
static volatile int recording;
static __thread Table *own;
static __thread int busy;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static void find_own(void) {
    if (own) return;
    own = calloc(1, sizeof(Table));
    own->thread = syscall(SYS_gettid);
    do own->next = tables;
    while (!__sync_bool_compare_and_swap(&tables, own->next, own));
}

// Whether this thread has Python's interpreter, so that no other thread can run Python code meanwhile.
static int holds_interpreter(void) {
    static int (*check)(void);
    if (!check) check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check && check();
}

static void waited(const char *kind, uint64_t start) {
    if (!recording || busy) return;
    busy = 1;
    int holds = holds_interpreter();
    uint64_t ns = now() - start, hash = (uintptr_t)kind + holds;
    find_own();
    void *frames[FRAMES] = {0};
    int depth = backtrace(frames, FRAMES);
    for (int i = OWN_FRAMES; i < depth; i++) hash = (hash ^ (uintptr_t)frames[i]) * 1099511628211ull;
    for (int probe = 0; probe < PLACES; probe++) {
        Place *place = &own->places[(hash + probe) % PLACES];
        size_t compared = sizeof(void *) * (FRAMES - OWN_FRAMES);
        if (!place->count) {
            place->kind = kind;
            place->depth = depth;
            place->holds_interpreter = holds;
            memcpy(place->frames, frames, sizeof frames);
        } else if (place->kind != kind || place->holds_interpreter != holds ||
                   memcmp(place->frames + OWN_FRAMES, frames + OWN_FRAMES, compared)) {
            continue;
        }
        place->count++;
        place->ns += ns;
        break;
    }
    busy = 0;
}

// Where the code of Python's interpreter is, and the two conditions that it signals: when a thread gives it away, and
// when one has taken it, in this order in memory.
static uintptr_t code, code_end, given, taken;

static int find_code(struct dl_phdr_info *object, size_t size, void *function) {
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        if (object->dlpi_phdr[i].p_type != PT_LOAD) continue;
        uintptr_t at = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        if (at < begin) begin = at;
        if (at + object->dlpi_phdr[i].p_memsz > end) end = at + object->dlpi_phdr[i].p_memsz;
    }
    if ((uintptr_t)function < begin || (uintptr_t)function >= end) return 0;
    code = begin;
    code_end = end;
    return 1;
}

void lock_waits_start(void) {
    void *frames[1];
    backtrace(frames, 1);  // the first call loads a library
    dl_iterate_phdr(find_code, dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    for (Table *table = tables; table; table = table->next) {
        memset(table->places, 0, sizeof table->places);
        table->since = table->times = table->held = 0;
    }
    recording = 1;
}

// A line for each place: thread, kind of lock, whether the thread has the interpreter, number of waits, ns in all, and
// the functions, the innermost first. And one for each thread that had the interpreter: how often, and for how long.
void lock_waits_write(const char *path) {
    recording = 0;
    FILE *file = fopen(path, "w");
    if (!file) return;
    for (Table *table = tables; table; table = table->next) {
        if (table->times)
            fprintf(file, "%d\thas the interpreter\t1\t%lu\t%lu\t\n", table->thread, table->times, table->held);
        for (Place *place = table->places; place < table->places + PLACES; place++) {
            if (!place->count) continue;
            fprintf(file, "%d\t%s\t%d\t%lu\t%lu\t", table->thread, place->kind, place->holds_interpreter, place->count,
                    place->ns);
            for (int i = OWN_FRAMES; i < place->depth; i++) {
                Dl_info info = {0};
                if (!dladdr(place->frames[i], &info) || !info.dli_fname) continue;
                const char *name = strrchr(info.dli_fname, '/');
                fprintf(file, "%s:%.60s|", name ? name + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?");
            }
            fprintf(file, "\n");
        }
    }
    fclose(file);
}

// The function of the next library. Conditions have an older version with another layout.
static void *next_of(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define LOCK(name, attempt, kind, type)                        \
    int name(type *lock) {                                     \
        static int (*next)(type *);                            \
        if (!next) next = next_of(#name, NULL);                \
        int result = recording && !busy ? attempt(lock) : EBUSY; \
        if (result != EBUSY) return result;                    \
        uint64_t start = now();                                \
        result = next(lock);                                   \
        if (recording) waited(kind, start);                    \
        return result;                                         \
    }

LOCK(pthread_mutex_lock, pthread_mutex_trylock, "mutex", pthread_mutex_t)
LOCK(pthread_rwlock_rdlock, pthread_rwlock_tryrdlock, "read lock", pthread_rwlock_t)
LOCK(pthread_rwlock_wrlock, pthread_rwlock_trywrlock, "write lock", pthread_rwlock_t)

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *);
    if (!next) next = next_of("pthread_cond_wait", "GLIBC_2.3.2");
    uint64_t start = now();
    int result = next(condition, mutex);
    waited("condition", start);
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = next_of("pthread_cond_timedwait", "GLIBC_2.3.2");
    uint64_t start = now();
    int result = next(condition, mutex, end);
    waited("condition with a time limit", start);  // Python's interpreter
    return result;
}

int pthread_cond_signal(pthread_cond_t *condition) {
    static int (*next)(pthread_cond_t *);
    if (!next) next = next_of("pthread_cond_signal", "GLIBC_2.3.2");
    uintptr_t caller = (uintptr_t)__builtin_return_address(0), at = (uintptr_t)condition;
    if (recording && caller >= code && caller < code_end) {
        if (!given || at < given) given = at;
        if (at > taken) taken = at;
        find_own();
        if (at == taken) own->since = now();
        if (at == given && given != taken && own->since) {
            own->held += now() - own->since;
            own->times++;
            own->since = 0;
        }
    }
    return next(condition);
}
