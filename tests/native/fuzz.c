/* Run by fuzz.py under the compiler's sanitizers: the C library on random programs, and on JPEGs that were changed.
 *
 * Arguments: a seed, the number of the first case and that of the one after the last, seconds after which no case is
 * begun, threads, whether to print the hash of each case, a libjpeg-turbo, and JPEGs.
 *
 * The seed and its number decide what a case is. Memory that the library is given ends with its last byte, so that a
 * sanitizer sees each read or write next to it. Prints how many cases were run, how many JPEGs of these were read by
 * each function, and the sum of the hashes of the results. The case in which a sanitizer ends the process is printed,
 * and its JPEG is written to a file. */

#include "chunk.c"
#include "mask.c"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

void gpuflow_headers(const uint8_t *, const int64_t *, const int64_t *, int64_t, int64_t, int64_t, int64_t *);
void gpuflow_baseline(int64_t *, int64_t, struct pool *, int64_t);
void gpuflow_complete(const int64_t *, int64_t, struct pool *, uint8_t *);
int gpuflow_open_jpeg(const char *, char *, int64_t);
int gpuflow_accept_jpeg(const uint8_t *, int64_t, int64_t, int64_t);

enum { FILE_KIND, HEIGHT, WIDTH, ORIENTATION, SAMPLING, SCAN, INTERVAL, COLUMNS }; /* as in header_scan.c */
enum { BASELINE = 1, LAST_OPERATION = 9, MATRIX = 6, ERASE = 7, HUE = 3, TABLE = 5 }; /* as in color.c */
enum { MOST_BLOCKS = 256, MOST_SEGMENTS = 64, MOST_SAMPLES = 3, MOST_STEPS = 5, MOST_OUTPUTS = 3, MOST_RUNNERS = 64 };
enum { ORDINARY, COMPLETE, REWRITTEN, ACCEPTED, DECODED_REGIONS, STOPPED_SAMPLES, COUNTERS };

/* Data in memory of exactly their size. */
struct data {
    uint8_t *bytes;
    int64_t size;
};

static struct data *files;
static int64_t file_count;
static uint64_t seed;
static int64_t next_case, last_case, counters[COUNTERS];
static uint64_t sum_of_hashes;
static double end_time;
static int prints_hashes, ended;
static const int32_t never = 0;

/* A thread, and the case that it runs. stop: which another thread sets at any time. */
struct runner {
    uint64_t random, hash;
    int64_t number;
    int32_t stop;
    void *blocks[MOST_BLOCKS];
    int block_count;
    struct data jpeg;
};

static struct runner runners[MOST_RUNNERS];
static __thread struct runner *current;

/* --- what is random ----------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x) { /* splitmix64, by Sebastiano Vigna */
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static uint64_t random_bits(struct runner *r) { return mix(r->random += 0x9E3779B97F4A7C15); }

/* Returns a number from 0 to count - 1. */
static int64_t below(struct runner *r, int64_t count) { return (int64_t)(random_bits(r) % (uint64_t)count); }

static int64_t between(struct runner *r, int64_t low, int64_t high) { return low + below(r, high - low + 1); }

static double real(struct runner *r, double low, double high) {
    return low + (high - low) * (double)(random_bits(r) >> 11) * 0x1p-53;
}

static int64_t side(struct runner *r) {
    static const int64_t sides[] = {1, 2, 3, 5, 7, 16, 17, 31, 32, 33, 61, 64, 97, 127, 131};
    return below(r, 40) ? sides[below(r, 15)] : below(r, 8) ? between(r, 1, 400) : between(r, 1, 3000);
}

static void add_to_hash(struct runner *r, const void *bytes, int64_t size) {
    const uint8_t *at = bytes;
    uint64_t hash = r->hash, word = 0;
    for (; size >= 8; size -= 8, at += 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 29;
    }
    for (; size > 0; size--, at++)
        hash = (hash ^ *at) * 0x100000001B3;
    r->hash = mix(hash);
}

