// SPDX-License-Identifier: Apache-2.0
// The reducing kernels of one element type, for the reductions_*.cu.
#pragma once

#include "cuda/kernel_files.h"
#include "cuda/kernels.cuh"

namespace fastcoll {

template <DType kDType>
const void* reduction_kernel(Algorithm algorithm, Verb verb, bool ll) {
  return reinterpret_cast<const void*>(reducing_kernel<Protocol, kDType>(algorithm, verb, ll));
}

}  // namespace fastcoll
