/* Warps images by projective maps: see execute/warp.py. warp_avx2.c compiles this file once more, for processors with
 * AVX2 and FMA.
 *
 * `bilinear` in float32 gives what OpenCV 5 gives with AVX2 (modules/imgproc/src/warp_kernels.simd.hpp, Apache-2.0). */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rounding.h"
#include "variant.h"
#include "warp.h"

static const double TIE = 0x1p-20, TINY = 1e-12, FAR = 0x1p31, PLACES = 0x1p11; /* see execute/warp.py */
static const double MARGIN = 0.01; /* more than the error of a place in float32, in pixels */

enum { TILE = 256, BLOCK = 16, MOST_CHANNELS = 4 };

/* Returns x, or the nearer of two limits; the lower one for NaN. */
static inline double limit(double x, double low, double high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

static inline int64_t fold_index(int64_t at, int64_t side, int64_t border) {
    int64_t period = border == SYMMETRIC_BORDER ? 2 * side : 2 * (side - 1);
    if (border == EDGE_BORDER || period == 0)
        return at < 0 ? 0 : at < side ? at : side - 1;
    at %= period;
    at += at < 0 ? period : 0;
    return at < side ? at : period - at - (border == SYMMETRIC_BORDER);
}

/* As fold_index, for a place between pixels. */
static double fold_place(double at, double side, int64_t border) {
    double period = border == SYMMETRIC_BORDER ? 2 * side : 2 * (side - 1);
    if (border != EDGE_BORDER && period > 0) {
        at = fmod(at, period);
        at += at < 0 ? period : 0;
        double back = period - at - (border == SYMMETRIC_BORDER);
        at = at < back ? at : back;
    }
    return limit(at, 0, side - 1);
}

static inline int is_affine(const double *matrix) { return matrix[6] == 0 && matrix[7] == 0 && matrix[8] == 1; }

/* Writes the points of the image that points of a row of the result show: (x, y), (x + 1, y) and so on. */
static void find_points(const double *m, double y, double x, int64_t count, double *at_x, double *at_y) {
    double rest_x = m[1] * y + m[2], rest_y = m[4] * y + m[5], rest = m[7] * y + m[8];
    int affine = is_affine(m);
    for (int32_t i = 0; i < (int32_t)count; i++) {
        at_x[i] = m[0] * (x + i) + rest_x;
        at_y[i] = m[3] * (x + i) + rest_y;
    }
    for (int32_t i = 0; !affine && i < (int32_t)count; i++) {
        double third = m[6] * (x + i) + rest;
        third = fabs(third) < TINY ? TINY : third;
        at_x[i] /= third;
        at_y[i] /= third;
    }
}

/* --- nearest pixels ----------------------------------------------------------------------------------------------- */

/* Writes the pixels along an axis that torchvision v2 takes with `nearest`, by an affine map to a result of the image's
 * size. Where a point lies between two pixels, its rounding errors choose: those of float32, of the product in
 * `_affine_grid` on a GPU or an Intel processor, each term of which is multiplied and added at once, and of PyTorch's
 * grid_sample. middle, first: of the points, from the centre. */
static void find_as_torchvision(const struct lookup *lookup, int axis, double middle, double first, int64_t count,
                                double *at) {
    const double *line = lookup->matrix + 3 * axis;
    double width = (double)lookup->width, height = (double)lookup->height, side = axis ? height : width;
    float half = (float)(side / 2);
    float across = (float)line[0] / half, down = (float)line[1] / half;
    float shift = (float)(line[2] + (line[0] * width + line[1] * height - side) / 2) / half;
    double rest = (double)down * middle;
    for (int32_t i = 0; i < (int32_t)count; i++) {
        float place = (float)(rest + (double)(across * (float)(first + i))) + shift + 1.0f;
        at[i] = round_even(limit((double)((float)((double)place * side - 1.0) * 0.5f), -FAR, FAR));
    }
}

/* Writes the pixels that contain places along an axis; -1 for those outside. */
static void find_pixels(const double *at, int64_t count, int64_t side, int64_t border, int32_t *pixels) {
    double end = (double)side;
    int32_t last = (int32_t)(side - 1);
    for (int64_t i = 0; i < count; i++) {
        double place = limit(at[i], -1, end) + TIE;
        int32_t pixel = (int32_t)place;
        pixel -= (double)pixel > place;
        pixels[i] = pixel > last ? -1 : pixel;
    }
    for (int64_t i = 0; border != CONSTANT_BORDER && i < count; i++)
        if (pixels[i] < 0)
            pixels[i] = (int32_t)fold_index((int64_t)floor(limit(at[i], -FAR, FAR) + TIE), side, border);
}

static void nearest(const struct lookup *lookup, int64_t y, int64_t x, int64_t count, int32_t *rows, int32_t *columns) {
    double at_x[MOST_PIXELS], at_y[MOST_PIXELS];
    double point_x = (double)x + 0.5, point_y = (double)y + 0.5;
    if (lookup->as_torchvision) {
        double middle = point_y - (double)lookup->height / 2, first = point_x - (double)lookup->width / 2;
        find_as_torchvision(lookup, 0, middle, first, count, at_x);
        find_as_torchvision(lookup, 1, middle, first, count, at_y);
    } else {
        find_points(lookup->matrix, point_y, point_x, count, at_x, at_y);
    }
    find_pixels(at_x, count, lookup->width, lookup->border, columns);
    find_pixels(at_y, count, lookup->height, lookup->border, rows);
}

INLINE void copy_each(const struct image *image, const uint8_t *fill, const int32_t *rows, const int32_t *columns,
                      int64_t count, int64_t channels, uint8_t *out) {
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *pixel = fill;
        if ((rows[i] | columns[i]) >= 0)
            pixel = image->pixels + rows[i] * image->pitch + columns[i] * channels;
        for (int64_t c = 0; c < channels; c++)
            out[i * channels + c] = pixel[c];
    }
}