/* Returns memory of exactly this size, which lives as long as the case. */
static void *block(struct runner *r, int64_t size) {
    if (r->block_count == MOST_BLOCKS)
        abort();
    return r->blocks[r->block_count++] = malloc((size_t)size);
}

static void *random_block(struct runner *r, int64_t size) {
    uint8_t *bytes = block(r, size);
    const int is_noise = below(r, 4) != 0;
    uint64_t bits = random_bits(r);
    for (int64_t i = 0; i < size; i++) {
        if (i % 8 == 0 && is_noise)
            bits = random_bits(r);
        bytes[i] = (uint8_t)(bits >> i % 8 * 8);
    }
    return bytes;
}

/* --- JPEGs -------------------------------------------------------------------------------------------------------- */

/* Writes where segments begin, of which a scan's ends with its data, and where the last one ends. Returns how many there
 * are. */
static int find_segments(struct data file, int64_t *places) {
    int64_t at = 2;
    int count = 0;
    while (count < MOST_SEGMENTS - 1 && at + 4 <= file.size && file.bytes[at] == 0xFF) {
        places[count++] = at;
        int is_scan = file.bytes[at + 1] == 0xDA;
        at += 2 + (file.bytes[at + 2] << 8 | file.bytes[at + 3]);
        while (is_scan && at + 1 < file.size && !(file.bytes[at] == 0xFF && file.bytes[at + 1] & 0x40 &&
                                                  (file.bytes[at + 1] < 0xD0 || file.bytes[at + 1] > 0xD7)))
            at++;
    }
    places[count] = at < file.size ? at : file.size;
    return count;
}

/* Returns a file with `size` bytes in place of those from `to` to `after`. */
static struct data spliced(struct runner *r, struct data file, int64_t to, int64_t after, const uint8_t *bytes,
                           int64_t size) {
    struct data made = {NULL, to + size + file.size - after};
    made.bytes = block(r, made.size);
    memcpy(made.bytes, file.bytes, (size_t)to);
    memcpy(made.bytes + to, bytes, (size_t)size);
    memcpy(made.bytes + to + size, file.bytes + after, (size_t)(file.size - after));
    return made;
}

static struct data changed_segments(struct runner *r, struct data file) {
    int64_t places[MOST_SEGMENTS], others[MOST_SEGMENTS];
    const struct data other = below(r, 2) ? files[below(r, file_count)] : file;
    int count = find_segments(file, places), other_count = find_segments(other, others);
    if (!count || !other_count)
        return file;
    const int64_t at = below(r, count), from = below(r, other_count);
    const uint8_t *segment = other.bytes + others[from];
    switch (below(r, 4)) {
    case 0: /* left out */
        return spliced(r, file, places[at], places[at + 1], segment, 0);
    case 1: /* another one in its place */
        return spliced(r, file, places[at], places[at + 1], segment, others[from + 1] - others[from]);
    case 2: /* one more */
        return spliced(r, file, places[at], places[at], segment, others[from + 1] - others[from]);
    default: { /* another length */
        struct data made = spliced(r, file, 0, 0, segment, 0);
        made.bytes[places[at] + 2] = (uint8_t)(below(r, 3) ? made.bytes[places[at] + 2] : below(r, 256));
        made.bytes[places[at] + 3] = (uint8_t)(made.bytes[places[at] + 3] + between(r, -20, 20));
        return made;
    }
    }
}

/* Returns a file with other bytes at some places, most of them within its headers. */
static struct data changed_bytes(struct runner *r, struct data file) {
    struct data made = spliced(r, file, 0, 0, file.bytes, 0);
    const int64_t most = below(r, 3) || file.size < 700 ? file.size : 700;
    for (int64_t times = between(r, 1, 6); times > 0 && most; times--) {
        uint8_t *byte = &made.bytes[below(r, most)];
        switch (below(r, 3)) {
        case 0:
            *byte ^= (uint8_t)(1 << below(r, 8));
            break;
        case 1:
            *byte = (uint8_t)below(r, 256);
            break;
        default:
            *byte = (const uint8_t[]){0x00, 0xFF, 0xC4, 0xD0, 0xDA, 0xD9, 0x11, 0x22}[below(r, 8)];
        }
    }
    return made;
}

