/* What the native kernels share. Vectors of 16 floats are GCC's and clang's; a processor with narrower registers uses
 * several for one. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
typedef float loose_lanes __attribute__((vector_size(4 * LANES), aligned(4))); /* anywhere in memory */

/* Compiled for several generations of processors; which one runs is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define MANY_PROCESSORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MANY_PROCESSORS
#endif

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

INLINE lanes filled(float value)
{
    return (lanes){0} + value;
}

INLINE lanes choose(whole_lanes which, lanes yes, lanes no)
{
    return (lanes)((which & (whole_lanes)yes) | (~which & (whole_lanes)no));
}

INLINE whole_lanes choose_whole(whole_lanes which, whole_lanes yes, whole_lanes no)
{
    return (which & yes) | (~which & no);
}

INLINE lanes larger(lanes a, lanes b)
{
    return choose(a > b, a, b);
}
