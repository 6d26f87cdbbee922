/* The passes of a separable filter for x86 processors with AVX2. */

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "avx2_begin.h"
#include "image.h"
#include "passes.h"

INLINE __m256i both(__m128i upper, __m128i lower) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(upper), lower, 1);
}

INLINE __m256i load_16_bytes(const uint8_t *upper, const uint8_t *lower) {
    return both(_mm_loadu_si128((const void *)upper), _mm_loadu_si128((const void *)lower));
}

INLINE __m256i load_8_bytes(const uint8_t *upper, const uint8_t *lower) {
    return both(_mm_loadl_epi64((const void *)upper), _mm_loadl_epi64((const void *)lower));
}

INLINE __m256i repeat_two(const int16_t *weights) {
    int32_t two;
    memcpy(&two, weights, sizeof two);
    return _mm256_set1_epi32(two);
}

/* Shuffles that spread pixels of 3 bytes to 16-bit numbers: reds, greens and blues of two pixels, and zeros. */
struct spread {
    __m256i pixels_0_1, pixels_2_3, pixel_4;
};

INLINE struct spread spread_of_pixels(void) {
    return (struct spread){
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1)),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1)),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, -1, -1, -1, 13, -1, -1, -1, 14, -1, -1, -1, -1, -1, -1, -1)),
    };
}

INLINE __m256i add_products(__m256i sums, __m256i levels, __m256i spread, const int16_t *weights) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(levels, spread), repeat_two(weights)));
}

/* Returns the sums of one result's pixel in an upper and a lower row: 4 numbers each, of which the last is unused. */
INLINE __m256i filter_pixel(const uint8_t *upper, const uint8_t *lower, const int16_t *weights, int64_t taps,
                            __m256i sums, const struct spread *spread) {
    int64_t tap = 0;
    __m256i levels = sums;
    for (; tap + 2 < taps; tap += 4) {
        levels = load_16_bytes(upper + 3 * tap, lower + 3 * tap);
        sums = add_products(sums, levels, spread->pixels_0_1, weights + tap);
        sums = add_products(sums, levels, spread->pixels_2_3, weights + tap + 2);
    }
    if (tap >= taps)
        return sums;
    if (tap > 0 && taps - tap == 1) /* a fifth pixel lies in the last 16 bytes */
        return add_products(sums, levels, spread->pixel_4, weights + tap);
    levels = load_8_bytes(upper + 3 * tap, lower + 3 * tap);
    return add_products(sums, levels, spread->pixels_0_1, weights + tap);
}

/* taps: those of the axis, as a constant if there are few of them, so that the compiler unrolls the loop. */
INLINE void filter_colors(const uint8_t *const rows[2], uint8_t *const results[2], const struct axis *axis,
                          int64_t taps) {
    const struct spread spread = spread_of_pixels();
    const __m256i pack =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    const __m256i half = _mm256_set1_epi32(1 << (axis->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis->precision);
    for (int64_t x = 0; x < axis->count; x += 4) {
        __m256i sums[4];
        for (int64_t i = 0; i < 4; i++) {
            int64_t at = x + i < axis->count ? x + i : axis->count - 1, offset = 3 * (int64_t)axis->first[at];
            sums[i] = filter_pixel(rows[0] + offset, rows[1] + offset, axis->weights + at * axis->stride, taps, half,
                                   &spread);
            sums[i] = _mm256_sra_epi32(sums[i], shift);
        }
        const __m256i words = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                                  _mm256_packs_epi32(sums[2], sums[3]));
        const __m256i levels = _mm256_shuffle_epi8(words, pack);
        _mm_storeu_si128((void *)(results[0] + 3 * x), _mm256_castsi256_si128(levels));
        _mm_storeu_si128((void *)(results[1] + 3 * x), _mm256_extracti128_si256(levels, 1));
    }
}

static void across(const uint8_t *const rows[2], uint8_t *const results[2], const struct axis *axis, int64_t channels) {
    if (channels != 3) {
        passes_portable.across(rows, results, axis, channels);
        return;
    }
    switch (axis->taps) {
#define TAPS(number)                                                                                                   \
    case number:                                                                                                       \
        filter_colors(rows, results, axis, number);                                                                    \
        return;
        TAPS(2)
        TAPS(3)
        TAPS(4)
        TAPS(5)
        TAPS(6)
        TAPS(7)
        TAPS(8)
        TAPS(9)
#undef TAPS
    default:
        filter_colors(rows, results, axis, axis->taps);
    }
}

/* An odd last row is paired with itself, by a weight of zero. */
static void down(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int precision, int64_t bytes,
                 uint8_t *result) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (int64_t begin = 0; begin < bytes; begin += BLOCK_BYTES) {
        __m256i sums[4] = {half, half, half, half};
        for (int64_t tap = 0; tap < taps; tap += 2) {
            const __m256i two = repeat_two(weights + tap);
            const __m256i one = _mm256_loadu_si256((const void *)(rows[tap] + begin));
            const __m256i next = _mm256_loadu_si256((const void *)(rows[tap + 1 < taps ? tap + 1 : tap] + begin));
            const __m256i low = _mm256_unpacklo_epi8(one, next), high = _mm256_unpackhi_epi8(one, next);
            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), two));
            sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), two));
            sums[2] = _mm256_add_epi32(sums[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), two));
            sums[3] = _mm256_add_epi32(sums[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), two));
        }
        for (int i = 0; i < 4; i++)
            sums[i] = _mm256_sra_epi32(sums[i], shift);
        const __m256i levels = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                                   _mm256_packs_epi32(sums[2], sums[3]));
        if (bytes - begin >= BLOCK_BYTES) {
            _mm256_storeu_si256((void *)(result + begin), levels);
            continue;
        }
        uint8_t block[BLOCK_BYTES];
        _mm256_storeu_si256((void *)block, levels);
        memcpy(result + begin, block, (size_t)(bytes - begin));
    }
}

const struct passes passes_avx2 = {across, down};

#include "avx2_end.h"
#endif
