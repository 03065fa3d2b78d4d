// SPDX-License-Identifier: Apache-2.0
// Which kernel carries out a plan, and with how many blocks. Pure functions of what all ranks know
// to be equal; shared by the launcher and the simulator.
#pragma once

#include "cuda/call.h"

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

struct LaunchShape {
  int blocks;           // channels; 1 to kMaxChannels
  int threads;          // of a block
  uint32_t tile_bytes;  // what one rank's chunk has of one segment in one channel: whole packs
};

// num_bytes: what one rank puts in or gets out, whichever is more. max_blocks: how many may be
// resident, agreed by all ranks.
LaunchShape shape_for(Algorithm algorithm, Verb verb, DType dtype, bool ll, uint64_t num_bytes,
                      int world_size, int max_blocks);

// Largest message (num_bytes as above) that `ll` may carry.
constexpr uint64_t max_ll_bytes(Verb verb, int world_size, int max_blocks) {
  const uint64_t channels = uint64_t(max_blocks < kMaxLlChannels ? max_blocks : kMaxLlChannels);
  const bool per_rank = verb != Verb::all_reduce;
  return channels * kLlPacks * kLlBytes * uint64_t(per_rank ? world_size : 1);
}

}  // namespace fastcoll