static void copy_pixels(const struct image *image, const uint8_t *fill, const int32_t *rows, const int32_t *columns,
                        int64_t count, uint8_t *out) {
    if (image->channels == 3) /* a constant, so that the compiler unrolls its loop */
        copy_each(image, fill, rows, columns, count, 3, out);
    else
        copy_each(image, fill, rows, columns, count, image->channels, out);
}

static int warp_nearest(const struct warp *job, const int32_t *stop) {
    const struct image *image = job->image;
    struct lookup lookup = {job->matrix, image->height, image->width, job->view->border,
                            job->view->as_torchvision};
    int32_t rows[MOST_PIXELS], columns[MOST_PIXELS];
    for (int64_t y = 0; y < job->result->height; y++) {
        if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            return STOPPED;
        for (int64_t x = 0, count; x < job->result->width; x += count) {
            count = at_most(job->result->width - x, MOST_PIXELS);
            nearest(&lookup, job->y + y, job->x + x, count, rows, columns);
            copy_pixels(image, job->view->fill, rows, columns, count, pixel_at(job->result, y, x));
        }
    }
    return DONE;
}

/* --- bilinear, places in float64 ---------------------------------------------------------------------------------- */

/* Along one axis of a tile: the lowest and the highest place, and how PyTorch's grid_sample, whose arithmetic this is,
 * counts places: from the first pixel that the tile shows, as a part of 2^n pixels. */
struct reach {
    double low, high, first;
    float count;
};

/* Writes places of a row, rounded, in pixels from the centre of the first one. */
static void find_places(const struct warp *job, double y, double x, int64_t count, double *at_x, double *at_y) {
    double *lines[2] = {at_x, at_y}, sides[2] = {(double)job->image->width, (double)job->image->height};
    find_points(job->matrix, y, x, count, at_x, at_y);
    for (int axis = 0; axis < 2; axis++) {
        double *at = lines[axis], side = sides[axis];
        int constant = job->view->border == CONSTANT_BORDER;
        double low = constant ? -1 : -FAR, high = constant ? side : FAR; /* further outside nothing is seen */
        for (int64_t i = 0; i < count; i++)
            at[i] = limit(at[i] - 0.5, low, high);
        for (int64_t i = 0; !constant && i < count; i++)
            if (!(at[i] >= 0 && at[i] <= side - 1))
                at[i] = fold_place(at[i], side, job->view->border);
        for (int64_t i = 0; i < count; i++)
            at[i] = round_even(at[i] * PLACES) / PLACES;
    }
}

