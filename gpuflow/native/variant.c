/* The choice of a variant, made once, when the library is loaded. */

#if defined(__x86_64__)
#include "variant.h"

#include <stdlib.h>
#include <string.h>

int gpuflow_has_avx2;

__attribute__((constructor)) static void choose(void) {
    const char *asked = getenv("GPUFLOW_NATIVE");
    gpuflow_has_avx2 = (!asked || strcmp(asked, "portable")) && __builtin_cpu_supports("avx2") &&
                       __builtin_cpu_supports("fma");
}
#endif
