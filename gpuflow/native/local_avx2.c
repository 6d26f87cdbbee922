/* local.c for processors with AVX2 and FMA. */

#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#pragma GCC optimize("no-loop-unroll-and-jam") /* GCC 12 would join taps, and then not vectorize */
#endif
#define FUSED
#define VARIANT(name) name##_avx2
#include "local.c"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
