/* Resamples images exactly as torchvision v2 does on uint8 tensors: fixed-point weights, first along the rows, rounded
 * to levels, then along the columns. `nearest` copies pixels.
 *
 * The rules of the weights are those of ATen's UpSampleKernel.cpp (PyTorch, BSD-3), which follows Pillow's Resample.c.
 */

#include "resample.h"

#include "passes.h"
#include "variant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PRECISION = 22, MOST_WEIGHT = 1 << 15 };
/* Columns are filtered in parts if the rows between the passes would take more memory than this. */
enum { MOST_BYTES_BETWEEN = 1 << 22 };

static double cubic(double x, double a) {
    x = fabs(x);
    if (x < 1.0)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2.0)
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    return 0.0;
}

static double linear(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

/* How a side of `in` pixels becomes one of `out` pixels. taps: the most that a result may have. */
struct side {
    int64_t in, out, taps;
    double scale, support, inverse;
    int is_cubic, is_smooth;
};

static struct side side_of(int64_t in, int64_t out, const struct filter *filter) {
    const int is_cubic = filter->interpolation == BICUBIC;
    struct side side = {.in = in, .out = out, .scale = (double)in / (double)out, .inverse = 1.0};
    side.is_cubic = is_cubic;
    side.is_smooth = filter->antialias != 0;
    side.support = is_cubic ? 2.0 : 1.0;
    side.taps = is_cubic ? 4 : 2;
    if (side.is_smooth) {
        if (side.scale >= 1.0) {
            side.support *= side.scale;
            side.inverse = 1.0 / side.scale;
        }
        side.taps = 2 * (int64_t)ceil(side.support) + 1;
    }
    return side;
}

/* Writes the weights of result i, of which the first belongs to pixel *first, and raises *largest to the largest one.
 * Returns how many there are. */
static int64_t smooth_weights(const struct side *side, int64_t i, double *weights, int64_t *first, double *largest) {
    const double center = side->scale * ((double)i + 0.5);
    double total = 0.0;
    *first = at_least((int64_t)(center - side->support + 0.5), 0);
    int64_t taps = at_most((int64_t)(center + side->support + 0.5), side->in) - *first;
    taps = at_most(at_least(taps, 0), side->taps);
    for (int64_t tap = 0; tap < taps; tap++) {
        double distance = ((double)(tap + *first) - center + 0.5) * side->inverse;
        weights[tap] = side->is_cubic ? cubic(distance, -0.5) : linear(distance);
        total += weights[tap];
    }
    for (int64_t tap = 0; tap < taps && total != 0.0; tap++) {
        weights[tap] /= total;
        *largest = fmax(*largest, weights[tap]);
    }
    return taps;
}

/* As smooth_weights, without antialiasing. Pixels outside the image have the levels of its border. As in ATen, sums of
 * the border's weights count for the largest one before they are complete. */
static int64_t sharp_weights(const struct side *side, int64_t i, double *weights, int64_t *first, double *largest) {
    double place = side->scale * ((double)i + 0.5) - 0.5;
    if (!side->is_cubic && place < 0)
        place = 0;
    int64_t below = at_most((int64_t)floorf((float)place), side->in - 1), half = side->taps / 2;
    double share = place - (double)below;
    share = share < 0 ? 0 : share > 1 ? 1 : share;
    const int64_t begin = below - half + 1;
    *first = at_least(begin, 0);
    int64_t taps = at_most(at_least(at_most(below + half + 1, side->in) - *first, 0), side->taps);
    memset(weights, 0, (size_t)side->taps * sizeof *weights);
    int64_t target = 0;
    for (int64_t tap = 0; tap < side->taps; tap++, target++) {
        double distance = (double)(tap + 1 - half) - share;
        if (begin + tap <= 0)
            target = 0;
        else if (begin + tap >= side->in - 1)
            target = taps - 1;
        weights[target] += side->is_cubic ? cubic(distance, -0.75) : linear(distance);
        *largest = fmax(*largest, weights[target]);
    }
    return taps;
}

/* The largest number of fractional bits with which a weight fits into 16 bits. */
static int precision_of(double largest) {
    int precision = 0;
    while (precision < MOST_PRECISION && (int)(0.5 + largest * (1 << (precision + 1))) < MOST_WEIGHT)
        precision++;
    return precision;
}

/* Weights are shifted so that `taps` pixels from the first one on lie within the row: others are zeros. */
static void write_weights(struct axis *axis, int64_t at, const double *weights, int64_t taps, int64_t first,
                          int64_t in) {
    const int64_t shift = at_least(first + axis->taps - in, 0);
    int16_t *row = axis->weights + at * axis->stride + shift;
    axis->first[at] = (int32_t)(first - shift);
    for (int64_t tap = 0; tap < taps; tap++) {
        double scaled = weights[tap] * (1 << axis->precision);
        row[tap] = (int16_t)(scaled < 0 ? (int)(scaled - 0.5) : (int)(scaled + 0.5));
    }
}

static void free_axis(struct axis *axis) {
    free(axis->first);
    free(axis->weights);
}

/* Results [start, start + count) of a side, in reverse order if is_reversed. Returns DONE or NO_MEMORY. */
static int make_axis(struct axis *axis, const struct side *side, int64_t start, int64_t count, int is_reversed) {
    *axis = (struct axis){.count = count};
    double *weights = malloc((size_t)(count + 1) * (size_t)side->taps * sizeof *weights), largest = 0.0;
    int64_t *places = malloc((size_t)count * 2 * sizeof *places);
    axis->first = malloc((size_t)count * sizeof *axis->first);
    if (weights && places && axis->first) {
        for (int64_t i = 0; i < side->out; i++) { /* all, because the largest weight decides on the precision */
            const int is_used = i >= start && i < start + count;
            int64_t at = is_used ? i - start : count, first;
            double *row = weights + at * side->taps;
            int64_t taps = (side->is_smooth ? smooth_weights : sharp_weights)(side, i, row, &first, &largest);
            if (is_used) {
                places[2 * at] = first;
                places[2 * at + 1] = taps;
                axis->taps = at_least(axis->taps, taps);
            }
        }
        axis->precision = precision_of(largest);
        axis->stride = (axis->taps + 3) & ~(int64_t)1; /* SIMD reads weights in pairs, and one pair more */
        axis->weights = calloc((size_t)count * (size_t)axis->stride, sizeof *axis->weights);
    }
    for (int64_t i = 0; axis->weights && i < count; i++)
        write_weights(axis, is_reversed ? count - 1 - i : i, weights + i * side->taps, places[2 * i + 1], places[2 * i],
                      side->in);
    free(weights);
    free(places);
    if (axis->weights)
        return DONE;
    free_axis(axis);
    return NO_MEMORY;
}

/* The rows that results [0, count) of an axis need: begin, end. */
static void rows_needed(const struct axis *axis, int64_t needed[2]) {
    needed[0] = INT64_MAX;
    needed[1] = 0;
    for (int64_t i = 0; i < axis->count; i++) {
        needed[0] = at_most(needed[0], axis->first[i]);
        needed[1] = at_least(needed[1], axis->first[i] + axis->taps);
    }
}

/* Memory for filtering: rows between the passes, and copies of two rows that have bytes after them. */
struct rows {
    uint8_t *between, *copies[2], *unused;
    const uint8_t **taps;
    int64_t pitch;
};

static void free_rows(struct rows *rows) {
    free(rows->between);
    free(rows->copies[0]);
    free(rows->taps);
}

/* count: rows between the passes. columns: of each. */
static int make_rows(struct rows *rows, const struct image *box, int64_t count, int64_t columns, int64_t taps) {
    const int64_t copied = box->width * box->channels + BYTES_AFTER_ROW;
    rows->pitch = (columns * box->channels + 2 * BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
    rows->between = malloc((size_t)(count + 1) * (size_t)rows->pitch);
    rows->copies[0] = calloc(2, (size_t)copied);
    rows->taps = malloc((size_t)taps * sizeof *rows->taps);
    if (!rows->between || !rows->copies[0] || !rows->taps) {
        free_rows(rows);
        return NO_MEMORY;
    }
    rows->copies[1] = rows->copies[0] + copied;
    rows->unused = rows->between + count * rows->pitch;
    return DONE;
}

/* Filters rows needed[0] to needed[1] of a box along an axis. */
static int filter_across(const struct image *box, const struct axis *axis, const int64_t needed[2],
                         const struct rows *memory, const struct passes *passes, const int32_t *stop) {
    const size_t bytes = (size_t)(box->width * box->channels);
    for (int64_t y = needed[0]; y < needed[1]; y += 2) {
        const int64_t next = at_most(y + 1, needed[1] - 1);
        uint8_t *result = memory->between + (y - needed[0]) * memory->pitch;
        uint8_t *const results[2] = {result, next == y ? memory->unused : result + memory->pitch};
        const uint8_t *rows[2] = {box->pixels + y * box->pitch, box->pixels + next * box->pitch};
        if ((y - needed[0]) % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            return STOPPED;
        for (int i = 0; i < 2; i++) {
            if ((box->height - 1 - (i ? next : y)) * box->pitch < BYTES_AFTER_ROW) { /* they are not the box's */
                memcpy(memory->copies[i], rows[i], bytes);
                rows[i] = memory->copies[i];
            }
        }
        passes->across(rows, results, axis, box->channels);
    }
    return DONE;
}

/* first: the number of the first row between the passes. */
static int filter_down(const struct axis *axis, int64_t first, const struct rows *memory, const struct image *result,
                       const struct passes *passes, const int32_t *stop) {
    const int64_t bytes = result->width * result->channels;
    for (int64_t y = 0; y < result->height; y++) {
        if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            return STOPPED;
        for (int64_t tap = 0; tap < axis->taps; tap++)
            memory->taps[tap] = memory->between + (axis->first[y] + tap - first) * memory->pitch;
        passes->down(memory->taps, axis->weights + y * axis->stride, axis->taps, axis->precision, bytes,
                     result->pixels + y * result->pitch);
    }
    return DONE;
}

static int filter_by_axes(const struct image *box, const struct axis *across, const struct axis *down,
                          const struct image *result, const int32_t *stop) {
    const struct passes *passes = FASTEST(passes);
    int64_t needed[2];
    rows_needed(down, needed);
    const int64_t rows = needed[1] - needed[0];
    const int64_t columns = at_most(across->count, at_least(MOST_BYTES_BETWEEN / (rows * box->channels), 1));
    struct rows memory;
    int status = make_rows(&memory, box, rows, columns, down->taps);
    if (status != DONE)
        return status;
    for (int64_t begin = 0; begin < across->count && status == DONE; begin += columns) {
        struct axis part = *across;
        part.count = at_most(columns, across->count - begin);
        part.first += begin;
        part.weights += begin * across->stride;
        struct image target = *result;
        target.pixels = pixel_at(result, 0, begin);
        target.width = part.count;
        status = filter_across(box, &part, needed, &memory, passes, stop);
        if (status == DONE)
            status = filter_down(down, needed[0], &memory, &target, passes, stop);
    }
    free_rows(&memory);
    return status;
}

/* A part of the grid that becomes an image: y, x, height, width; and whether it is mirrored. */
struct part {
    int64_t box[4];
    const int64_t *flips;
};

static int filter_box(const struct image *box, const struct resampling *geometry, const struct part *part,
                      const struct filter *filter, const struct image *result, const int32_t *stop) {
    const struct side rows = side_of(box->height, geometry->grid[0], filter);
    const struct side columns = side_of(box->width, geometry->grid[1], filter);
    struct axis down, across;
    if (make_axis(&down, &rows, part->box[0], part->box[2], part->flips[0] != 0) != DONE)
        return NO_MEMORY;
    int status = make_axis(&across, &columns, part->box[1], part->box[3], part->flips[1] != 0);
    if (status == DONE) {
        status = filter_by_axes(box, &across, &down, result, stop);
        free_axis(&across);
    }
    free_axis(&down);
    return status;
}

/* The pixel of a line of `length` pixels that torch takes as number i of `grid` pixels. */
static int64_t nearest_of(int64_t i, int64_t length, int64_t grid) {
    if (length == grid)
        return i;
    if (grid == 2 * length)
        return i >> 1;
    return at_most((int64_t)floorf((float)i * ((float)length / (float)grid)), length - 1);
}

/* Writes which pixels of a line results [start, start + count) show. */
static void places_of(int64_t *places, int64_t length, int64_t grid, int64_t start, int64_t count, int is_mirrored,
                      int is_reversed) {
    for (int64_t i = 0; i < count; i++) {
        int64_t place = nearest_of(start + i, length, grid);
        places[is_reversed ? count - 1 - i : i] = is_mirrored ? length - 1 - place : place;
    }
}

static void copy_row(const uint8_t *row, const int64_t *places, int64_t count, int64_t channels, uint8_t *result) {
    if (places[count - 1] - places[0] == count - 1) { /* all neighbours, because no step is shorter or all are */
        memcpy(result, row + places[0] * channels, (size_t)(count * channels));
    } else if (channels == 3) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t channel = 0; channel < 3; channel++)
                result[3 * i + channel] = row[3 * places[i] + channel];
    } else {
        for (int64_t i = 0; i < count; i++)
            memcpy(result + i * channels, row + places[i] * channels, (size_t)channels);
    }
}

static int copy_pixels(const struct image *box, const struct resampling *geometry, const struct part *part,
                       const struct image *result, const int32_t *stop) {
    int64_t *rows = malloc((size_t)(part->box[2] + part->box[3]) * sizeof *rows), *columns = rows + part->box[2];
    if (!rows)
        return NO_MEMORY;
    const int64_t *grid = geometry->grid, *mirrors = geometry->mirrors;
    places_of(rows, box->height, grid[0], part->box[0], part->box[2], mirrors[0] != 0, part->flips[0] != 0);
    places_of(columns, box->width, grid[1], part->box[1], part->box[3], mirrors[1] != 0, part->flips[1] != 0);
    int status = DONE;
    for (int64_t y = 0; y < result->height && status == DONE; y++) {
        if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            status = STOPPED;
        copy_row(box->pixels + rows[y] * box->pitch, columns, result->width, box->channels,
                 result->pixels + y * result->pitch);
    }
    free(rows);
    return status;
}

static void fill_image(const struct image *image, const uint8_t *levels) {
    for (int64_t y = 0; y < image->height; y++)
        for (int64_t x = 0; x < image->width; x++)
            memcpy(pixel_at(image, y, x), levels, (size_t)image->channels);
}

int resample(const struct image *box, const struct resampling *geometry, const struct filter *filter,
             const struct image *result, const int32_t *stop) {
    const int64_t *window = geometry->window, *shown = geometry->shown;
    struct part part = {.flips = geometry->flips};
    struct image target = *result;
    for (int side = 0; side < 2; side++) {
        const int64_t begin = at_least(window[side], shown[side]);
        const int64_t end = at_most(window[side] + window[side + 2], shown[side] + shown[side + 2]);
        part.box[side] = begin;
        part.box[side + 2] = at_least(end - begin, 0);
        const int64_t before = begin - window[side], after = window[side] + window[side + 2] - end;
        const int64_t skipped = part.flips[side] ? after : before;
        target.pixels += skipped * (side ? result->channels : result->pitch);
    }
    target.height = part.box[2];
    target.width = part.box[3];
    if (target.height != result->height || target.width != result->width)
        fill_image(result, filter->fill);
    if (!target.height || !target.width)
        return DONE;
    const int is_copy = box->height == geometry->grid[0] && box->width == geometry->grid[1];
    if (is_copy || filter->interpolation == NEAREST)
        return copy_pixels(box, geometry, &part, &target, stop);
    return filter_box(box, geometry, &part, filter, &target, stop);
}
