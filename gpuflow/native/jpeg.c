/* Decodes a JPEG, or a region of it, through libjpeg's API 6.2, from a libjpeg-turbo that libjpeg_turbo.py finds.
 *
 * Nothing is linked: the library is opened while the process runs. The structures are those of libjpeg-turbo's
 * jpeglib.h with JPEG_LIB_VERSION 62, up to the last field that is used here.
 *
 * Each call has a new decompressor, because one that is used again keeps the tables of the file before. An error ends a
 * file, and so does a warning: the data are damaged. libjpeg reports both by functions that must not return, so these
 * jump back into `run`.
 */

#define _GNU_SOURCE
#include "image.h"
#include "jpeg.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct errors { /* jpeg_error_mgr */
    void (*error_exit)(void *);
    void (*emit_message)(void *, int);
    void (*output_message)(void *);
    void (*format_message)(void *, char *);
    void (*reset_error_mgr)(void *);
    int code;
    union {
        int numbers[8];
        char text[80];
    } parameters;
    int trace_level;
    long warnings;
    const char *const *table;
    int last;
    const char *const *addon;
    int first_addon, last_addon;
};

struct progress { /* jpeg_progress_mgr */
    void (*monitor)(void *);
    long counter, limit;
    int completed, total;
};

struct memory { /* jpeg_memory_mgr */
    void (*functions[11])(void);
    long most, largest;
};

struct decompressor { /* jpeg_decompress_struct */
    struct errors *errors;
    struct memory *memory;
    struct progress *progress;
    void *client;
    int is_decompressor, state;
    void *source;
    unsigned image_width, image_height;
    int components, file_color, color;
    unsigned scale_numerator, scale_denominator;
    double gamma;
    int is_buffered, is_raw, dct, upsampling, smoothing, quantize[7];
    unsigned width, height; /* of the output */
    int color_components, channels, rows_at_once, colors;
    void *colormap;
    unsigned row; /* that is read next */
    int scan;
    unsigned scan_row;
    int output_scan;
    unsigned output_scan_row;
    int (*precision)[64]; /* of a progressive file: the lowest bit that is known of each component's coefficients */
    void *tables[12];
    int bits;
    uint8_t rest[632 - 300];
};
_Static_assert(sizeof(void *) == 8 && sizeof(long) == 8 && sizeof(struct decompressor) == 632, "64 bits only");

enum { API = 62, HEADER_OK = 1, WARNING = -1, OUT_OF_MEMORY = 54 };
enum { GRAY = 1, YCC = 3, RGB = 6, BGR = 8 }; /* J_COLOR_SPACE */

/* MARGIN: columns on each side of a region. Interpolation of chroma reads one, but libjpeg does not interpolate chroma
 * that is one sample wide, and two make a region wider. SMOOTHED: the number of a block's first coefficients that libjpeg
 * estimates from blocks farther away than MARGIN, if their lowest bits are missing. */
enum { MARGIN = 2, SMOOTHED = 10, MOST_SCANS = 100, MOST_SIDE = 65500 };

/* Rows are skipped in steps, between which `stop` is read. A step is a whole number of coded units for each sampling
 * that encoders write. */
enum { SKIPPED_ROWS = 512 };

/* libjpeg-turbo's SIMD code writes an aligned row past the cache, and copying it then takes longer. */
enum { UNALIGNED = 1 };

struct library {
    void *handle;
    void (*create)(struct decompressor *, int, size_t);
    void (*destroy)(struct decompressor *);
    void (*set_source)(struct decompressor *, const uint8_t *, unsigned long);
    int (*read_header)(struct decompressor *, int);
    int (*start)(struct decompressor *);
    int (*finish)(struct decompressor *);
    void (*crop)(struct decompressor *, unsigned *, unsigned *);
    unsigned (*skip)(struct decompressor *, unsigned);
    unsigned (*read)(struct decompressor *, uint8_t **, unsigned);
};

static struct library *opened; /* set once */

struct job {
    struct decompressor c;
    struct errors errors;
    struct progress progress;
    jmp_buf leave;
    int status;
    const struct library *library;
    const uint8_t *data;
    int64_t bytes, height, width;
    int color;
    const int32_t *stop;
    uint8_t *scratch; /* a row */
};

__attribute__((noreturn)) static void leave(struct job *job, int status) {
    job->status = status;
    longjmp(job->leave, 1);
}

static void on_error(void *c) {
    struct job *job = ((struct decompressor *)c)->client;
    leave(job, job->errors.code == OUT_OF_MEMORY ? NO_MEMORY : REFUSED);
}

static void on_message(void *c, int level) {
    if (level == WARNING)
        on_error(c);
}

