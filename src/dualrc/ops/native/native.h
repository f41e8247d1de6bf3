/* Definitions that the C kernels share. setup.py compiles them for several instruction sets. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* One vector register of floats, aligned and unaligned. */
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float loose_lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

INLINE lanes load(const float *from)
{
    return *(const loose_lanes *)from;
}

INLINE void store(float *to, lanes values)
{
    *(loose_lanes *)to = values;
}