static struct data cut(struct runner *r, struct data file) {
    struct data made = spliced(r, file, below(r, file.size + 1), file.size, file.bytes, 0);
    if (made.size > 4 && below(r, 2))
        memcpy(made.bytes + made.size - 2, "\xFF\xD9", 2);
    else if (made.size > 4 && below(r, 4) == 0) /* a segment whose length is cut off */
        memcpy(made.bytes + made.size - 3, "\xFF\xE1", 3);
    return made;
}

static struct data random_jpeg(struct runner *r, int is_changed) {
    const struct data *file = &files[below(r, file_count)];
    struct data made = spliced(r, *file, 0, 0, file->bytes, 0);
    for (int64_t times = is_changed ? between(r, 1, 3) : 0; times > 0; times--) {
        int64_t way = below(r, 8);
        made = way < 4 ? changed_bytes(r, made) : way < 7 ? changed_segments(r, made) : cut(r, made);
    }
    return r->jpeg = made;
}

/* Writes the size that a frame header gives. Returns 0 if there is none, or the image is large. */
static int find_size(struct data file, int64_t *height, int64_t *width) {
    int64_t places[MOST_SEGMENTS];
    int count = find_segments(file, places);
    for (int i = 0; i < count; i++) {
        const uint8_t *at = file.bytes + places[i];
        if (at[1] >= 0xC0 && at[1] <= 0xC2 && places[i] + 9 <= file.size) {
            *height = at[5] << 8 | at[6];
            *width = at[7] << 8 | at[8];
            return *height && *width && *height * *width < 1 << 22;
        }
    }
    return 0;
}

static void random_box(struct runner *r, int64_t height, int64_t width, int64_t *box) {
    const int is_whole = below(r, 4) == 0;
    box[2] = is_whole ? height : between(r, 1, height);
    box[3] = is_whole ? width : between(r, 1, width);
    box[0] = below(r, height - box[2] + 1);
    box[1] = below(r, width - box[3] + 1);
}

/* As complete.py describes a file whose header was read. */
static int complete(struct runner *r, struct data file, const int64_t *header) {
    int64_t across = header[SAMPLING] ? header[SAMPLING] >> 4 : 1, down = header[SAMPLING] ? header[SAMPLING] & 15 : 1;
    int64_t units = (header[WIDTH] + 8 * across - 1) / (8 * across) * ((header[HEIGHT] + 8 * down - 1) / (8 * down));
    int64_t interval = header[INTERVAL], restarts = interval ? (units + interval - 1) / interval - 1 : 0;
    int64_t described[8] = {(int64_t)(uintptr_t)file.bytes, file.size, header[SCAN], header[SAMPLING] ? 3 : 1,
                             across * down, units, interval, restarts};
    uint8_t found = 0;
    if (2 * restarts < file.size)
        gpuflow_complete(described, 1, NULL, &found);
    add_to_hash(r, &found, 1);
    return found;
}

