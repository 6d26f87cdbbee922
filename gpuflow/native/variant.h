/* Variants of C files for different kinds of processors. NAME_avx2.c compiles NAME.c once more, with FUSED defined, for x86
 * processors with AVX2 and FMA. All variants give the same bits. */

#ifndef GPUFLOW_VARIANT_H
#define GPUFLOW_VARIANT_H

/* The name of a variant's table of functions. */
#ifdef FUSED
#define VARIANT(name) name##_avx2
#else
#define VARIANT(name) name##_portable
#endif

/* The address of the fastest variant for this processor. It is the portable one if GPUFLOW_NATIVE is `portable`. */
#if defined(__x86_64__)
extern int gpuflow_has_avx2;
#define FASTEST(name) (gpuflow_has_avx2 ? &name##_avx2 : &name##_portable)
#else
#define FASTEST(name) (&name##_portable)
#endif

#endif
