// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.h"
#include "cuda/launch_table.h"
#include "cuda/partials.cuh"

namespace fastcoll {

namespace {

template <int kCode = 0>
const void* kernel_of(DType dtype) {
  if constexpr (kCode == kNumDTypes) {
    return nullptr;
  } else {
    constexpr DType kDType = DType(kCode);
    if (dtype != kDType) return kernel_of<kCode + 1>(dtype);
    return reinterpret_cast<const void*>(&add_partials<kernel_dtype(kDType)>);
  }
}

}  // namespace

const void* partials_kernel(DType dtype) { return kernel_of(dtype); }

}  // namespace fastcoll