static void widen(struct reach *reach, const double *at, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        reach->low = at[i] < reach->low ? at[i] : reach->low;
        reach->high = at[i] > reach->high ? at[i] : reach->high;
    }
}

/* Returns whether a tile shows pixels along an axis of this side. */
static int begin_at(struct reach *reach, int64_t side) {
    double low = floor(reach->low), end = floor(reach->high) + 2;
    reach->first = low > 0 ? low : 0;
    end = end < (double)side ? end : (double)side;
    reach->count = 1;
    while (reach->count <= end - reach->first + 1)
        reach->count *= 2;
    return end > reach->first;
}

/* Returns a place in pixels from reach->first, as grid_sample rounds it. */
static inline float place_in_reach(const struct reach *reach, double at) {
    float part = (float)((at - (reach->first - 0.5)) * (2 / (double)reach->count)) - 1.0f;
    return (part + 1.0f) * (reach->count / 2) - 0.5f;
}

static inline float level_at(const struct image *image, int64_t y, int64_t x, int64_t channel) {
    int inside = y >= 0 && y < image->height && x >= 0 && x < image->width;
    return inside ? pixel_at(image, y, x)[channel] : 0;
}

static inline float share_inside(double at, double side) {
    double before = at + 1, after = side - at, share = before < after ? before : after;
    return (float)(share < 1 ? share : 1);
}

static void blend_row(const struct warp *job, const struct reach *across, const struct reach *down, const double *at_x,
                      const double *at_y, int64_t count, int fades, uint8_t *out) {
    const struct image *image = job->image;
    for (int64_t i = 0; i < count; i++) {
        float x = place_in_reach(across, at_x[i]), y = place_in_reach(down, at_y[i]);
        float left = floorf(x), top = floorf(y);
        float right_part = x - left, lower_part = y - top, left_part = 1 - right_part, upper_part = 1 - lower_part;
        int64_t column = (int64_t)across->first + (int64_t)left, row = (int64_t)down->first + (int64_t)top;
        float share = share_inside(at_x[i], (double)image->width) * share_inside(at_y[i], (double)image->height);
        for (int64_t c = 0; c < image->channels; c++) {
            float level = level_at(image, row, column, c) * (upper_part * left_part);
            level = multiply_add(level_at(image, row, column + 1, c), (upper_part * right_part), level);
            level = multiply_add(level_at(image, row + 1, column, c), (lower_part * left_part), level);
            level = multiply_add(level_at(image, row + 1, column + 1, c), (lower_part * right_part), level);
            if (fades)
                level = (level - job->view->fill[c]) * share + job->view->fill[c];
            out[i * image->channels + c] = (uint8_t)round_even_float(level);
        }
    }
}

static void fill_row(const struct warp *job, int64_t count, uint8_t *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < job->image->channels; c++)
            out[i * job->image->channels + c] = job->view->fill[c];
}

/* Warps the pixels of a tile, whose upper left point is (x, y). */
static void blend_tile(const struct warp *job, double y, double x, int64_t height, int64_t width, uint8_t *out) {
    const struct image *image = job->image;
    struct reach across = {.low = INFINITY, .high = -INFINITY}, down = across;
    double at_x[TILE], at_y[TILE];
    for (int64_t row = 0; row < height; row++) {
        find_places(job, y + (double)row, x, width, at_x, at_y);
        widen(&across, at_x, width);
        widen(&down, at_y, width);
    }
    int visible = begin_at(&across, image->width), shown = begin_at(&down, image->height) && visible;
    int fades = across.low < 0 || down.low < 0 || across.high > (double)(image->width - 1) ||
                down.high > (double)(image->height - 1);
    for (int64_t row = 0; row < height; row++, out += job->result->pitch) {
        if (!shown) {
            fill_row(job, width, out);
            continue;
        }
        find_places(job, y + (double)row, x, width, at_x, at_y);
        blend_row(job, &across, &down, at_x, at_y, width, fades && job->view->border == CONSTANT_BORDER, out);
    }
}

