// SPDX-License-Identifier: Apache-2.0
// Before a group trusts its mappings: every rank writes into every region and reads from it, with
// the very stores and loads that collectives use. Each step is a kernel, as all ranks must have
// written before one reads; the host waits in between. No protocol here: a kernel's end orders its
// stores.
#pragma once

#include "prim.cuh"

namespace fastcoll {

struct ProbeCall {
  std::byte* regions[kMaxGpuWorld];  // every rank's region as mapped here
  std::byte* multicast;              // all of them at once, where the switch is tried
  uint64_t token;                    // of this probe; the same on all ranks
  uint32_t* seen;                    // out; what stands at each kernel that has something to say
  int32_t rank, world_size;
};

// What rank `from` writes into rank `to`'s region: equal to nothing that was there before.
FASTCOLL_DEVICE uint64_t probe_word(uint64_t token, int from, int to) {
  return token * 0x9e3779b97f4a7c15ULL + uint64_t(from) * 64 + uint64_t(to) + 1;
}

// Everything lies at the start of scratch: words, one for each source rank; operands of the
// switch's sums and what it stored, a pack for each rank that asked for it.
FASTCOLL_DEVICE uint64_t* probe_words(std::byte* region) {
  return reinterpret_cast<uint64_t*>(region + kGpuScratchOffsetBytes);
}
FASTCOLL_DEVICE size_t probe_operand_offset(int rank) {
  return kGpuScratchOffsetBytes + sizeof(uint64_t) * kMaxGpuWorld + size_t(rank) * kPackBytes;
}
FASTCOLL_DEVICE size_t probe_stored_offset(int rank) {
  return probe_operand_offset(kMaxGpuWorld) + size_t(rank) * kPackBytes;
}

// ---- the regions; one thread for each peer

FASTCOLL_KERNEL probe_put_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int peer = int(thread_idx());
  if (peer < call.world_size)
    store_data<uint64_t>(reinterpret_cast<std::byte*>(probe_words(call.regions[peer]) + call.rank),
                         probe_word(call.token, call.rank, peer));
}

// seen, by rank: 1 the peer's store reached my memory, 2 my load sees what the peer has in its own.
FASTCOLL_KERNEL probe_get_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int peer = int(thread_idx());
  if (peer >= call.world_size) return;
  const uint64_t* mine = probe_words(call.regions[call.rank]);
  const uint64_t* theirs = probe_words(call.regions[peer]);
  const bool pushed = load_relaxed(mine + peer) == probe_word(call.token, peer, call.rank);
  const bool pulled = load_relaxed(theirs + peer) == probe_word(call.token, peer, peer);
  call.seen[peer] = (pushed ? 1 : 0) | (pulled ? 2 : 0);
}

// ---- the switch; one thread for each rank that asks it

// Small whole numbers, so that their sum is exact in any order.
FASTCOLL_DEVICE float probe_operand(uint64_t token, int from, int by, int lane) {
  return float(probe_word(token, from, by) % 1000 + uint64_t(lane));
}
FASTCOLL_DEVICE Pack probe_stored(uint64_t token, int by) {
  const uint64_t word = probe_word(token, by, by);
  return {{uint32_t(word), uint32_t(word >> 32), uint32_t(~word), uint32_t(~word >> 32)}};
}

FASTCOLL_KERNEL probe_operands_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  std::byte* operand = call.regions[call.rank] + probe_operand_offset(by);
  for (int lane = 0; lane < 4; ++lane)
    store_data<float>(operand + lane * 4, probe_operand(call.token, call.rank, by, lane));
}

// The sum that is this rank's to ask for, and a store into all regions. seen, of rank 0: 1 the sum
// is right.
FASTCOLL_KERNEL probe_sum_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  if (thread_idx() != 0) return;
  sync_aliases();
  const Pack sum = multimem_sum<DType::float32>(call, probe_operand_offset(call.rank));
  bool right = true;
  for (int lane = 0; lane < 4; ++lane) {
    float wanted = 0;
    for (int from = 0; from < call.world_size; ++from)
      wanted += probe_operand(call.token, from, call.rank, lane);
    right = right && __builtin_bit_cast(float, sum.words[lane]) == wanted;
  }
  multimem_store(call, probe_stored_offset(call.rank), probe_stored(call.token, call.rank));
  sync_aliases();
  call.seen[0] = right ? 1 : 0;
}

// seen, by rank: 1 what it had the switch store is in my memory.
FASTCOLL_KERNEL probe_stored_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  const Pack wanted = probe_stored(call.token, by);
  const Pack found = load_data<Pack>(call.regions[call.rank] + probe_stored_offset(by));
  bool right = true;
  for (int i = 0; i < 4; ++i) right = right && found.words[i] == wanted.words[i];
  call.seen[by] = right ? 1 : 0;
}

}  // namespace fastcoll
