/* What the C files that change pixels share. */

#pragma once
#include <stdint.h>

/* An image of 8-bit levels: rows of interleaved channels. pitch: bytes from one row to the next. */
struct image {
    uint8_t *pixels;
    int64_t height, width, channels, pitch;
};
