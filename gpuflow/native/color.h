/* Colour operations and tables of levels. */

#pragma once
#include "image.h"

/* The colour operations of a chunk's samples: see `Operations` in pipeline/pointwise.py. */
struct operations {
    const int64_t *codes;  /* [samples, count] */
    const double *factors; /* [samples, count] */
    int64_t count;
    const uint8_t *tables; /* [T, 3, 256] */
    const double *values;  /* [V, 12] */
};

/* Runs a sample's operations on an image of 1 or 3 channels, in place. stop: ends the work early once it is not 0; the
 * image then has undefined levels. */
void run_operations(struct image *image, const struct operations *operations, int64_t sample, const int32_t *stop);

/* Writes table[channel][level] of each level to out. The table [C, 256] has items of 1, 2, 4 or 8 bytes. planes: whether
 * out is [C, H, W]; else it is [H, W, C]. */
void look_up_levels(const struct image *image, const void *table, int64_t item_bytes, int planes, void *out);