static void read_jpeg(struct runner *r) {
    struct data file = random_jpeg(r, below(r, 8) != 0);
    int64_t offset = 0, header[COLUMNS] = {0}, height, width, region[4], done[COUNTERS] = {0};
    gpuflow_headers(file.bytes, &offset, &file.size, 1, below(r, 2), below(r, 2) ? 100 : below(r, 12), header);
    add_to_hash(r, header, sizeof header);
    done[ORDINARY] = header[FILE_KIND] == BASELINE;
    if (header[FILE_KIND] == BASELINE)
        done[COMPLETE] = complete(r, file, header);
    const int64_t most = file.size * 5 / 4 + 4096, room = below(r, 5) ? most : below(r, most) + 1;
    int64_t one[5] = {(int64_t)(uintptr_t)file.bytes, file.size, (int64_t)(uintptr_t)block(r, room), room, 0};
    gpuflow_baseline(one, 1, NULL, below(r, 3));
    add_to_hash(r, (void *)(uintptr_t)one[2], one[4]);
    done[REWRITTEN] = one[4] > 0;
    if (find_size(file, &height, &width)) {
        const int status = gpuflow_accept_jpeg(file.bytes, file.size, height, width), color = (int)below(r, 3);
        random_box(r, height, width, region);
        const int64_t row = region[3] * (color == JPEG_GRAY ? 1 : 3), pitch = row + (below(r, 2) ? 0 : below(r, 70));
        const int64_t bytes = (region[2] - 1) * pitch + row;
        uint8_t *out = memset(block(r, bytes), 7, (size_t)bytes);
        const int decoded = gpuflow_decode_jpeg(file.bytes, file.size, color, height, width, region, out, pitch, NULL);
        done[ACCEPTED] = status == DONE;
        done[DECODED_REGIONS] = decoded == DONE;
        add_to_hash(r, &status, sizeof status);
        if (decoded == DONE)
            add_to_hash(r, out, bytes);
    }
    for (int i = 0; i < COUNTERS; i++)
        __atomic_fetch_add(&counters[i], done[i], __ATOMIC_RELAXED);
}

/* --- programs ----------------------------------------------------------------------------------------------------- */

/* The image of a sample between steps. */
struct shape {
    int64_t top, left, height, width;
};

static void box_of(struct runner *r, struct shape shape, int64_t *box) {
    random_box(r, shape.height, shape.width, box);
    box[0] += shape.top;
    box[1] += shape.left;
}

/* Parts of a grid, which may be empty. */
static void random_part(struct runner *r, int64_t height, int64_t width, int64_t *part) {
    random_box(r, height, width, part);
    if (below(r, 30) == 0)
        part[2 + below(r, 2)] = 0;
}

static struct shape random_resampling(struct runner *r, struct shape shape, struct resampling *made) {
    box_of(r, shape, made->box);
    for (int i = 0; i < 2; i++) {
        const int64_t length = made->box[2 + i], way = below(r, 8);
        made->grid[i] = way < 2 ? length : way == 2 ? 2 * length : side(r);
        made->mirrors[i] = below(r, 2);
        made->flips[i] = below(r, 2);
    }
    random_part(r, made->grid[0], made->grid[1], made->shown);
    memcpy(made->window, made->shown, sizeof made->window);
    const int is_shown = below(r, 2) == 0;
    for (int i = 0; i < 2; i++) {
        if (made->window[2 + i] < 1 || !is_shown || below(r, 8) == 0) {
            made->window[2 + i] = side(r);
            made->window[i] = between(r, -made->window[2 + i] - 3, made->grid[i] + 3);
        }
    }
    return (struct shape){0, 0, made->window[2], made->window[3]};
}

static double wild(struct runner *r) {
    static const double numbers[] = {0, -0.0, 1, -1, 0.5, 255, 0x1p31, -0x1p31, 0x1p52, 1e-12, 1e-300, 1e30, 1e300,
                                     INFINITY, -INFINITY, NAN};
    return numbers[below(r, 16)];
}

static void random_matrix(struct runner *r, double *m) {
    const int64_t way = below(r, 8);
    const double identity[9] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
    memcpy(m, identity, sizeof identity);
    for (int i = 0; i < 6; i++)
        m[i] = i % 3 == 2 ? real(r, -90, 90) : way < 5 ? real(r, -2, 2) : m[i];
    if (way < 2) { /* the third coordinate stays near 1, or not */
        m[6] = real(r, -0.005, 0.005) * (way ? 1 : 40);
        m[7] = real(r, -0.005, 0.005) * (way ? 1 : 40);
    } else if (way == 5) { /* mirrors and shifts by whole pixels */
        m[0] = below(r, 2) ? 1 : -1;
        m[4] = below(r, 2) ? 1 : -1;
        m[2] = (double)between(r, -140, 140);
        m[5] = (double)between(r, -140, 140);
    } else if (way == 6) {
        for (int i = 0; i < 9; i++)
            m[i] *= below(r, 3) ? 1 : real(r, -1e6, 1e6);
    } else if (way == 7) {
        for (int64_t times = between(r, 1, 3); times > 0; times--)
            m[below(r, 9)] = wild(r);
    }
}

