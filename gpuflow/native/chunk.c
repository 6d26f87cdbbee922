/* Runs the steps of a program on the samples of a chunk, for execute/cpu/native_chunk.py: one call without the interpreter
 * decodes each image, or takes its pixels, and makes each of its outputs in its slot of the batch. */

#include "color.h"
#include "image.h"
#include "jpeg.h"
#include "local.h"
#include "pool.h"
#include "resample.h"
#include "warp.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What becomes of a sample, besides the values of image.h: it is being worked on. */
enum { RUNNING = REFUSED + 1 };

/* The kinds of steps. */
enum { RESAMPLE, OPERATE, LOOK_UP, WARP, FILTER };

/* EXIF orientations from SWAPPED on swap height and width; these then reverse the order of rows, or of columns. */
enum { UPRIGHT = 1, SWAPPED = 5, COLUMNS_AT_ONCE = 32 };
static const int REVERSES_ROWS[9] = {[3] = 1, [4] = 1, [7] = 1, [8] = 1};
static const int REVERSES_COLUMNS[9] = {[2] = 1, [3] = 1, [6] = 1, [7] = 1};

/* An image of a chunk. data: NULL if there is none; `size` encoded bytes if there are no channels, else the pixels of
 * `region`, of which a row has `size` bytes. height, width: as stored. region: y, x, height, width of what is decoded. */
struct input {
    uint8_t *data;
    int64_t size, height, width, channels, orientation, region[4];
};

/* One step of an output. parameters: an array with a row for each sample, or what all samples have in common; see the
 * kind. settings: what else all samples have in common. */
struct step {
    int64_t kind;
    const void *parameters, *settings;
};

/* The last step of an output that has one: the levels become the numbers of a table [C, 256]. */
struct table {
    const void *numbers;
    int64_t item_bytes, planes;
};

/* One sample's row of the arrays of `Warping` in pipeline/program.py. Boxes are y, x, height, width. */
struct warping {
    double matrix[9];
    int64_t box[4], size[2], shown[4];
};

/* slots: of the chunk, each of `slot_bytes`. */
struct output {
    const struct step *steps;
    int64_t count;
    uint8_t *slots;
    int64_t slot_bytes;
};

/* color: of decoded images, see jpeg.h. pool: whose threads run the samples; NULL for the calling thread. nanoseconds: of
 * processor time of the pool's threads is added to it. */
struct chunk {
    const struct input *inputs;
    const struct output *outputs;
    int64_t output_count, color;
    int64_t *statuses;
    const int32_t *stop;
    struct pool *pool;
    int64_t nanoseconds;
};

/* Memory for images between steps, which grows. DECODED holds the image that all outputs are made of. */
enum { DECODED, TURNED, FIRST, SECOND, BUFFERS };
enum { MOST_KEPT_BYTES = 1 << 24 };
struct buffers {
    uint8_t *bytes[BUFFERS];
    int64_t sizes[BUFFERS];
};

/* libjpeg-turbo writes aligned rows past the cache, so rows begin a byte after what would be aligned. */
enum { ALIGNMENT = 64, OFFSET = 1 };

/* Returns an image of this size in a buffer; without pixels if there is no memory. */
static struct image new_image(struct buffers *buffers, int number, int64_t height, int64_t width, int64_t channels) {
    struct image image = {NULL, height, width, channels, 0};
    image.pitch = (width * channels + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    int64_t bytes = height * image.pitch + OFFSET;
    if (bytes > buffers->sizes[number]) {
        free(buffers->bytes[number]);
        buffers->bytes[number] = malloc((size_t)bytes);
        buffers->sizes[number] = buffers->bytes[number] ? bytes : 0;
    }
    if (buffers->bytes[number])
        image.pixels = buffers->bytes[number] + OFFSET;
    return image;
}

static void copy_image(const struct image *from, const struct image *to) {
    for (int64_t y = 0; y < from->height; y++)
        memcpy(to->pixels + y * to->pitch, from->pixels + y * from->pitch, (size_t)(from->width * from->channels));
}

/* Copies pixels that lie `step` bytes apart. channels: a constant, so that no function is called for a pixel. */
INLINE void copy_line(const uint8_t *from, int64_t step, int64_t count, int64_t channels, uint8_t *to) {
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * channels, from + i * step, (size_t)channels);
}

/* Applies an EXIF orientation (JEITA CP-3451, tag 0x0112). Swapped sides are copied a few columns at a time, which stay
 * in the cache. */
