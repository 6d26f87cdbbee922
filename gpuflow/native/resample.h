#ifndef GPUFLOW_RESAMPLE_H
#define GPUFLOW_RESAMPLE_H

#include "image.h"

enum interpolation { NEAREST, BILINEAR, BICUBIC };

/* One sample's row of the arrays of `Resampling` in pipeline/program.py. Boxes are y, x, height, width. */
struct resampling {
    int64_t box[4], mirrors[2], grid[2], shown[4], window[4], flips[2];
};

/* How all samples of a step are resampled. fill: levels of pixels outside the image, one for each channel. */
struct filter {
    int64_t interpolation, antialias;
    uint8_t fill[8];
};

/* Resamples a box to the grid, and writes the window of it. box: the region of an image that `geometry` names. result:
 * of the window's size, which is overwritten. Returns DONE, NO_MEMORY or STOPPED. */
int resample(const struct image *box, const struct resampling *geometry, const struct filter *filter,
             const struct image *result, const int32_t *stop);

#endif
