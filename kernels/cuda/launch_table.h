// SPDX-License-Identifier: Apache-2.0
// The kernel of each plan, for the host.
#pragma once

#include "cuda/call.h"
#include "cuda/shape.h"

namespace fastcoll {

// Complex numbers are reduced as pairs of floats: numel doubles.
constexpr DType kernel_dtype(DType dtype) {
  if (dtype == DType::complex64) return DType::float32;
  if (dtype == DType::complex128) return DType::float64;
  return dtype;
}

// The kernel, or nullptr where there is none. `ll`: the message travels in LL packs (the plan's
// `inlined`). Defined in csrc/cuda/; every kernel takes one DeviceCall.
const void* kernel_for(Algorithm algorithm, Verb verb, DType dtype, bool ll);

}  // namespace fastcoll