static int warp_far(const struct warp *job, const int32_t *stop) {
    for (int64_t top = 0; top < job->result->height; top += TILE) {
        for (int64_t left = 0; left < job->result->width; left += TILE) {
            if (is_stopped(stop))
                return STOPPED;
            int64_t height = at_most(job->result->height - top, TILE), width = at_most(job->result->width - left, TILE);
            blend_tile(job, (double)(job->y + top) + 0.5, (double)(job->x + left) + 0.5, height, width,
                       pixel_at(job->result, top, left));
        }
    }
    return DONE;
}

/* --- bilinear, places in float32 ---------------------------------------------------------------------------------- */

/* The places that a row of the result shows, in pixels of the image: the upper left one of four, and how far right of
 * and below it. */
struct places {
    int32_t left[MOST_PIXELS], top[MOST_PIXELS];
    float x[MOST_PIXELS], y[MOST_PIXELS];
};

static void split_places(struct places *places, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int32_t left = (int32_t)places->x[i], top = (int32_t)places->y[i];
        left -= (float)left > places->x[i];
        top -= (float)top > places->y[i];
        places->left[i] = left;
        places->top[i] = top;
        places->x[i] -= (float)left;
        places->y[i] -= (float)top;
    }
}

/* Finds the places of pixels x to x + count of row y. OpenCV computes those of whole blocks in another order than those
 * of the rest of a row. */
static void find_near(const float *m, int64_t y, int64_t x, int64_t count, int in_blocks, int affine,
                      struct places *places) {
    float row = (float)y, rest[3];
    for (int axis = 0; axis < 3; axis++)
        rest[axis] = in_blocks ? row * m[3 * axis + 1] + m[3 * axis + 2] : row * m[3 * axis + 1];
    for (int32_t i = 0; i < (int32_t)count; i++) {
        float column = (float)((int32_t)x + i);
        places->x[i] = multiply_add(column, m[0], rest[0]);
        places->y[i] = multiply_add(column, m[3], rest[1]);
    }
    for (int64_t i = 0; !in_blocks && i < count; i++) {
        places->x[i] += m[2];
        places->y[i] += m[5];
    }
    for (int32_t i = 0; !affine && i < (int32_t)count; i++) {
        float third = multiply_add((float)((int32_t)x + i), m[6], rest[2]);
        third = in_blocks ? third : third + m[8];
        places->x[i] /= third;
        places->y[i] /= third;
    }
    split_places(places, count);
}

static inline uint8_t blend_level(float x, float y, float upper_left, float upper_right, float lower_left,
                                  float lower_right) {
    float upper = multiply_add(x, upper_right - upper_left, upper_left);
    float lower = multiply_add(x, lower_right - lower_left, lower_left);
    return (uint8_t)(int32_t)round_even_float(multiply_add(y, lower - upper, upper));
}

/* Blends four pixels for each place, all of which are inside the image. */
INLINE void blend_inside(const struct image *image, const struct places *places, int64_t begin, int64_t end,
                         int64_t channels, uint8_t *out) {
    uint8_t corners[4][MOST_CHANNELS][MOST_PIXELS], levels[MOST_CHANNELS][MOST_PIXELS];
    for (int64_t i = begin; i < end; i++) {
        const uint8_t *window = image->pixels + places->top[i] * image->pitch + places->left[i] * channels;
        for (int64_t c = 0; c < channels; c++) {
            corners[0][c][i] = window[c];
            corners[1][c][i] = window[c + channels];
            corners[2][c][i] = window[image->pitch + c];
            corners[3][c][i] = window[image->pitch + c + channels];
        }
    }
    for (int64_t c = 0; c < channels; c++)
        for (int64_t i = begin; i < end; i++)
            levels[c][i] = blend_level(places->x[i], places->y[i], corners[0][c][i], corners[1][c][i], corners[2][c][i],
                                       corners[3][c][i]);
    for (int64_t i = begin; i < end; i++)
        for (int64_t c = 0; c < channels; c++)
            out[i * channels + c] = levels[c][i];
}

