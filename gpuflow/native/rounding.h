/* Arithmetic that rounds in the same way on every processor. FUSED: the file is compiled for processors with FMA. */

#ifndef GPUFLOW_ROUNDING_H
#define GPUFLOW_ROUNDING_H

#include <stdint.h>
#include <string.h>

/* Returns x * y + z, rounded once. */
static inline float multiply_add(float x, float y, float z) {
#if defined(FUSED) || defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, z);
#else
    double product = (double)x * (double)y, sum = product + (double)z, nearer;
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if ((bits & 0x1fffffff) == 0x10000000) { /* halfway between two floats: what the sum has lost decides */
        double added = sum - product, lost = (product - (sum - added)) + ((double)z - added);
        bits += lost == 0 ? 0 : (lost > 0) == (sum > 0) ? 1 : -1;
    }
    memcpy(&nearer, &bits, sizeof nearer);
    return (float)nearer;
#endif
}

/* Rounds to the nearest whole number, a half to the even one. |x| must be below 2^51, or 2^22 for floats. */
static inline double round_even(double x) { return (x + 0x1.8p52) - 0x1.8p52; }
static inline float round_even_float(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

#endif
