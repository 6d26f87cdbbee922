/* Local filters, such as a blur. */

#ifndef GPUFLOW_LOCAL_H
#define GPUFLOW_LOCAL_H

#include "image.h"

/* One sample's filter: see `Filters` in pipeline/local.py. rows: weights of `high` rows; columns: of `wide` columns; both
 * odd, and symmetric. keep: whether pixels whose neighbourhood leaves the image stay as they are; else the image is
 * mirrored without repeating its edge. */
struct local_filter {
    const double *rows, *columns;
    int64_t high, wide;
    double centre, factor;
    int64_t keep;
};

/* Writes the filtered image into another one of its size. Returns DONE, NO_MEMORY or STOPPED. */
int filter_image(const struct image *image, const struct local_filter *filter, const struct image *result,
                 const int32_t *stop);

#endif
