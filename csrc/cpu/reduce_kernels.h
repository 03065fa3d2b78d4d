// SPDX-License-Identifier: Apache-2.0
// The table that each SIMD level's build of reduce_kernels.inc exports, and every header that it
// needs. The headers must come in before the level's target pragma. Otherwise the linker could keep
// a library's inline function, compiled under the pragma, for the whole program. A machine without
// AVX would then crash in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/convert.h"
#include "cpu/copy.h"
#include "cpu/reduce.h"
#include "cpu/rows.h"
#include "cpu/wire.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fastcoll {

struct Kernels {
  ReduceFn reduce;  // nullptr: the operation has no meaning
  PartialFns partial;
};

struct KernelTable {
  Kernels entries[kNumDTypes][kNumOps];
  RowFn rows[kNumDTypes];  // nullptr: not of this dtype
  WireFns wires[kNumWires];
};

namespace baseline {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

}  // namespace fastcoll
