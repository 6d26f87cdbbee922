/* The end of what avx2_begin.h begins. */

#ifdef __clang__
#pragma clang attribute pop
#endif
