/* Reads local files, and ranges of open ones, for local.py. */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What is wrong with a piece, as in local.py; above 0 an errno. */
enum { PENDING = -1, DIRECTORY = -2, IRREGULAR = -3, EMPTY = -4, SHORT = -5, CHANGED = -6 };

/* An open file, as in local.py, with its size and time as they must be: in bytes, and nanoseconds since 1970. The
 * descriptor of one that could not be opened is -errno. */
struct open_file {
    int64_t descriptor, size, modified;
};

/* A whole file, or a range of an open one, as in local.py. The functions below work on those that are PENDING. */
struct piece {
    int64_t fault;               /* 0 once it is read */
    int64_t descriptor;          /* of a whole file; -1: not open */
    int64_t start, size, offset; /* in the file, in bytes, and in the buffer */
    int64_t done;                /* bytes that were read; of a file that has changed: its size */
    const struct open_file *file; /* of a range; NULL: not open */
};

static void close_file(struct piece *piece) {
    if (piece->descriptor >= 0)
        close((int)piece->descriptor);
    piece->descriptor = -1;
}

/* A relative place starts from `base`. */
static int64_t find_place(char place[PATH_MAX], const char *base, const char *prefix, const char *entry) {
    const char *parts[] = {(*prefix ? *prefix : *entry) == '/' ? "" : base, prefix, entry};
    size_t length = 0;
    for (int i = 0; i < 3; i++) {
        size_t size = strlen(parts[i]);
        if (size >= PATH_MAX - length)
            return ENAMETOOLONG;
        memcpy(place + length, parts[i], size + 1);
        length += size;
    }
    return 0;
}

static int64_t open_file(struct piece *piece, const char *place) {
    do /* without O_NONBLOCK, opening a named pipe waits for its writer */
        piece->descriptor = open(place, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (piece->descriptor < 0 && errno == EINTR);
    return piece->descriptor < 0 ? errno : 0;
}

static int64_t measure(struct piece *piece, const char *place, int opens) {
    struct stat status;
    int64_t fault = opens ? open_file(piece, place) : 0;
    if (fault && fault != EMFILE && fault != ENFILE)
        return fault;
    if (piece->descriptor < 0 ? stat(place, &status) : fstat((int)piece->descriptor, &status))
        return errno;
    if (!S_ISREG(status.st_mode))
        return S_ISDIR(status.st_mode) ? DIRECTORY : IRREGULAR;
    piece->size = status.st_size;
    return piece->size ? PENDING : EMPTY;
}

static int64_t fill(struct piece *piece, int64_t descriptor, uint8_t *buffer) {
    for (piece->done = 0; piece->done < piece->size;) {
        ssize_t more = pread((int)descriptor, buffer + piece->offset + piece->done,
                             (size_t)(piece->size - piece->done), piece->start + piece->done);
        if (more < 0 && errno != EINTR)
            return errno;
        if (!more)
            return SHORT;
        piece->done += more > 0 ? more : 0;
    }
    return 0;
}

static int64_t read_range(struct piece *range, uint8_t *buffer) {
    struct stat status;
    int64_t descriptor = range->file->descriptor;
    int64_t fault = descriptor < 0 ? -descriptor : fill(range, descriptor, buffer);
    if (fault > 0)
        return fault;
    if (fstat((int)descriptor, &status)) /* after the read: what was read before a change is right */
        return errno;
    int64_t modified = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    if (status.st_size == range->file->size && modified == range->file->modified)
        return fault;
    range->done = status.st_size;
    return CHANGED;
}

/* Measures files whose size is 0, and leaves the first `opened` of them open. Returns how many are no longer PENDING.
 *
 * base: the directory that relative places start from. prefix, entries: the place of each file is the prefix and its
 * entry, which ends with a NUL. */
int64_t gpuflow_open_files(const char *base, const char *prefix, const char *entries, struct piece *files,
                           int64_t count, int64_t opened) {
    char place[PATH_MAX];
    int64_t faults = 0;
    for (int64_t i = 0; i < count; i++, entries += strlen(entries) + 1) {
        struct piece *file = &files[i];
        if (file->fault != PENDING || file->size)
            continue;
        int64_t fault = find_place(place, base, prefix, entries);
        file->fault = fault ? fault : measure(file, place, i < opened);
        if (file->fault != PENDING)
            close_file(file);
        faults += file->fault != PENDING;
    }
    return faults;
}

/* Reads and closes files that `gpuflow_open_files` measured. Opens those that are not open. Returns how many failed. */
int64_t gpuflow_read_files(const char *base, const char *prefix, const char *entries, struct piece *files,
                           int64_t count, uint8_t *buffer) {
    char place[PATH_MAX];
    int64_t faults = 0;
    for (int64_t i = 0; i < count; i++, entries += strlen(entries) + 1) {
        struct piece *file = &files[i];
        if (file->fault != PENDING)
            continue;
        file->fault = 0;
        if (file->descriptor < 0) {
            int64_t fault = find_place(place, base, prefix, entries);
            file->fault = fault ? fault : open_file(file, place);
        }
        if (!file->fault)
            file->fault = fill(file, file->descriptor, buffer);
        close_file(file);
        faults += file->fault != 0;
    }
    return faults;
}

/* Reads ranges of files that are open. Returns how many failed. */
int64_t gpuflow_read_ranges(struct piece *ranges, int64_t count, uint8_t *buffer) {
    int64_t faults = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ranges[i].fault != PENDING || !ranges[i].file)
            continue;
        ranges[i].fault = read_range(&ranges[i], buffer);
        ranges[i].file = NULL;
        faults += ranges[i].fault != 0;
    }
    return faults;
}
