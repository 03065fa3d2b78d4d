// SPDX-License-Identifier: Apache-2.0
// Tests the mappings of a group before their first use: every rank writes into every region and
// reads from it. The stores and loads are the very ones of collectives. Each step is a kernel, as
// all ranks must have written before one reads; the host waits in between. No protocol here: a
// kernel's end orders its stores.
#pragma once

#include "prim.cuh"

namespace fastcoll {

struct ProbeCall {
  std::byte* regions[kMaxGpuWorld];  // every rank's region as mapped here
  std::byte* multicast;              // all of them at once, where the switch is tried
  uint64_t token;                    // of this probe; the same on all ranks
  uint32_t* seen;                    // out; its meaning stands at each kernel that writes it
  int32_t rank, world_size;
};

// The word of rank `from` in rank `to`'s region: it differs from all words of earlier probes.
FASTCOLL_DEVICE uint64_t probe_word(uint64_t token, int from, int to) {
  return token * 0x9e3779b97f4a7c15ULL + uint64_t(from) * 64 + uint64_t(to) + 1;
}

// All of it lies at the start of scratch. First come words, one for each source rank. Then come
// operands of the switch's sums, a pack for each type and each asking rank. Last come the stores
// through the switch, a pack for each rank.
inline constexpr int kProbeTypes = 3;  // that the switch adds: float32, float16, bfloat16
FASTCOLL_DEVICE uint64_t* probe_words(std::byte* region) {
  return reinterpret_cast<uint64_t*>(region + kGpuScratchOffsetBytes);
}
FASTCOLL_DEVICE size_t probe_operand_offset(int type, int rank) {
  return kGpuScratchOffsetBytes + sizeof(uint64_t) * kMaxGpuWorld +
         size_t(type * kMaxGpuWorld + rank) * kPackBytes;
}
FASTCOLL_DEVICE size_t probe_stored_offset(int rank) {
  return probe_operand_offset(kProbeTypes, rank);
}

// ---- the regions; one thread for each peer

FASTCOLL_KERNEL probe_put_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int peer = int(thread_idx());
  if (peer < call.world_size)
    store_data<uint64_t>(reinterpret_cast<std::byte*>(probe_words(call.regions[peer]) + call.rank),
                         probe_word(call.token, call.rank, peer));
}

// seen, by rank: 1 the peer's store reached my memory, 2 my load sees the peer's own word.
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

// Whole numbers up to 15, so that sums of 16 ranks are exact in any order and in every type.
FASTCOLL_DEVICE float probe_operand(uint64_t token, int from, int by, int lane) {
  return float(probe_word(token, from, by) * 0x9e3779b97f4a7c15ULL >> (32 + 4 * lane) & 15);
}
// The sum of the operands of ranks first to last - 1, for the question of rank `by`.
template <DType kDType>
FASTCOLL_DEVICE Pack probe_sum(uint64_t token, int first, int last, int by) {
  constexpr int kPerWord = int(4 / dtype_size(kDType));
  Pack pack{};
  FASTCOLL_UNROLL
  for (int lane = 0; lane < 4 * kPerWord; ++lane) {
    float sum = 0;
    for (int from = first; from < last; ++from) sum += probe_operand(token, from, by, lane);
    uint32_t code = __builtin_bit_cast(uint32_t, sum);
    if constexpr (kDType == DType::float16) code = narrow_fp16(sum);
    if constexpr (kDType == DType::bfloat16) code >>= 16;  // nothing is cut off
    pack.words[lane / kPerWord] |= code << (lane % kPerWord * 16);
  }
  return pack;
}
FASTCOLL_DEVICE bool is_same(const Pack& one, const Pack& other) {
  bool same = true;
  FASTCOLL_UNROLL
  for (int i = 0; i < 4; ++i) same = same && one.words[i] == other.words[i];
  return same;
}
template <DType kDType>
FASTCOLL_DEVICE void probe_put_operand(const ProbeCall& call, int type, int by) {
  store_data<Pack>(call.regions[call.rank] + probe_operand_offset(type, by),
                   probe_sum<kDType>(call.token, call.rank, call.rank + 1, by));
}
template <DType kDType>
FASTCOLL_DEVICE void probe_try_sum(const ProbeCall& call, int type) {
  const Pack sum = multimem_sum<kDType>(call, probe_operand_offset(type, call.rank));
  const Pack wanted = probe_sum<kDType>(call.token, 0, call.world_size, call.rank);
  call.seen[type] = is_same(sum, wanted) ? 1 : 0;
}

FASTCOLL_DEVICE Pack probe_stored(uint64_t token, int by) {
  const uint64_t word = probe_word(token, by, by);
  return {{uint32_t(word), uint32_t(word >> 32), uint32_t(~word), uint32_t(~word >> 32)}};
}

FASTCOLL_KERNEL probe_operands_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  probe_put_operand<DType::float32>(call, 0, by);
  probe_put_operand<DType::float16>(call, 1, by);
  probe_put_operand<DType::bfloat16>(call, 2, by);
}

// The sums that are this rank's to ask for, and a store into all regions. seen, by type: 1 the sum
// is right.
FASTCOLL_KERNEL probe_sum_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  if (thread_idx() != 0) return;
  sync_aliases();
  probe_try_sum<DType::float32>(call, 0);
  probe_try_sum<DType::float16>(call, 1);
  probe_try_sum<DType::bfloat16>(call, 2);
  multimem_store(call, probe_stored_offset(call.rank), probe_stored(call.token, call.rank));
  sync_aliases();
}

// seen, by rank: 1 its store through the switch is in my memory.
FASTCOLL_KERNEL probe_stored_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  const Pack found = load_data<Pack>(call.regions[call.rank] + probe_stored_offset(by));
  call.seen[by] = is_same(found, probe_stored(call.token, by)) ? 1 : 0;
}

}  // namespace fastcoll
