/* Local filters: sums in float32 of weighted rows and columns, with the bits that OpenCV's sepFilter2D gives with AVX2
 * (modules/imgproc/src/filter.simd.hpp, Apache-2.0), and what pipeline/local.py does with them. local_avx2.c compiles
 * this file once more, for processors with AVX2 and FMA.
 *
 * OpenCV multiplies and adds at once in whole blocks of a row; in the rest of a row it rounds the product, too. */

#include <stdlib.h>
#include <string.h>

#include "local.h"
#include "rounding.h"
#include "variant.h"

enum { BLOCK_ACROSS = 32, BLOCK_DOWN = 8, PIECE = 32, LINE = 16 /* floats of a cache line */ };

/* The work on one image. levels: a row of the image with what surrounds it. summed: `high` rows, of which row y of the
 * image is number y % high. */
struct work {
    const struct image *image;
    const struct local_filter *filter;
    float *rows, *columns, *levels, *summed;
    int64_t elements, stride; /* of a row; from one row of `summed` to the next */
};

static inline float add_product(float weight, float level, float sum, int at_once) {
    return at_once ? multiply_add(weight, level, sum) : sum + weight * level;
}

static int64_t mirror(int64_t at, int64_t side) {
    int64_t period = 2 * (side - 1);
    if (period == 0)
        return 0;
    at = (at < 0 ? -at : at) % period;
    return at < side ? at : period - at;
}

/* Copies a row as floats, and pixels of it to the left and the right. */
static void spread_row(const struct work *work, int64_t y) {
    const struct image *image = work->image;
    const uint8_t *row = image->pixels + y * image->pitch;
    int64_t channels = image->channels, margin = work->filter->wide / 2;
    for (int64_t i = 0; i < work->elements; i++)
        work->levels[margin * channels + i] = row[i];
    for (int64_t x = 1; x <= margin; x++)
        for (int64_t c = 0; c < channels; c++) {
            work->levels[(margin - x) * channels + c] = row[mirror(-x, image->width) * channels + c];
            work->levels[(margin + image->width - 1 + x) * channels + c] =
                row[mirror(image->width - 1 + x, image->width) * channels + c];
        }
}

/* Sums elements begin to begin + count of a row with their neighbours to the left and the right, from the left on. */
INLINE void sum_across(const struct work *work, int64_t begin, int64_t count, int at_once, float *to) {
    const float *levels = work->levels + begin;
    float sums[PIECE];
    for (int64_t i = 0; i < count; i++)
        sums[i] = work->columns[0] * levels[i];
    for (int64_t tap = 1; tap < work->filter->wide; tap++) {
        float weight = work->columns[tap];
        levels += work->image->channels;
        for (int64_t i = 0; i < count; i++)
            sums[i] = add_product(weight, levels[i], sums[i], at_once);
    }
    memcpy(to + begin, sums, (size_t)count * sizeof *sums);
}

static void sum_row(const struct work *work, int64_t y) {
    float *to = work->summed + y % work->filter->high * work->stride;
    int64_t at = 0;
    spread_row(work, y);
    for (; at + BLOCK_ACROSS <= work->elements; at += BLOCK_ACROSS)
        sum_across(work, at, BLOCK_ACROSS, 1, to);
    sum_across(work, at, work->elements - at, 0, to);
}

/* Returns the result of one level. sum: of its weighted neighbourhood. */
static inline uint8_t result_of(float sum, float level, float centre, double factor) {
    float smoothed = round_even_float(sum + level * centre);
    float share = (float)(1.0 - factor);
    if (factor != 0) /* rounded once, as a fused multiply-add is */
        smoothed = (float)((double)(smoothed - level) * (double)share + (double)level);
    smoothed = smoothed > 0 ? smoothed : 0;
    return (uint8_t)(int32_t)(smoothed < 255 ? smoothed : 255);
}

