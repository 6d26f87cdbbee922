/* local.c for processors with AVX2 and FMA. */

#if defined(__x86_64__)
#include "avx2_begin.h"
#ifndef __clang__
#pragma GCC optimize("no-loop-unroll-and-jam") /* GCC 12 would join taps, and then not vectorize */
#endif

#include "local.c"
#include "avx2_end.h"
#endif
