/* Warps images by projective maps. */

#ifndef GPUFLOW_WARP_H
#define GPUFLOW_WARP_H

#include "image.h"

enum border { CONSTANT_BORDER, EDGE_BORDER, REFLECT_BORDER, SYMMETRIC_BORDER };

/* Which pixels of an image the pixels of a result show. matrix: [9], maps a point of the result to one of the image.
 * as_torchvision: take the pixels that torchvision takes, see `Lookup` in pipeline/stage.py. */
struct lookup {
    const double *matrix;
    int64_t height, width, border, as_torchvision; /* height, width: of the image */
};

enum { MOST_PIXELS = 256 };

/* Writes rows and columns of the image that `count` pixels, at most MOST_PIXELS, of the result's row y show from column
 * x on; -1 for one outside. */
void find_nearest(const struct lookup *lookup, int64_t y, int64_t x, int64_t count, int32_t *rows, int32_t *columns);

/* How images are warped. interpolation: 0 nearest, 1 bilinear. fill: a level for each channel. */
struct view {
    int64_t interpolation, border, as_torchvision;
    uint8_t fill[8];
};

/* A warp of an image. result: receives the part of the warped image that begins at (y, x). matrix: [9], maps a point of
 * the warped image to one of the image. */
struct warp {
    const struct image *image, *result;
    const double *matrix;
    int64_t y, x;
    const struct view *view;
};

/* Returns DONE or STOPPED. */
int warp_image(const struct warp *warp, const int32_t *stop);

#endif
