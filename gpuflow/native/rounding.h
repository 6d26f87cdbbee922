/* Arithmetic that rounds in the same way on every processor. FUSED: see variant.h. */

#ifndef GPUFLOW_ROUNDING_H
#define GPUFLOW_ROUNDING_H

#include <stdint.h>
#include <string.h>

/* Returns x * y + z, rounded once. */
static inline float multiply_add(float x, float y, float z) {
#if defined(FUSED) || defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, z);
#else
    /* The sum in doubles is rounded to odd, so that its float is that of the exact sum: Boldo and Melquiond, "Emulation
     * of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008. */
    double product = (double)x * (double)y, sum = product + (double)z, added = sum - product;
    double lost = (product - (sum - added)) + ((double)z - added);
    double odd;
    int64_t bits, lost_bits;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&lost_bits, &lost, sizeof lost_bits);
    int64_t is_too_far = (int64_t)((uint64_t)(bits ^ lost_bits) >> 63);
    bits = __builtin_fabs(lost) > 0 ? (bits - is_too_far) | 1 : bits;
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
#endif
}

/* Rounds to the nearest whole number, a half to the even one. |x| must be below 2^51, or 2^22 for floats. */
static inline double round_even(double x) { return (x + 0x1.8p52) - 0x1.8p52; }
static inline float round_even_float(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

#endif
