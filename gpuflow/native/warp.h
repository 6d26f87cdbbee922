/* Warps images by projective maps. */

#ifndef GPUFLOW_WARP_H
#define GPUFLOW_WARP_H

#include "image.h"

enum border { CONSTANT_BORDER, EDGE_BORDER, REFLECT_BORDER, SYMMETRIC_BORDER };

/* Which pixels of an image the pixels of a result show. matrix: [9], maps a point of the result to one of the image.
 * as_torchvision: take the pixels that torchvision takes, see `Lookup` in pipeline/stage.py. */
struct lookup {
    const double *matrix;
    int64_t height, width; /* of the image */
    int border, as_torchvision;
};

enum { MOST_PIXELS = 256 };

/* Writes rows and columns of the image that `count` pixels, at most MOST_PIXELS, of the result's row y show from column
 * x on; -1 for one outside. */
void find_nearest(const struct lookup *lookup, int64_t y, int64_t x, int64_t count, int32_t *rows, int32_t *columns);

/* Writes the part (y, x, height, width) of a warped image into out, whose rows have out_pitch bytes.
 * interpolation: 0 nearest, 1 bilinear. fill: a level for each channel. Returns DONE or STOPPED. */
int warp_image(const struct image *image, const double *matrix, const int64_t *part, int interpolation, int border,
               const uint8_t *fill, int as_torchvision, uint8_t *out, int64_t out_pitch, const int32_t *stop);

#endif