/* Sums elements of a row with those of the rows above and below it, from the middle on, and writes the results. */
INLINE void sum_down(const struct work *work, const float *const *rows, int64_t begin, int64_t count, int at_once,
                     const uint8_t *levels, uint8_t *out) {
    int64_t middle = work->filter->high / 2;
    float sums[PIECE], centre = (float)work->filter->centre;
    double factor = work->filter->factor;
    for (int64_t i = 0; i < count; i++)
        sums[i] = work->rows[middle] * rows[middle][begin + i];
    for (int64_t tap = 1; tap <= middle; tap++) {
        const float *above = rows[middle - tap] + begin, *below = rows[middle + tap] + begin;
        float weight = work->rows[middle + tap];
        for (int64_t i = 0; i < count; i++)
            sums[i] = add_product(weight, below[i] + above[i], sums[i], at_once);
    }
    for (int64_t i = 0; i < count; i++)
        out[begin + i] = result_of(sums[i], levels[begin + i], centre, factor);
}

static void filter_row(const struct work *work, int64_t y, const float **rows, uint8_t *out) {
    const struct image *image = work->image;
    int64_t high = work->filter->high, at = 0;
    const uint8_t *levels = image->pixels + y * image->pitch;
    for (int64_t tap = 0; tap < high; tap++)
        rows[tap] = work->summed + mirror(y + tap - high / 2, image->height) % high * work->stride;
    for (; at + PIECE <= work->elements; at += PIECE)
        sum_down(work, rows, at, PIECE, 1, levels, out);
    for (; at + BLOCK_DOWN <= work->elements; at += BLOCK_DOWN)
        sum_down(work, rows, at, BLOCK_DOWN, 1, levels, out);
    sum_down(work, rows, at, work->elements - at, high == 3, levels, out);
}

/* Restores the pixels of a row whose neighbourhood leaves the image. */
static void keep_pixels(const struct work *work, int64_t y, uint8_t *out) {
    const struct image *image = work->image;
    const uint8_t *levels = image->pixels + y * image->pitch;
    int64_t margin_y = work->filter->high / 2, margin_x = work->filter->wide / 2, size = margin_x * image->channels;
    if (y < margin_y || y >= image->height - margin_y || 2 * margin_x >= image->width) {
        memcpy(out, levels, (size_t)work->elements);
        return;
    }
    memcpy(out, levels, (size_t)size);
    memcpy(out + work->elements - size, levels + work->elements - size, (size_t)size);
}

static int filter_rows(const struct work *work, const float **rows, const struct image *result, const int32_t *stop) {
    int64_t next = 0, below = work->filter->high / 2;
    for (int64_t y = 0; y < work->image->height; y++) {
        if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            return STOPPED;
        for (; next <= y + below && next < work->image->height; next++)
            sum_row(work, next);
        filter_row(work, y, rows, pixel_at(result, y, 0));
        if (work->filter->keep)
            keep_pixels(work, y, pixel_at(result, y, 0));
    }
    return DONE;
}

static int run(const struct image *image, const struct local_filter *filter, const struct image *result,
               const int32_t *stop) {
    int64_t elements = image->width * image->channels, high = filter->high, wide = filter->wide;
    int64_t stride = (elements + LINE - 1) / LINE * LINE, margins = (wide - 1) * image->channels;
    int64_t others = (high + wide + elements + margins + LINE - 1) / LINE * LINE;
    const float **rows = malloc((size_t)high * sizeof *rows);
    float *summed = aligned_alloc(LINE * sizeof(float), (size_t)(high * stride + others) * sizeof(float));
    if (!rows || !summed) {
        free(rows);
        free(summed);
        return NO_MEMORY;
    }
    float *weights = summed + high * stride, *levels = weights + high + wide;
    const struct work work = {image, filter, weights, weights + high, levels, summed, elements, stride};
    for (int64_t i = 0; i < high; i++)
        weights[i] = (float)filter->rows[i];
    for (int64_t i = 0; i < wide; i++)
        weights[high + i] = (float)filter->columns[i];
    int status = filter_rows(&work, rows, result, stop);
    free(rows);
    free(summed);
    return status;
}

typedef int filter_function(const struct image *, const struct local_filter *, const struct image *, const int32_t *);

filter_function *const VARIANT(filter_image) = run;

#ifndef FUSED
extern filter_function *const filter_image_avx2;

int filter_image(const struct image *image, const struct local_filter *filter, const struct image *result,
                 const int32_t *stop) {
    return (*FASTEST(filter_image))(image, filter, result, stop);
}
#endif