static void turn_image(const struct image *from, int64_t orientation, const struct image *to) {
    const int is_swapped = orientation >= SWAPPED;
    const int64_t forward = is_swapped ? from->pitch : from->channels;
    const int64_t step = REVERSES_COLUMNS[orientation] ? -forward : forward;
    const int64_t most = is_swapped ? COLUMNS_AT_ONCE : to->width;
    for (int64_t x = 0; x < to->width; x += most) {
        const int64_t count = at_most(to->width - x, most);
        const int64_t column = REVERSES_COLUMNS[orientation] ? to->width - 1 - x : x;
        for (int64_t y = 0; y < to->height; y++) {
            const int64_t row = REVERSES_ROWS[orientation] ? to->height - 1 - y : y;
            const uint8_t *pixels = is_swapped ? pixel_at(from, column, row) : pixel_at(from, row, column);
            if (from->channels == 3)
                copy_line(pixels, step, count, 3, pixel_at(to, y, x));
            else
                copy_line(pixels, step, count, 1, pixel_at(to, y, x));
        }
    }
}

/* Decodes the region of an input, or takes its pixels. */
static int load_image(const struct chunk *chunk, const struct input *input, struct buffers *buffers,
                      struct image *image) {
    if (input->channels) {
        *image = (struct image){input->data, input->region[2], input->region[3], input->channels, input->size};
        return DONE;
    }
    const int64_t *region = input->region;
    *image = new_image(buffers, DECODED, region[2], region[3], chunk->color == JPEG_GRAY ? 1 : 3);
    if (!image->pixels)
        return NO_MEMORY;
    int status = gpuflow_decode_jpeg(input->data, input->size, (int)chunk->color, input->height, input->width, region,
                                     image->pixels, image->pitch, chunk->stop);
    if (status != DONE || input->orientation == UPRIGHT)
        return status;
    const int is_swapped = input->orientation >= SWAPPED;
    struct image turned = new_image(buffers, TURNED, is_swapped ? image->width : image->height,
                                    is_swapped ? image->height : image->width, image->channels);
    if (!turned.pixels)
        return NO_MEMORY;
    turn_image(image, input->orientation, &turned);
    *image = turned;
    return DONE;
}

/* The region of an image that begins at (top, left) of the whole one. box: y, x, height, width in the whole one. */
static struct image part_of(const struct image *image, const int64_t *box, int64_t top, int64_t left) {
    return (struct image){pixel_at(image, box[0] - top, box[1] - left), box[2], box[3], image->channels, image->pitch};
}

/* Warps a box into the part of the result that is shown; the rest of it is black. */
static int warp_box(const struct image *box, const struct warping *geometry, const struct view *view,
                    const struct image *result, const int32_t *stop) {
    const int64_t *shown = geometry->shown;
    if (shown[2] != result->height || shown[3] != result->width)
        for (int64_t y = 0; y < result->height; y++)
            memset(result->pixels + y * result->pitch, 0, (size_t)(result->width * result->channels));
    if (!shown[2] || !shown[3]) /* a crop may show padding alone */
        return DONE;
    const struct image part = part_of(result, shown, 0, 0);
    return warp_image(&(struct warp){box, &part, geometry->matrix, shown[0], shown[1], view}, stop);
}

/* An image on its way through the steps. top, left: where it begins in the whole one. is_shared: others read it, too. */
struct state {
    struct image image;
    int64_t top, left;
    int is_shared;
};

/* Writes height and width of a step's result. */
static void size_after(const struct step *step, int64_t sample, const struct image *image, int64_t size[2]) {
    const int64_t same[2] = {image->height, image->width}, *found = same;
    if (step->kind == RESAMPLE)
        found = ((const struct resampling *)step->parameters)[sample].window + 2;
    else if (step->kind == WARP)
        found = ((const struct warping *)step->parameters)[sample].size;
    memcpy(size, found, 2 * sizeof *size);
}

/* Runs a step that writes to another image than it reads. */
static int run_step(const struct step *step, int64_t sample, const struct state *state, struct image *result,
                    const int32_t *stop) {
    const struct image *image = &state->image;
    switch (step->kind) {
    case RESAMPLE: {
        const struct resampling *geometry = (const struct resampling *)step->parameters + sample;
        const struct image box = part_of(image, geometry->box, state->top, state->left);
        return resample(&box, geometry, step->settings, result, stop);
    }
    case WARP: {
        const struct warping *geometry = (const struct warping *)step->parameters + sample;
        const struct image box = part_of(image, geometry->box, state->top, state->left);
        return warp_box(&box, geometry, step->settings, result, stop);
    }
    case FILTER: {
        const struct local_filter *filter = (const struct local_filter *)step->parameters + sample;
        return filter_image(image, filter, result, stop);
    }
    default:
        copy_image(image, result);
        run_operations(result, step->parameters, sample, stop);
        return is_stopped(stop) ? STOPPED : DONE;
    }
}