static void on_output(void *c) {
    (void)c;
}

static void on_format(void *c, char *text) {
    (void)c;
    text[0] = 0;
}

static void on_reset(void *c) {
    ((struct decompressor *)c)->errors->warnings = 0;
}

/* Called for each row that is read, and for each row of blocks of each scan of a file with several scans. */
static void on_progress(void *c) {
    struct job *job = ((struct decompressor *)c)->client;
    if (job->stop && is_stopped(job->stop))
        leave(job, STOPPED);
    if (job->c.scan > MOST_SCANS)
        leave(job, REFUSED);
}

static void create(struct job *job) {
    job->errors = (struct errors){.error_exit = on_error,
                                  .emit_message = on_message,
                                  .output_message = on_output,
                                  .format_message = on_format,
                                  .reset_error_mgr = on_reset};
    job->c.errors = &job->errors;
    job->c.client = job;
    job->library->create(&job->c, API, sizeof job->c);
}

/* Reads up to the pixels: the header, and all scans if there are several. */
static void start(struct job *job, unsigned scale) {
    static const int colors[] = {[JPEG_RGB] = RGB, [JPEG_BGR] = BGR, [JPEG_GRAY] = GRAY};
    struct decompressor *c = &job->c;
    create(job);
    job->library->set_source(c, job->data, (unsigned long)job->bytes);
    if (job->library->read_header(c, 1) != HEADER_OK || c->bits != 8 || c->file_color < GRAY || c->file_color > YCC)
        leave(job, REFUSED);
    if (c->image_height != job->height || c->image_width != job->width)
        leave(job, REFUSED);
    /* Of several scans all coefficients are kept, 2 bytes each; sides are filled up to at most 32 pixels more. */
    c->memory->most = (long)(6 * (job->height + 32) * (job->width + 32)) + (1 << 20);
    job->progress.monitor = on_progress;
    c->progress = &job->progress;
    c->color = colors[job->color];
    c->scale_denominator = scale;
    if (!job->library->start(c) || c->channels != (job->color == JPEG_GRAY ? 1 : 3))
        leave(job, REFUSED);
}

static void read_row(struct job *job, uint8_t *row) {
    if (job->library->read(&job->c, &row, 1) < 1)
        leave(job, REFUSED);
}

static uint8_t *new_row(struct job *job) {
    job->scratch = malloc((size_t)job->c.width * (size_t)job->c.channels + UNALIGNED);
    if (!job->scratch)
        leave(job, NO_MEMORY);
    return job->scratch + UNALIGNED;
}

static int is_smoothed(const struct decompressor *c) {
    int smoothed = 0;
    for (int i = 0; c->precision && i < c->components; i++)
        for (int k = 0; k < SMOOTHED; k++)
            smoothed |= c->precision[i][k];
    return smoothed != 0;
}

/* Selects columns and skips rows, as far as the region's pixels do not depend on the others. Returns the first column. */
static int64_t select_pixels(struct job *job, const int64_t *region) {
    struct decompressor *c = &job->c;
    if (is_smoothed(c))
        return 0;
    int64_t y = region[0], x = region[1], end = x + region[3] + MARGIN;
    unsigned left = (unsigned)(x > MARGIN ? x - MARGIN : 0);
    unsigned width = (unsigned)(end < job->width ? end : job->width) - left;
    if (width < c->width)
        job->library->crop(c, &left, &width); /* moves `left` to the first column of its block, and grows `width` */
    while (c->row < y) {
        on_progress(c);
        job->library->skip(c, (unsigned)(y - c->row < SKIPPED_ROWS ? y - c->row : SKIPPED_ROWS));
    }
    return left;
}

static void read_region(struct job *job, const int64_t *region, uint8_t *out, int64_t pitch) {
    struct decompressor *c = &job->c;
    int64_t left = select_pixels(job, region), y = region[0], x = region[1], end = y + region[2], width = region[3];
    uint8_t *row = c->width == width && c->row == y ? NULL : new_row(job);
    while (c->row < end) {
        int64_t at = c->row - y;
        read_row(job, row ? row : out + at * pitch);
        if (row && at >= 0)
            memcpy(out + at * pitch, row + (x - left) * c->channels, (size_t)(width * c->channels));
    }
    if (end == job->height)
        job->library->finish(c); /* reads up to the end marker */
}

static void read_all(struct job *job) {
    uint8_t *row = new_row(job);
    while (job->c.row < job->c.height)
        read_row(job, row);
    job->library->finish(&job->c);
}

/* Writes a region; if it is NULL, decodes the image at an eighth of its size and keeps nothing. */
static int run(struct job *job, const int64_t *region, uint8_t *out, int64_t pitch) {
    if (setjmp(job->leave))
        return job->status;
    start(job, region ? 1 : 8);
    if (region)
        read_region(job, region, out, pitch);
    else
        read_all(job);
    return DONE;
}