static struct shape random_warping(struct runner *r, struct shape shape, struct warping *made) {
    box_of(r, shape, made->box);
    random_matrix(r, made->matrix);
    made->size[0] = side(r);
    made->size[1] = side(r);
    random_part(r, made->size[0], made->size[1], made->shown);
    return (struct shape){0, 0, made->size[0], made->size[1]};
}

/* Returns symmetric weights, an odd number of them, whose sum is 1. */
static double *random_weights(struct runner *r, int64_t *count) {
    *count = 1 + 2 * (below(r, 8) ? below(r, 6) : below(r, 40));
    double *weights = block(r, *count * (int64_t)sizeof *weights), sum = 0;
    for (int64_t i = 0; i <= *count / 2; i++) {
        weights[i] = weights[*count - 1 - i] = real(r, 0, 1);
        sum += weights[i] * (i == *count / 2 ? 1 : 2);
    }
    for (int64_t i = 0; i < *count; i++)
        weights[i] /= sum;
    return weights;
}

static void random_filter(struct runner *r, struct local_filter *made) {
    made->rows = random_weights(r, &made->high);
    made->columns = random_weights(r, &made->wide);
    if (below(r, 5) == 0)
        made->rows = NULL;
    made->centre = below(r, 2) ? 0 : real(r, -1, 1);
    made->factor = below(r, 2) ? 0 : real(r, 0, 5);
    made->keep = below(r, 2);
}

static const struct operations *random_operations(struct runner *r, int64_t samples) {
    struct operations *made = block(r, sizeof *made);
    made->count = below(r, 5);
    int64_t *codes = block(r, samples * made->count * 8);
    double *factors = block(r, samples * made->count * 8), *values = block(r, 2 * 12 * 8);
    for (int i = 0; i < 12; i++) { /* a matrix, and a box to erase with its colour */
        values[i] = below(r, 40) ? real(r, -1, 2) * (i % 4 == 3 ? 90 : 1) : wild(r);
        values[12 + i] = i < 2 ? (double)between(r, -20, 100) : i < 4 ? (double)below(r, 100) : (double)below(r, 256);
    }
    for (int64_t i = 0; i < samples * made->count; i++) {
        codes[i] = between(r, -1, LAST_OPERATION);
        factors[i] = codes[i] == TABLE    ? (double)below(r, 2)
                     : codes[i] == MATRIX ? 0
                     : codes[i] == ERASE  ? 1
                     : codes[i] == HUE    ? real(r, -0.5, 0.5)
                     : below(r, 40)       ? real(r, -0.2, 3)
                                          : wild(r);
    }
    *made = (struct operations){codes, factors, made->count, random_block(r, 2 * 3 * 256), values};
    return made;
}

/* Adds a step to an output, and changes the shapes of the samples' images. Returns the bytes of an item. */
static int64_t random_step(struct runner *r, struct step *step, int64_t samples, int64_t channels, int is_last,
                           struct shape *shapes) {
    const int64_t kind = below(r, is_last ? 7 : 5);
    switch (kind) {
    case 0:
    case 5: {
        struct resampling *made = block(r, samples * (int64_t)sizeof *made);
        for (int64_t i = 0; i < samples; i++)
            shapes[i] = random_resampling(r, shapes[i], &made[i]);
        struct filter *filter = random_block(r, sizeof *filter);
        filter->interpolation = below(r, 3);
        filter->antialias = below(r, 2);
        *step = (struct step){RESAMPLE, made, filter};
        return 1;
    }
    case 1: {
        struct warping *made = block(r, samples * (int64_t)sizeof *made);
        for (int64_t i = 0; i < samples; i++)
            shapes[i] = random_warping(r, shapes[i], &made[i]);
        struct view *view = random_block(r, sizeof *view);
        view->interpolation = below(r, 2);
        view->border = below(r, 4);
        view->as_torchvision = below(r, 4) == 0;
        *step = (struct step){WARP, made, view};
        return 1;
    }
    case 2: {
        struct local_filter *made = block(r, samples * (int64_t)sizeof *made);
        for (int64_t i = 0; i < samples; i++)
            random_filter(r, &made[i]);
        *step = (struct step){FILTER, made, NULL};
        return 1;
    }
    case 3:
    case 4:
        *step = (struct step){OPERATE, random_operations(r, samples), NULL};
        return 1;
    default: {
        struct table *made = block(r, sizeof *made);
        const int64_t bytes = 1 << below(r, 4);
        *made = (struct table){random_block(r, channels * 256 * bytes), bytes, below(r, 2)};
        *step = (struct step){LOOK_UP, made, NULL};
        return bytes;
    }
    }
}