/* Blends four pixels for one place; of those outside the image, the ones that the border shows. */
static void blend_folded(const struct warp *job, const struct places *places, int64_t i, uint8_t *out) {
    const struct image *image = job->image;
    int64_t channels = image->channels;
    const uint8_t *pixels[4];
    for (int corner = 0; corner < 4; corner++) {
        int64_t row = fold_index(places->top[i] + (corner >> 1), image->height, job->view->border);
        int64_t column = fold_index(places->left[i] + (corner & 1), image->width, job->view->border);
        pixels[corner] = pixel_at(image, row, column);
    }
    for (int64_t c = 0; c < channels; c++)
        out[i * channels + c] =
            blend_level(places->x[i], places->y[i], pixels[0][c], pixels[1][c], pixels[2][c], pixels[3][c]);
}

static void blend_places(const struct warp *job, const struct places *places, int64_t count, uint8_t *out) {
    const struct image *image = job->image;
    for (int64_t i = 0, begin = 0; i < count; begin = i) {
        while (i < count && places->left[i] >= 0 && places->left[i] < image->width - 1 && places->top[i] >= 0 &&
               places->top[i] < image->height - 1)
            i++;
        if (image->channels == 3)
            blend_inside(image, places, begin, i, 3, out);
        else
            blend_inside(image, places, begin, i, image->channels, out);
        if (i < count)
            blend_folded(job, places, i++, out);
    }
}

/* Warps pixels `begin` to `end` of row y. m: the matrix of indices in float32. */
static void blend_near(const struct warp *job, const float *m, int64_t y, int64_t begin, int64_t end) {
    struct places places;
    int64_t blocks_end = job->result->width / BLOCK * BLOCK;
    uint8_t *row = pixel_at(job->result, y, 0);
    for (int64_t x = begin, stop; x < end; x = stop) {
        int in_blocks = x < blocks_end;
        stop = at_most(in_blocks ? at_most(blocks_end, end) : end, x + MOST_PIXELS);
        find_near(m, y, x, stop - x, in_blocks, is_affine(job->matrix), &places);
        blend_places(job, &places, stop - x, row + x * job->image->channels);
    }
}

/* Pixels of a row. */
struct span {
    int64_t begin, end;
};

/* Returns which pixels of row y are seen inside the image with a margin around it: column + margin >= 0, and
 * column <= side - 1 + margin. Each is a linear inequality of x, since the third coordinate is above 0. */
static struct span find_span(const struct warp *job, double y, double margin) {
    const double *m = job->matrix, sides[2] = {(double)job->image->width, (double)job->image->height};
    double third = m[7] * y + m[8], low = 0, high = (double)job->result->width;
    for (int axis = 0; axis < 2; axis++) {
        double slope = m[3 * axis], rest = m[3 * axis + 1] * y + m[3 * axis + 2], last = sides[axis] - 1 + margin;
        double slopes[2] = {slope + margin * m[6], last * m[6] - slope};
        double rests[2] = {rest + margin * third, last * third - rest};
        for (int i = 0; i < 2; i++) { /* slope * x + rest >= 0 */
            double bound = -rests[i] / slopes[i];
            if (fabs(slopes[i]) < TINY)
                high = rests[i] < 0 ? -1 : high;
            else if (slopes[i] > 0)
                low = low > bound ? low : bound;
            else
                high = high < bound ? high : bound;
        }
    }
    low = ceil(low < (double)job->result->width ? low : (double)job->result->width);
    high = floor(high) + 1;
    high = high < (double)job->result->width ? high : (double)job->result->width;
    return (struct span){(int64_t)low, (int64_t)(high > low ? high : low)};
}