static int run_job(struct job *job, const int64_t *region, uint8_t *out, int64_t pitch) {
    job->library = __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
    if (!job->library || job->height < 1 || job->width < 1 || job->height > MOST_SIDE || job->width > MOST_SIDE)
        return REFUSED;
    int status = run(job, region, out, pitch);
    job->library->destroy(&job->c);
    free(job->scratch);
    return status;
}

int gpuflow_decode_jpeg(const uint8_t *data, int64_t bytes, int color, int64_t height, int64_t width,
                        const int64_t *region, uint8_t *out, int64_t pitch, const int32_t *stop) {
    struct job job = {.data = data, .bytes = bytes, .color = color, .height = height, .width = width, .stop = stop};
    return run_job(&job, region, out, pitch);
}

/* DONE if a whole file of this size decodes without an error or a warning. It takes two thirds of the time of
 * gpuflow_decode_jpeg, because only luma is decoded, at an eighth of the size. */
int gpuflow_accept_jpeg(const uint8_t *data, int64_t bytes, int64_t height, int64_t width) {
    struct job job = {.data = data, .bytes = bytes, .color = JPEG_GRAY, .height = height, .width = width};
    return run_job(&job, NULL, NULL, 0);
}

/* Whether a decompressor can be created: libjpeg compares the version of the API, and the size of its structure. */
static int has_this_api(struct job *job, const struct library *library) {
    job->library = library;
    if (setjmp(job->leave))
        return 0;
    create(job);
    library->destroy(&job->c);
    return 1;
}

/* Fills in `library`, except for its handle. Returns 0 if it cannot be used, and writes the reason to `text`. */
static int find_functions(struct library *library, char *text, size_t size) {
    const struct {
        const char *name;
        void *place;
    } wanted[] = {{"jpeg_CreateDecompress", &library->create}, {"jpeg_destroy_decompress", &library->destroy},
                  {"jpeg_mem_src", &library->set_source},      {"jpeg_read_header", &library->read_header},
                  {"jpeg_start_decompress", &library->start},  {"jpeg_finish_decompress", &library->finish},
                  {"jpeg_crop_scanline", &library->crop},      {"jpeg_skip_scanlines", &library->skip},
                  {"jpeg_read_scanlines", &library->read}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = dlsym(library->handle, wanted[i].name);
        if (!function) {
            snprintf(text, size, "it has no function %s", wanted[i].name);
            return 0;
        }
        memcpy(wanted[i].place, &function, sizeof function);
    }
    if (!dlsym(library->handle, "jpeg12_crop_scanline")) {
        snprintf(text, size, "it is older than libjpeg-turbo 3.0");
        return 0;
    }
    /* The library calls its own functions by name. Those of another libjpeg in the global scope (LD_PRELOAD,
     * RTLD_GLOBAL) would get these calls, and the mixture crashes. */
    const void *global = dlsym(RTLD_DEFAULT, "jpeg_CreateDecompress");
    if (global && global != dlsym(library->handle, "jpeg_CreateDecompress")) {
        snprintf(text, size, "another libjpeg is in the process's global scope");
        return 0;
    }
    struct job job = {0};
    if (!has_this_api(&job, library)) {
        snprintf(text, size, "its API is that of libjpeg %d, not 6.2", job.errors.parameters.numbers[0] / 10);
        return 0;
    }
    return 1;
}

/* Makes it the library that all later calls use. Returns 0 if another one is. */
static int set_opened(struct library *library) {
    struct library *first = NULL;
    if (__atomic_compare_exchange_n(&opened, &first, library, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return 1;
    int is_same = first->handle == library->handle;
    dlclose(library->handle);
    free(library);
    return is_same;
}

/* Opens a libjpeg-turbo, once in a process. Returns 1 and writes its path to `text`, or 0 and the reason. */
int gpuflow_open_jpeg(const char *path, char *text, int64_t text_bytes) {
    size_t size = (size_t)text_bytes;
    struct library *library = calloc(1, sizeof *library);
    Dl_info place;
    if (!library || !(library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL))) {
        snprintf(text, size, "%s", library ? dlerror() : "not enough memory");
        free(library);
        return 0;
    }
    if (!find_functions(library, text, size)) {
        dlclose(library->handle);
        free(library);
        return 0;
    }
    snprintf(text, size, "%s", dladdr((void *)library->create, &place) ? place.dli_fname : path);
    if (set_opened(library))
        return 1;
    snprintf(text, size, "this process has opened another one");
    return 0;
}
