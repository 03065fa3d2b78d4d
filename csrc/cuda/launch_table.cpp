// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch_table.h"

#include "cuda/kernel_files.h"

namespace fastcoll {

namespace {

template <int kCode = 0>
const void* reduction_of(Algorithm algorithm, Verb verb, DType dtype, bool ll) {
  if constexpr (kCode == kNumDTypes) {
    return nullptr;
  } else {
    constexpr DType kDType = DType(kCode);
    if (dtype != kDType) return reduction_of<kCode + 1>(algorithm, verb, dtype, ll);
    return reduction_kernel<kernel_dtype(kDType)>(algorithm, verb, ll);
  }
}

}  // namespace

const void* kernel_for(Algorithm algorithm, Verb verb, DType dtype, bool ll) {
  if (const void* reduction = reduction_of(algorithm, verb, dtype, ll)) return reduction;
  // Meetings of all ranks order the copies of the copy engines; the host starts both.
  if (algorithm == Algorithm::copy_engine && verb == Verb::all_reduce)
    return move_kernel(Verb::barrier, ll);
  if (algorithm == Algorithm::multimem) return switch_move_kernel(verb, ll);
  return algorithm == Algorithm::direct ? move_kernel(verb, ll) : nullptr;
}

}  // namespace fastcoll