/* Returns whether a step leaves an image as it is. */
static int is_idle(const struct step *step, int64_t sample) {
    return step->kind == FILTER && !((const struct local_filter *)step->parameters)[sample].rows;
}

/* Makes one output of an image. The last step writes to the slot, those before it to buffers in turn. */
static int make_output(const struct chunk *chunk, const struct output *output, int64_t sample, struct state state,
                       struct buffers *buffers) {
    uint8_t *slot = output->slots + sample * output->slot_bytes;
    int status = DONE, next = FIRST;
    for (int64_t i = 0; i < output->count && status == DONE; i++) {
        const struct step *step = &output->steps[i];
        if (step->kind == LOOK_UP) {
            const struct table *table = step->parameters;
            look_up_levels(&state.image, table->numbers, table->item_bytes, (int)table->planes, slot);
            return DONE;
        }
        if (is_idle(step, sample))
            continue;
        if (step->kind == OPERATE && !state.is_shared) {
            run_operations(&state.image, step->parameters, sample, chunk->stop);
            status = is_stopped(chunk->stop) ? STOPPED : DONE;
            continue;
        }
        int64_t size[2], channels = state.image.channels;
        size_after(step, sample, &state.image, size);
        struct image result = {slot, size[0], size[1], channels, size[1] * channels};
        if (i + 1 < output->count)
            result = new_image(buffers, next, size[0], size[1], channels);
        if (!result.pixels)
            return NO_MEMORY;
        status = run_step(step, sample, &state, &result, chunk->stop);
        state.image = result;
        state.is_shared = 0;
        if (step->kind == RESAMPLE || step->kind == WARP)
            state.top = state.left = 0;
        next = next == FIRST ? SECOND : FIRST;
    }
    const struct image *image = &state.image;
    if (status == DONE && image->pixels != slot)
        copy_image(image, &(struct image){slot, image->height, image->width, image->channels,
                                          image->width * image->channels});
    return status;
}

static int run_sample(const struct chunk *chunk, int64_t sample, struct buffers *buffers) {
    const struct input *input = &chunk->inputs[sample];
    struct state state = {.top = input->region[0], .left = input->region[1]}; /* zeros for an image that is turned */
    state.is_shared = chunk->output_count > 1 || input->channels;
    int status = load_image(chunk, input, buffers, &state.image);
    for (int64_t i = 0; i < chunk->output_count && status == DONE; i++)
        status = make_output(chunk, &chunk->outputs[i], sample, state, buffers);
    return status;
}

/* Frees buffers that are larger than `most` bytes. */
static void shrink_buffers(struct buffers *buffers, int64_t most) {
    for (int i = 0; i < BUFFERS; i++) {
        if (buffers->sizes[i] <= most)
            continue;
        free(buffers->bytes[i]);
        buffers->bytes[i] = NULL;
        buffers->sizes[i] = 0;
    }
}

static void free_buffers(void *memory) {
    if (memory)
        shrink_buffers(memory, 0);
    free(memory);
}

static void run_input(struct chunk *chunk, int64_t sample, struct buffers *buffers) {
    int64_t *status = &chunk->statuses[sample];
    if (!chunk->inputs[sample].data)
        return;
    __atomic_store_n(status, RUNNING, __ATOMIC_RELAXED);
    int64_t result = is_stopped(chunk->stop) ? STOPPED : run_sample(chunk, sample, buffers);
    __atomic_store_n(status, result, __ATOMIC_RELAXED);
    shrink_buffers(buffers, MOST_KEPT_BYTES);
}

static int64_t processor_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void run_item(void *context, int64_t item, void **memory) {
    struct chunk *chunk = context;
    int64_t begin = processor_time();
    if (!*memory)
        *memory = calloc(1, sizeof(struct buffers));
    if (*memory)
        run_input(chunk, item, *memory);
    else
        chunk->statuses[item] = NO_MEMORY;
    __atomic_fetch_add(&chunk->nanoseconds, processor_time() - begin, __ATOMIC_RELAXED);
}

static const struct work run_inputs = {run_item, free_buffers, FOR_CHUNKS};

/* Runs all samples of a chunk, or sample `only` if that is not below 0. Inputs without data are left out; the statuses of
 * others are written. */
void gpuflow_run_chunk(struct chunk *chunk, int64_t count, int64_t only) {
    if (chunk->pool && only < 0) {
        run_on_pool(chunk->pool, &run_inputs, chunk, count);
        return;
    }
    struct buffers buffers = {0};
    for (int64_t sample = only < 0 ? 0 : only; sample < (only < 0 ? count : only + 1); sample++)
        run_input(chunk, sample, &buffers);
    shrink_buffers(&buffers, 0);
}