static void random_output(struct runner *r, struct output *output, const struct shape *inputs, int64_t samples,
                          int64_t channels) {
    struct shape shapes[MOST_SAMPLES];
    struct step *steps = block(r, MOST_STEPS * (int64_t)sizeof *steps);
    int64_t count = below(r, MOST_STEPS + 1), item_bytes = 1, most = 0;
    memcpy(shapes, inputs, sizeof shapes);
    for (int64_t i = 0; i < count; i++)
        item_bytes = random_step(r, &steps[i], samples, channels, i + 1 == count, shapes);
    for (int64_t i = 0; i < samples; i++)
        if (shapes[i].height * shapes[i].width > most)
            most = shapes[i].height * shapes[i].width;
    most *= channels * item_bytes;
    *output = (struct output){steps, count, memset(block(r, samples * most), 7, (size_t)(samples * most)), most};
}

/* An image in memory, or a JPEG of which a region is decoded. */
static struct shape random_input(struct runner *r, struct input *input, int64_t channels, int is_jpeg) {
    int64_t height, width;
    *input = (struct input){.orientation = UPRIGHT};
    if (is_jpeg) {
        const struct data file = random_jpeg(r, below(r, 3) == 0);
        if (!find_size(file, &height, &width))
            return (struct shape){0, 0, 1, 1}; /* left out */
        input->data = file.bytes;
        input->size = file.size;
        input->height = height;
        input->width = width;
        random_box(r, height, width, input->region);
        if (below(r, 3) == 0) {
            input->orientation = between(r, 1, 8);
            memcpy(input->region, (int64_t[]){0, 0, height, width}, sizeof input->region);
            if (input->orientation >= SWAPPED)
                return (struct shape){0, 0, width, height};
        }
    } else {
        height = side(r);
        width = below(r, 2) ? side(r) : 1 + below(r, 40);
        const int64_t row = width * channels;
        input->channels = channels;
        input->size = row + (below(r, 2) ? 0 : below(r, 70));
        input->data = random_block(r, (height - 1) * input->size + row);
        memcpy(input->region, (int64_t[]){below(r, 30), below(r, 30), height, width}, sizeof input->region);
    }
    return (struct shape){input->region[0], input->region[1], input->region[2], input->region[3]};
}

