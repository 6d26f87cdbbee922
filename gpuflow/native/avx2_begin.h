/* What follows is compiled for x86 processors with AVX2 and FMA, up to avx2_end.h. The headers of the system come first:
 * their functions are to stay as they are. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define FUSED
