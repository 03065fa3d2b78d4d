// SPDX-License-Identifier: Apache-2.0
// Reduction kernels for x86 machines with AVX2; nothing elsewhere. The target is set by
// pragma, after every header, because all files of the extension are compiled with equal flags.
#include "cpu/reduce_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define FASTCOLL_SIMD_LEVEL avx2
#define FASTCOLL_F16C
#include "cpu/reduce_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
