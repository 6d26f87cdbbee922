/* The passes of a separable filter in portable C. */

#include "passes.h"

static uint8_t as_level(int32_t sum, int precision) {
    int32_t level = sum >> precision;
    return level < 0 ? 0 : level > 255 ? 255 : (uint8_t)level;
}

static void filter_row(const uint8_t *row, uint8_t *result, const struct axis *axis, int64_t channels) {
    const int32_t half = 1 << (axis->precision - 1);
    for (int64_t i = 0; i < axis->count; i++) {
        const int16_t *weights = axis->weights + i * axis->stride;
        for (int64_t channel = 0; channel < channels; channel++) {
            const uint8_t *levels = row + axis->first[i] * channels + channel;
            int32_t sum = half;
            for (int64_t tap = 0; tap < axis->taps; tap++)
                sum += weights[tap] * levels[tap * channels];
            result[i * channels + channel] = as_level(sum, axis->precision);
        }
    }
}

static void across(const uint8_t *const rows[2], uint8_t *const results[2], const struct axis *axis, int64_t channels) {
    for (int i = 0; i < 2; i++) {
        if (channels == 3) /* a constant, so that the compiler unrolls its loop */
            filter_row(rows[i], results[i], axis, 3);
        else
            filter_row(rows[i], results[i], axis, channels);
    }
}

static void down(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int precision, int64_t bytes,
                 uint8_t *result) {
    for (int64_t begin = 0; begin < bytes; begin += BLOCK_BYTES) {
        int32_t sums[BLOCK_BYTES];
        for (int i = 0; i < BLOCK_BYTES; i++)
            sums[i] = 1 << (precision - 1);
        for (int64_t tap = 0; tap < taps; tap++)
            for (int i = 0; i < BLOCK_BYTES; i++)
                sums[i] += weights[tap] * rows[tap][begin + i];
        int64_t end = bytes - begin < BLOCK_BYTES ? bytes - begin : BLOCK_BYTES;
        for (int64_t i = 0; i < end; i++)
            result[begin + i] = as_level(sums[i], precision);
    }
}

const struct passes passes_portable = {across, down};