/* Blends pixels that are seen on the edge of the image with the fill, in float64. */
static void blend_edge(const struct warp *job, int64_t y, int64_t begin, int64_t end) {
    const struct image *image = job->image;
    for (int64_t column = begin; column < end; column++) {
        double x_place, y_place, covered = 0, totals[MOST_CHANNELS] = {0};
        find_points(job->matrix, (double)y, (double)column, 1, &x_place, &y_place);
        double left = floor(x_place), top = floor(y_place);
        for (int corner = 0; corner < 4; corner++) {
            double x = left + (corner >> 1), y = top + (corner & 1);
            double across = corner >> 1 ? x_place - left : left + 1 - x_place;
            double down = corner & 1 ? y_place - top : top + 1 - y_place;
            if (x < 0 || x >= (double)image->width || y < 0 || y >= (double)image->height)
                continue;
            const uint8_t *pixel = pixel_at(image, (int64_t)y, (int64_t)x);
            for (int64_t c = 0; c < image->channels; c++)
                totals[c] += across * down * pixel[c];
            covered += across * down;
        }
        uint8_t *out = pixel_at(job->result, y, column);
        for (int64_t c = 0; c < image->channels; c++)
            out[c] = (uint8_t)round_even(covered * (totals[c] - job->view->fill[c]) + job->view->fill[c]);
    }
}

static void warp_row_on_fill(const struct warp *job, const float *m, int64_t y) {
    struct span seen = find_span(job, (double)y, 1 + MARGIN), inner = find_span(job, (double)y, -MARGIN);
    inner.begin = inner.begin < seen.begin ? seen.begin : inner.begin > seen.end ? seen.end : inner.begin;
    inner.end = inner.end < inner.begin ? inner.begin : inner.end > seen.end ? seen.end : inner.end;
    uint8_t *row = pixel_at(job->result, y, 0);
    fill_row(job, seen.begin, row);
    blend_edge(job, y, seen.begin, inner.begin);
    blend_near(job, m, y, inner.begin, inner.end);
    blend_edge(job, y, inner.end, seen.end);
    fill_row(job, job->result->width - seen.end, row + seen.end * job->image->channels);
}

/* Returns whether float32 is enough for the places that the part's points come from: the third coordinate, which is 1
 * somewhere, stays near it, and sums of terms below 2^13 are wrong by less than 0.001 of a pixel. */
static int is_near(const struct warp *job) {
    const double *m = job->matrix;
    double left = (double)job->x, top = (double)job->y;
    double right = left + (double)job->result->width, bottom = top + (double)job->result->height;
    double far_x = fmax(fabs(left), fabs(right)), far_y = fmax(fabs(top), fabs(bottom));
    double xs[4] = {left, right, left, right}, ys[4] = {top, top, bottom, bottom};
    for (int i = 0; i < 4; i++) {
        double third = m[6] * xs[i] + m[7] * ys[i] + m[8];
        if (!(third >= 0.25 && third <= 4))
            return 0;
    }
    for (int axis = 0; axis < 2; axis++)
        if (!(fabs(m[3 * axis]) * far_x + fabs(m[3 * axis + 1]) * far_y + fabs(m[3 * axis + 2]) <= 0x1p13))
            return 0;
    return 1;
}

