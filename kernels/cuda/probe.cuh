// SPDX-License-Identifier: Apache-2.0
// Before a group trusts its mappings: every rank writes into every region and reads from it, with
// the very stores and loads that collectives use. Two kernels, as all ranks must have written
// before one reads; the host waits in between. No protocol here: a kernel's end orders its stores.
#pragma once

#include "cuda/call.h"

namespace fastcoll {

struct ProbeCall {
  std::byte* regions[kMaxGpuWorld];  // every rank's region as mapped here
  uint64_t token;                    // of this probe; the same on all ranks
  uint32_t* seen;  // out, by rank: 1 the peer's store reached my memory, 2 my load
                   // sees what the peer has in its own
  int32_t rank, world_size;
};

// What rank `from` writes into rank `to`'s region: equal to nothing that was there before.
__host__ __device__ constexpr uint64_t probe_word(uint64_t token, int from, int to) {
  return token * 0x9e3779b97f4a7c15ULL + uint64_t(from) * 64 + uint64_t(to) + 1;
}

// The words lie at the start of scratch, one for each source rank.
__device__ inline uint64_t* probe_words(std::byte* region) {
  return reinterpret_cast<uint64_t*>(region + kGpuScratchOffsetBytes);
}

// One thread for each peer.
__global__ void probe_put_kernel(const __grid_constant__ ProbeCall call) {
  const int peer = int(threadIdx.x);
  if (peer < call.world_size)
    probe_words(call.regions[peer])[call.rank] = probe_word(call.token, call.rank, peer);
}

__global__ void probe_get_kernel(const __grid_constant__ ProbeCall call) {
  const int peer = int(threadIdx.x);
  if (peer >= call.world_size) return;
  const volatile uint64_t* mine = probe_words(call.regions[call.rank]);
  const volatile uint64_t* theirs = probe_words(call.regions[peer]);
  const bool pushed = mine[peer] == probe_word(call.token, peer, call.rank);
  const bool pulled = theirs[peer] == probe_word(call.token, peer, peer);
  call.seen[peer] = (pushed ? 1 : 0) | (pulled ? 2 : 0);
}

}  // namespace fastcoll
