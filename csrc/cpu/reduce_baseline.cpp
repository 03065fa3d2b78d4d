// SPDX-License-Identifier: Apache-2.0
// Reduction kernels for what every machine of the architecture has (SSE2 on x86, NEON on arm).
#include "cpu/reduce_kernels.h"

#define FASTCOLL_SIMD_LEVEL baseline
#include "cpu/reduce_kernels.inc"
