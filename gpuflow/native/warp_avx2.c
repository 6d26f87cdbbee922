/* warp.c for processors with AVX2 and FMA. */

#if defined(__x86_64__)
#include "avx2_begin.h"

#include "warp.c"
#include "avx2_end.h"
#endif
