/* What the C files of this folder that work on pixels share. */

#ifndef GPUFLOW_IMAGE_H
#define GPUFLOW_IMAGE_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* An image of 8-bit levels: rows of interleaved channels. pitch: bytes from one row to the next. */
struct image {
    uint8_t *pixels;
    int64_t height, width, channels, pitch;
};

INLINE uint8_t *pixel_at(const struct image *image, int64_t y, int64_t x) {
    return image->pixels + y * image->pitch + x * image->channels;
}

INLINE int64_t at_least(int64_t value, int64_t least) { return value < least ? least : value; }
INLINE int64_t at_most(int64_t value, int64_t most) { return value > most ? most : value; }

/* What functions that may fail return. STOPPED: their caller asked them to stop. REFUSED: libjpeg-turbo gave an error
 * or a warning, or none is open; OpenCV then decides whether the file is bad. */
enum { DONE, NO_MEMORY, STOPPED, REFUSED };

enum { ROWS_BETWEEN_CHECKS = 64 };

/* Returns whether a caller has asked to stop. Long loops ask once in ROWS_BETWEEN_CHECKS rows. */
static inline int is_stopped(const int32_t *stop) {
    return __atomic_load_n(stop, __ATOMIC_RELAXED) != 0;
}

#endif
