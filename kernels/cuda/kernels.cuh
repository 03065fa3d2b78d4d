// SPDX-License-Identifier: Apache-2.0
// The table behind kernel_for: the kernel of each plan, for the device and for the simulator. Each
// file that includes this one instantiates kernels; csrc/cuda/ does so by element type, in several
// files.
#pragma once

#include "cuda/chain.cuh"
#include "cuda/direct.cuh"
#include "cuda/multimem.cuh"
#include "cuda/one_shot.cuh"
#include "cuda/ring.cuh"
#include "cuda/two_shot.cuh"

namespace fastcoll {

using KernelFn = FASTCOLL_KERNEL_FN;

// all_reduce, reduce_scatter and reduce of one type, or nullptr.
template <class P, DType kDType>
KernelFn reducing_kernel(Algorithm algorithm, Verb verb, bool ll) {
  const bool scatters = verb == Verb::reduce_scatter;
  if (verb != Verb::all_reduce && !scatters && verb != Verb::reduce) return nullptr;
  // A reduce_scatter by two_shot has one shot, as has a reduce.
  const bool one =
      algorithm == Algorithm::one_shot || (algorithm == Algorithm::two_shot && scatters);
  if (one && ll) return verb == Verb::reduce ? nullptr : one_shot_ll<P, kDType>;
  if (ll) return nullptr;
  if (one || (algorithm == Algorithm::direct && verb == Verb::reduce)) return one_shot<P, kDType>;
  if (verb == Verb::reduce) return nullptr;
  if constexpr (switch_reduces(kDType)) {
    if (algorithm == Algorithm::multimem) return multimem<P, kDType>;
  }
  if (algorithm == Algorithm::two_shot) return two_shot<P, kDType>;
  if (algorithm == Algorithm::ring) return ring<P, kDType>;
  if (algorithm == Algorithm::chain) return chain<P, kDType>;
  return nullptr;
}

// The collectives that move data of any type, all of algorithm `direct`, or nullptr.
template <class P>
KernelFn moving_kernel(Verb verb, bool ll) {
  switch (verb) {
    case Verb::all_gather:
    case Verb::all_to_all:
      return ll ? move_ll<P> : move<P>;
    case Verb::broadcast:
    case Verb::gather:
    case Verb::scatter:
      return ll ? nullptr : move<P>;
    case Verb::barrier:
      return ll ? nullptr : barrier<P>;
    default:
      return nullptr;
  }
}

// Those that the switch carries.
template <class P>
KernelFn switch_moving_kernel(Verb verb, bool ll) {
  const bool has = !ll && (verb == Verb::all_gather || verb == Verb::broadcast);
  return has ? multimem_move<P> : nullptr;
}

}  // namespace fastcoll