static void run_program(struct runner *r) {
    const int64_t samples = below(r, 2) ? 1 : between(r, 1, MOST_SAMPLES), channels = below(r, 3) ? 3 : 1;
    const int64_t outputs = below(r, 2) ? 1 : between(r, 1, MOST_OUTPUTS), is_stopped = below(r, 4) == 0;
    struct input *inputs = block(r, samples * (int64_t)sizeof *inputs);
    struct output *made = block(r, outputs * (int64_t)sizeof *made);
    struct shape shapes[MOST_SAMPLES] = {{0}};
    for (int64_t i = 0; i < samples; i++)
        shapes[i] = random_input(r, &inputs[i], channels, below(r, 3) == 0);
    for (int64_t i = 0; i < outputs; i++)
        random_output(r, &made[i], shapes, samples, channels);
    int64_t *statuses = memset(block(r, samples * 8), 0xFF, (size_t)samples * 8);
    const int color = channels == 1 ? JPEG_GRAY : below(r, 2) ? JPEG_RGB : JPEG_BGR;
    struct pool *pool = below(r, 8) ? NULL : gpuflow_new_pool(between(r, 1, 4));
    struct chunk chunk = {inputs, made, outputs, color, statuses, is_stopped ? &r->stop : &never, pool, 0};
    gpuflow_run_chunk(&chunk, samples, -1);
    if (pool)
        gpuflow_free_pool(pool);
    for (int64_t i = 0; i < samples; i++) {
        if (statuses[i] < (inputs[i].data ? DONE : -1) || statuses[i] > REFUSED || (!is_stopped && statuses[i] == STOPPED))
            abort();
        if (statuses[i] == STOPPED)
            __atomic_fetch_add(&counters[STOPPED_SAMPLES], 1, __ATOMIC_RELAXED);
        for (int64_t k = 0; k < outputs && statuses[i] == DONE && !is_stopped; k++)
            add_to_hash(r, made[k].slots + i * made[k].slot_bytes, made[k].slot_bytes);
    }
}

/* --- masks -------------------------------------------------------------------------------------------------------- */

static void draw_mask(struct runner *r) {
    const int64_t height = side(r), width = side(r), count = between(r, 1, 12), far = below(r, 20) ? 2 : 400;
    double *outline = block(r, count * 16);
    for (int64_t i = 0; i < count; i++) {
        outline[2 * i] = real(r, 1 - (double)far, (double)far) * (double)width;
        outline[2 * i + 1] = real(r, 1 - (double)far, (double)far) * (double)height;
    }
    uint8_t *down = memset(block(r, height * width), 0, (size_t)(height * width));
    gpuflow_draw_outline(outline, count, width, height, between(r, 1, 255), down);
    add_to_hash(r, down, height * width);
}

/* Returns lines of a map: places of a line of `side` pixels, or outside. */
static int64_t *random_lines(struct runner *r, int64_t count, int64_t length) {
    int64_t *lines = block(r, count * 8);
    for (int64_t i = 0; i < count; i++)
        lines[i] = between(r, -1, length - 1);
    return lines;
}

static void warp_mask(struct runner *r) {
    const int64_t height = side(r), width = side(r), size[2] = {side(r), side(r)}, kind = between(r, INT32, INT64);
    double matrix[9];
    int64_t shown[4];
    struct mask_map map = {.height = side(r), .width = side(r), .stride = width, .kind_of_result = kind};
    map.rows = random_lines(r, map.height, height);
    map.columns = random_lines(r, map.width, width);
    random_matrix(r, matrix);
    random_part(r, size[0], size[1], shown);
    void *places = block(r, size[0] * size[1] * (kind == INT64 ? 8 : 4));
    gpuflow_warp_mask_map(&map, matrix, below(r, 4), below(r, 4) == 0, shown, size[0], size[1], places);
    int64_t rows = side(r), columns = side(r);
    const struct mask_map made = {random_lines(r, rows, size[0]), random_lines(r, columns, size[1]), rows, columns,
                                  places, size[1], kind, kind};
    const uint8_t *mask = random_block(r, height * width);
    uint8_t *out = block(r, rows * columns);
    gpuflow_apply_mask_map(&made, mask, below(r, 256), out);
    add_to_hash(r, out, rows * columns);
}

