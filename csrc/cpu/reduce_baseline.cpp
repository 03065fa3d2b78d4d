// SPDX-License-Identifier: Apache-2.0
// Reduction kernels for every machine of the architecture (SSE2 on x86, NEON on arm).
#include "cpu/reduce_kernels.h"

#define FASTCOLL_SIMD_LEVEL baseline
#include "cpu/reduce_kernels.inc"
