// SPDX-License-Identifier: Apache-2.0
// Reduction kernels for x86 machines with AVX-512; nothing elsewhere. The target is set by
// pragma, after every header, because all files of the extension are compiled with equal flags.
#include "cpu/reduce_kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#endif

#define FASTCOLL_SIMD_LEVEL avx512
#define FASTCOLL_F16C
#define FASTCOLL_FMA
#include "cpu/reduce_kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