/* --- cases -------------------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void run_case(struct runner *r) {
    r->random = mix(seed ^ mix((uint64_t)r->number));
    r->hash = 0;
    r->jpeg = (struct data){NULL, 0};
    __atomic_store_n(&r->stop, 0, __ATOMIC_RELAXED);
    switch (below(r, 10)) {
    case 0:
        draw_mask(r);
        break;
    case 1:
        warp_mask(r);
        break;
    case 2:
    case 3:
    case 4:
        for (int times = 0; times < 4; times++)
            read_jpeg(r);
        break;
    default:
        run_program(r);
    }
    while (r->block_count)
        free(r->blocks[--r->block_count]);
    if (prints_hashes)
        printf("%ld %016lx\n", (long)r->number, (unsigned long)r->hash);
    __atomic_fetch_add(&sum_of_hashes, mix(r->hash ^ (uint64_t)r->number), __ATOMIC_RELAXED);
}

static void *run_cases(void *argument) {
    struct runner *r = current = argument;
    while (now() < end_time && (r->number = __atomic_fetch_add(&next_case, 1, __ATOMIC_RELAXED)) < last_case)
        run_case(r);
    return NULL;
}

/* Stops threads at times that differ from run to run. */
static void *stop_runners(void *argument) {
    const int64_t *count = argument;
    struct runner r = {.random = seed};
    while (!__atomic_load_n(&ended, __ATOMIC_RELAXED)) {
        usleep((unsigned)below(&r, 2000));
        __atomic_store_n(&runners[below(&r, *count)].stop, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

/* A sanitizer ends the process by a signal: see the options below. */
static void report_case(int number) {
    (void)number;
    if (!current)
        _exit(1);
    fprintf(stderr, "case %ld of seed %lu\n", (long)current->number, (unsigned long)seed);
    char name[64];
    snprintf(name, sizeof name, "fuzz-%lu-%ld.jpg", (unsigned long)seed, (long)current->number);
    FILE *file = current->jpeg.bytes ? fopen(name, "wb") : NULL;
    if (file) {
        fwrite(current->jpeg.bytes, 1, (size_t)current->jpeg.size, file);
        fclose(file);
        fprintf(stderr, "its last JPEG is written to %s\n", name);
    }
    _exit(1);
}

const char *__asan_default_options(void) { return "abort_on_error=1:handle_abort=0:allocator_may_return_null=1"; }
const char *__ubsan_default_options(void) { return "abort_on_error=1:print_stacktrace=1"; }
const char *__tsan_default_options(void) { return "abort_on_error=1:halt_on_error=1"; }

static int read_files(int count, char **names) {
    files = calloc((size_t)count, sizeof *files);
    for (; file_count < count; file_count++) {
        FILE *file = fopen(names[file_count], "rb");
        struct data *data = &files[file_count];
        data->bytes = malloc(1 << 20);
        data->size = file ? (int64_t)fread(data->bytes, 1, 1 << 20, file) : 0;
        if (data->size < 4)
            return 0;
        fclose(file);
    }
    return 1;
}

int main(int count, char **arguments) {
    enum { SEED = 1, FIRST, LAST, SECONDS, THREADS, PRINTS_HASHES, LIBRARY, FILES };
    char text[500];
    if (count <= FILES || !read_files(count - FILES, arguments + FILES))
        return 2;
    if (!gpuflow_open_jpeg(arguments[LIBRARY], text, sizeof text)) {
        fprintf(stderr, "%s: %s\n", arguments[LIBRARY], text);
        return 2;
    }
    const int64_t first = next_case = atol(arguments[FIRST]), threads = atol(arguments[THREADS]);
    seed = strtoul(arguments[SEED], NULL, 10);
    last_case = atol(arguments[LAST]);
    end_time = now() + atof(arguments[SECONDS]);
    prints_hashes = atoi(arguments[PRINTS_HASHES]);
    signal(SIGABRT, report_case);
    pthread_t started[MOST_RUNNERS], stopper;
    pthread_create(&stopper, NULL, stop_runners, (void *)&threads);
    for (int64_t i = 0; i < threads; i++)
        pthread_create(&started[i], NULL, run_cases, &runners[i]);
    for (int64_t i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    __atomic_store_n(&ended, 1, __ATOMIC_RELAXED);
    pthread_join(stopper, NULL);
    for (int64_t i = 0; i < file_count; i++)
        free(files[i].bytes);
    free(files);
    printf("%ld", (long)((next_case < last_case ? next_case : last_case) - first));
    for (int i = 0; i < COUNTERS; i++)
        printf(" %ld", (long)counters[i]);
    printf(" %016lx\n", (unsigned long)sum_of_hashes);
    return 0;
}
