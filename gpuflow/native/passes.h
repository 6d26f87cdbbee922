/* The two passes of a separable filter. */

#ifndef GPUFLOW_PASSES_H
#define GPUFLOW_PASSES_H

#include <stdint.h>

/* Bytes that may be read after a row of `across`, and the size of blocks in which `down` reads rows. */
enum { BYTES_AFTER_ROW = 16, BLOCK_BYTES = 32 };

/* Weights along one axis. Result i is the sum of `taps` levels from first[i] on, each multiplied by its weight of
 * weights[i * stride], rounded and shifted right by `precision`, and clamped to a level. Weights between `taps` and
 * `stride` are zeros. */
struct axis {
    int64_t count, taps, stride;
    int precision;
    int32_t *first;
    int16_t *weights;
};

struct passes {
    /* Filters two rows of `channels` interleaved channels along `axis`. The results are written in blocks: they need
     * room for 16 bytes more than a row. */
    void (*across)(const uint8_t *const rows[2], uint8_t *const results[2], const struct axis *axis, int64_t channels);
    /* Filters rows of `bytes` levels into one row. weights: of `taps` rows and, if these are odd, a zero. */
    void (*down)(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int precision, int64_t bytes,
                 uint8_t *result);
};

extern const struct passes passes_portable, passes_avx2;

#endif
