/* Masks of images: outlines as pixels, by the rules of pycocotools' rleFrPoly (cocoapi, BSD-2-Clause), and where the
 * pixels of a result lie in a mask. Masks have a byte for each pixel, and no gaps between rows. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "warp.h"

enum { SCALE = 5 }; /* of the finer grid on which pycocotools draws outlines */

/* --- outlines ----------------------------------------------------------------------------------------------------- */

/* The columns that the inside of an outline begins or ends in, and where: numbers of pixels, column by column. */
struct turns {
    int64_t *at, count;
};

/* The point of the finer grid that an edge has reached. */
struct point {
    int64_t x, y;
};

static struct point corner(const double *outline, int64_t i) {
    return (struct point){(int64_t)(SCALE * outline[2 * i] + 0.5), (int64_t)(SCALE * outline[2 * i + 1] + 0.5)};
}

/* Adds a turn where an outline goes from one column of the finer grid to another in the middle of a pixel. */
static void add_turn(struct turns *turns, struct point from, struct point to, int64_t width, int64_t height) {
    int64_t middle = (to.x < from.x ? to.x : to.x - 1) - SCALE / 2;
    if (to.x == from.x || middle < 0 || middle % SCALE || middle / SCALE >= width)
        return;
    double row = ((double)at_most(from.y, to.y) + 0.5) / SCALE - 0.5;
    row = ceil(fmin(fmax(row, 0), (double)height));
    turns->at[turns->count++] = middle / SCALE * height + (int64_t)row;
}

/* Follows an edge from `begin` to `end`. last: where the outline is, which this function continues. */
static void follow_edge(struct point begin, struct point end, struct turns *turns, struct point *last, int is_first,
                        int64_t width, int64_t height) {
    int64_t dx = llabs(end.x - begin.x), dy = llabs(end.y - begin.y), length = dx > dy ? dx : dy;
    int flat = dx >= dy, backwards = flat ? begin.x > end.x : begin.y > end.y;
    struct point low = backwards ? end : begin, high = backwards ? begin : end;
    double slope = 0;
    if (length)
        slope = flat ? (double)(high.y - low.y) / (double)dx : (double)(high.x - low.x) / (double)dy;
    for (int64_t i = 0; i <= length; i++) {
        int64_t step = backwards ? length - i : i;
        struct point next = {low.x + step, low.y + step};
        if (flat)
            next.y = (int64_t)((double)low.y + slope * (double)step + 0.5);
        else
            next.x = (int64_t)((double)low.x + slope * (double)step + 0.5);
        if (i || !is_first)
            add_turn(turns, *last, next, width, height);
        *last = next;
    }
}

static int compare_turns(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* Sets bits of the pixels inside a closed outline. outline: [count, 2], x and y, in pixels, at most 2^20 from 0.
 * down: [width, height]. Returns DONE or NO_MEMORY. */
int64_t gpuflow_draw_outline(const double *outline, int64_t count, int64_t width, int64_t height, int64_t bits,
                             uint8_t *down) {
    int64_t room = 0, pixels = width * height;
    for (int64_t i = 0; i < count; i++)
        room += llabs(corner(outline, i).x - corner(outline, (i + 1) % count).x) / SCALE + 2;
    struct turns turns = {malloc((size_t)room * sizeof(int64_t) + 1), 0};
    if (!turns.at)
        return NO_MEMORY;
    struct point last = {0, 0};
    for (int64_t i = 0; i < count; i++)
        follow_edge(corner(outline, i), corner(outline, (i + 1) % count), &turns, &last, i == 0, width, height);
    qsort(turns.at, (size_t)turns.count, sizeof(int64_t), compare_turns);
    for (int64_t i = 0; i < turns.count; i += 2) {
        int64_t end = i + 1 < turns.count ? at_most(turns.at[i + 1], pixels) : pixels;
        for (int64_t at = turns.at[i]; at < end; at++)
            down[at] |= (uint8_t)bits;
    }
    free(turns.at);
    return DONE;
}

/* --- places ------------------------------------------------------------------------------------------------------- */

enum kind { NONE, INT32, INT64 };

/* What a result shows of a mask: the place of row r and column c is that of rows[r] and columns[c], which are negative
 * outside, in `places`, whose rows have `stride` places. Places are numbers of pixels of the mask, negative outside, of
 * this kind; without them (NONE), of the mask itself, whose width is `stride`. */
struct mask_map {
    const int64_t *rows, *columns;
    int64_t height, width;
    const void *places;
    int64_t stride, kind, kind_of_result;
};

static inline int64_t place_at(const void *places, int64_t kind, int64_t at) {
    if (kind == INT32)
        return ((const int32_t *)places)[at];
    return kind == INT64 ? ((const int64_t *)places)[at] : at;
}

INLINE void apply_row(const struct mask_map *map, int64_t row, int64_t kind, const uint8_t *mask, uint8_t fill,
                      uint8_t *restrict out) {
    const int64_t *restrict columns = map->columns, width = map->width, first = map->rows[row] * map->stride;
    const void *places = map->places;
    for (int64_t i = 0; i < width; i++) {
        int64_t place = columns[i] < 0 ? -1 : place_at(places, kind, first + columns[i]);
        out[i] = place < 0 ? fill : mask[place];
    }
}

/* Writes the levels that a result shows of a mask. fill: the level outside it. */
void gpuflow_apply_mask_map(const struct mask_map *map, const uint8_t *mask, int64_t fill, uint8_t *out) {
    for (int64_t row = 0; row < map->height; row++, out += map->width) {
        if (map->rows[row] < 0)
            memset(out, (int)fill, (size_t)map->width);
        else if (map->kind == NONE)
            apply_row(map, row, NONE, mask, (uint8_t)fill, out);
        else if (map->kind == INT32)
            apply_row(map, row, INT32, mask, (uint8_t)fill, out);
        else
            apply_row(map, row, INT64, mask, (uint8_t)fill, out);
    }
}

/* Writes the places of a warped result [height, width], as `map` has them. shown: y, x, height and width of the part
 * of it that is not filled. */
void gpuflow_warp_mask_map(const struct mask_map *map, const double *matrix, int64_t border, int64_t as_torchvision,
                           const int64_t *shown, int64_t height, int64_t width, void *places) {
    const struct lookup lookup = {matrix, map->height, map->width, border, as_torchvision};
    int32_t rows[MOST_PIXELS], columns[MOST_PIXELS];
    int wide = map->kind_of_result == INT64;
    memset(places, 0xff, (size_t)(height * width) * (wide ? sizeof(int64_t) : sizeof(int32_t))); /* -1 */
    for (int64_t y = shown[0]; y < shown[0] + shown[2]; y++) {
        for (int64_t x = shown[1], end = x + shown[3], count; x < end; x += count) {
            count = at_most(end - x, MOST_PIXELS);
            find_nearest(&lookup, y, x, count, rows, columns);
            for (int64_t i = 0; i < count; i++) {
                int64_t at = y * width + x + i, row = -1, column = -1;
                if ((rows[i] | columns[i]) >= 0) {
                    row = map->rows[rows[i]];
                    column = map->columns[columns[i]];
                }
                int64_t place = (row | column) < 0 ? -1 : place_at(map->places, map->kind, row * map->stride + column);
                if (wide)
                    ((int64_t *)places)[at] = place;
                else
                    ((int32_t *)places)[at] = (int32_t)place;
            }
        }
    }
}