static int warp_near(const struct warp *job, const int32_t *stop) {
    double first_x = (double)job->x + 0.5, first_y = (double)job->y + 0.5;
    double indices[9]; /* of the result's pixels to those of the image's pixels */
    memcpy(indices, job->matrix, sizeof indices);
    for (int row = 0; row < 3; row++)
        indices[3 * row + 2] += fma(indices[3 * row + 1], first_y, indices[3 * row] * first_x);
    for (int i = 0; i < 6; i++)
        indices[i] -= 0.5 * indices[6 + i % 3];
    struct warp of_indices = *job;
    of_indices.matrix = indices;
    float m[9];
    for (int i = 0; i < 9; i++)
        m[i] = (float)indices[i];
    for (int64_t y = 0; y < job->result->height; y++) {
        if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
            return STOPPED;
        if (job->view->border == CONSTANT_BORDER)
            warp_row_on_fill(&of_indices, m, y);
        else
            blend_near(&of_indices, m, y, 0, job->result->width);
    }
    return DONE;
}

/* --- whole pixels ------------------------------------------------------------------------------------------------- */

static int is_whole(double x) { return x == floor(x) && fabs(x) < 0x1p53; }

/* Returns whether a map only mirrors, and shifts by whole pixels. */
static int only_shifts(const double *m) {
    return fabs(m[0]) == 1 && fabs(m[4]) == 1 && m[1] == 0 && m[3] == 0 && is_affine(m) && is_whole(m[2]) &&
           is_whole(m[5]);
}

/* Returns the pixel that is shown at a place along a side; -1 for one outside. */
static int64_t shown_at(int64_t at, int64_t side, int64_t border) {
    if (at >= 0 && at < side)
        return at;
    return border == CONSTANT_BORDER ? -1 : fold_index(at, side, border);
}

static int copy_shifted(const struct warp *job, const int32_t *stop) {
    const struct image *image = job->image, *result = job->result;
    const int64_t border = job->view->border;
    int64_t shift_y = (int64_t)job->matrix[5], shift_x = (int64_t)job->matrix[2];
    int mirror_y = job->matrix[4] < 0, mirror_x = job->matrix[0] < 0;
    int32_t rows[MOST_PIXELS], columns[MOST_PIXELS];
    for (int64_t x = 0, count; x < result->width; x += count) {
        count = at_most(result->width - x, MOST_PIXELS);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = job->x + x + i;
            columns[i] = (int32_t)shown_at(mirror_x ? shift_x - 1 - at : shift_x + at, image->width, border);
        }
        int are_neighbours = columns[0] >= 0 && columns[count - 1] - columns[0] == count - 1; /* no step is longer */
        for (int64_t y = 0; y < result->height; y++) {
            if (y % ROWS_BETWEEN_CHECKS == 0 && is_stopped(stop))
                return STOPPED;
            int64_t at = job->y + y;
            int32_t row = (int32_t)shown_at(mirror_y ? shift_y - 1 - at : shift_y + at, image->height, border);
            if (are_neighbours && row >= 0) {
                memcpy(pixel_at(result, y, x), pixel_at(image, row, columns[0]), (size_t)(count * image->channels));
                continue;
            }
            for (int64_t i = 0; i < count; i++)
                rows[i] = row;
            copy_pixels(image, job->view->fill, rows, columns, count, pixel_at(result, y, x));
        }
    }
    return DONE;
}

static int warp(const struct warp *job, const int32_t *stop) {
    if (only_shifts(job->matrix))
        return copy_shifted(job, stop);
    if (job->view->interpolation == 0)
        return warp_nearest(job, stop);
    return is_near(job) ? warp_near(job, stop) : warp_far(job, stop);
}

/* --- forms for different processors ------------------------------------------------------------------------------- */

struct warp_functions {
    int (*warp)(const struct warp *, const int32_t *);
    void (*nearest)(const struct lookup *, int64_t, int64_t, int64_t, int32_t *, int32_t *);
};

const struct warp_functions VARIANT(warp_functions) = {warp, nearest};

#ifndef FUSED
extern const struct warp_functions warp_functions_avx2;

void find_nearest(const struct lookup *lookup, int64_t y, int64_t x, int64_t count, int32_t *rows, int32_t *columns) {
    FASTEST(warp_functions)->nearest(lookup, y, x, count, rows, columns);
}

int warp_image(const struct warp *warp, const int32_t *stop) { return FASTEST(warp_functions)->warp(warp, stop); }
#endif
