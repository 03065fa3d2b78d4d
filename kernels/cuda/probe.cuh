// SPDX-License-Identifier: Apache-2.0
// Tests the mappings of a group before their first use: every rank writes into every region and
// reads from it. The stores and loads are the very ones of collectives. Each step is a kernel, as
// all ranks must have written before one reads; the host waits in between. No protocol here: a
// kernel's end orders its stores.
#pragma once

#include "cuda/arithmetic.cuh"

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
  return token * 0x9e3779b97f4a7c15ULL + uint64_t(from) * kMaxGpuWorld + uint64_t(to) + 1;
}

// All of it lies at the start of scratch. First come words, one for each source rank. Then come the
// switch's operands, a pack for each type and each asking rank. Last come the stores through the
// switch, two packs for each rank: one is stored as a pack, one by words.
inline constexpr int kProbeTypes = 7;
inline constexpr uint32_t kProbeOfFloats = 1u << int(Op::sum);
inline constexpr uint32_t kProbeOfIntegers = 1u << int(Op::sum) | 1u << int(Op::min) |
                                             1u << int(Op::max) | 1u << int(Op::band) |
                                             1u << int(Op::bor) | 1u << int(Op::bxor);
FASTCOLL_DEVICE uint64_t* probe_words(std::byte* region) {
  return reinterpret_cast<uint64_t*>(region + kGpuScratchOffsetBytes);
}
FASTCOLL_DEVICE size_t probe_operand_offset(int type, int rank) {
  return kGpuScratchOffsetBytes + sizeof(uint64_t) * kMaxGpuWorld +
         size_t(type * kMaxGpuWorld + rank) * kPackBytes;
}
FASTCOLL_DEVICE size_t probe_stored_offset(int rank) {
  return probe_operand_offset(kProbeTypes, 0) + size_t(rank) * 2 * kPackBytes;
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

// Operands are whole numbers from 1 on. They are so small that sums of all ranks are exact in any
// order and in every type: bfloat16 has those up to 256.
inline constexpr uint32_t kProbeMost = 15, kProbeMostOfMany = 3;
static_assert(kMaxGpuWorld * kProbeMostOfMany <= 256);
FASTCOLL_DEVICE float probe_operand(const ProbeCall& call, int from, int by, int lane) {
  const uint64_t word = probe_word(call.token, from, by) * 0x9e3779b97f4a7c15ULL;
  const uint32_t most =
      uint32_t(call.world_size) * kProbeMost <= 256 ? kProbeMost : kProbeMostOfMany;
  return float(1 + uint32_t(word >> (32 + 4 * lane) & 15) % most);
}
// The sum of the operands of ranks first to last - 1, for the question of rank `by`.
template <DType kDType>
FASTCOLL_DEVICE Pack probe_sum(const ProbeCall& call, int first, int last, int by) {
  constexpr int kPerWord = int(4 / dtype_size(kDType));
  Pack pack{};
  FASTCOLL_UNROLL
  for (int lane = 0; lane < 4 * kPerWord; ++lane) {
    float sum = 0;
    for (int from = first; from < last; ++from) sum += probe_operand(call, from, by, lane);
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
// Each bit is either a rank's own or the same on all ranks. So BAND and BOR of many ranks have both
// ones and zeros. Neighbouring ranks have other signs.
template <DType kDType>
FASTCOLL_DEVICE Pack probe_integers(uint64_t token, int from, int by) {
  const auto bits = [&](uint64_t word, uint32_t use) {
    word = (word + use) * 0x9e3779b97f4a7c15ULL;
    return (word ^ word >> 32) * 0x9e3779b97f4a7c15ULL;
  };
  Pack pack{};
  FASTCOLL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint64_t own = bits(probe_word(token, from, by), uint32_t(half));
    const uint64_t common = bits(token, uint32_t(2 + half)), mask = bits(token, uint32_t(4 + half));
    pack.words[2 * half] = uint32_t((own & mask) | (common & ~mask));
    pack.words[2 * half + 1] = uint32_t(((own & mask) | (common & ~mask)) >> 32);
  }
  constexpr int kWords = int(dtype_size(kDType) / sizeof(uint32_t));
  FASTCOLL_UNROLL
  for (int last = kWords - 1; last < 4; last += kWords)
    pack.words[last] = (pack.words[last] & ~(1u << 31)) | uint32_t(from % 2) << 31;
  return pack;
}
template <DType kDType>
FASTCOLL_DEVICE Pack probe_pack(const ProbeCall& call, int from, int by) {
  if constexpr (switch_reduces_integers(kDType))
    return probe_integers<kDType>(call.token, from, by);
  else return probe_sum<kDType>(call, from, from + 1, by);
}

// The operation's bit, if the switch gets it right. Operations take turns with the pack's elements.
template <DType kDType, Op kOp>
FASTCOLL_DEVICE uint32_t probe_try_integer(const ProbeCall& call, int type) {
  using Word = std::conditional_t<dtype_size(kDType) == 4, uint32_t, uint64_t>;
  constexpr int kElements = int(kPackBytes / sizeof(Word)), kElement = int(kOp) % kElements;
  device::Reducer<kDType, 4> reducer;
  reducer.load(probe_pack<kDType>(call, 0, call.rank).words);
  for (int from = 1; from < call.world_size; ++from)
    reducer.accumulate(kOp, probe_pack<kDType>(call, from, call.rank).words);
  Pack wanted;
  reducer.finish(wanted.words, 0);
  const SwitchMemory memory{call.multicast, call.regions, call.world_size};
  const Word found = multimem_word<kOp, kDType, Word>(
      memory, probe_operand_offset(type, call.rank) + kElement * sizeof(Word));
  return found == device::get_element<Word>(wanted.words, kElement) ? 1u << int(kOp) : 0;
}
template <DType kDType>
FASTCOLL_DEVICE void probe_try(const ProbeCall& call, int type) {
  uint32_t right = 0;
  if constexpr (switch_reduces_integers(kDType)) {
    right |= probe_try_integer<kDType, Op::sum>(call, type);
    right |= probe_try_integer<kDType, Op::min>(call, type);
    right |= probe_try_integer<kDType, Op::max>(call, type);
    right |= probe_try_integer<kDType, Op::band>(call, type);
    right |= probe_try_integer<kDType, Op::bor>(call, type);
    right |= probe_try_integer<kDType, Op::bxor>(call, type);
  } else {
    const Pack sum = multimem_sum<kDType>(call, probe_operand_offset(type, call.rank));
    if (is_same(sum, probe_sum<kDType>(call, 0, call.world_size, call.rank)))
      right = kProbeOfFloats;
  }
  call.seen[type] = right;
}
// body.operator()<DType>(type) for each type that the switch reduces.
template <class Body>
FASTCOLL_DEVICE void for_probe_types(const Body& body) {
  body.template operator()<DType::float32>(0);
  body.template operator()<DType::float16>(1);
  body.template operator()<DType::bfloat16>(2);
  body.template operator()<DType::int32>(3);
  body.template operator()<DType::uint32>(4);
  body.template operator()<DType::int64>(5);
  body.template operator()<DType::uint64>(6);
}

FASTCOLL_DEVICE Pack probe_stored(uint64_t token, int by, int pack) {
  const uint64_t word = probe_word(token, by, by) + uint64_t(pack);
  return {{uint32_t(word), uint32_t(word >> 32), uint32_t(~word), uint32_t(~word >> 32)}};
}

FASTCOLL_KERNEL probe_operands_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  for_probe_types([&]<DType kDType>(int type) {
    store_data<Pack>(call.regions[call.rank] + probe_operand_offset(type, by),
                     probe_pack<kDType>(call, call.rank, by));
  });
}

// The results that are this rank's to ask for, and its stores into all regions. It reports by type
// a bit for each operation that is right.
FASTCOLL_KERNEL probe_reduce_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  if (thread_idx() != 0) return;
  sync_aliases();
  for_probe_types([&]<DType kDType>(int type) { probe_try<kDType>(call, type); });
  const size_t at = probe_stored_offset(call.rank);
  multimem_store(call, at, probe_stored(call.token, call.rank, 0));
  const SwitchMemory memory{call.multicast, call.regions, call.world_size};
  const Pack by_words = probe_stored(call.token, call.rank, 1);
  multimem_store_word(memory, at + kPackBytes, by_words.words[0]);
  multimem_store_word(memory, at + kPackBytes + 4, by_words.words[1]);
  multimem_store_word(memory, at + kPackBytes + 8,
                      uint64_t{by_words.words[3]} << 32 | by_words.words[2]);
  sync_aliases();
}

// seen, by rank: 1 its stores through the switch are in my memory.
FASTCOLL_KERNEL probe_stored_kernel(FASTCOLL_ARGUMENT(ProbeCall) call) {
  const int by = int(thread_idx());
  if (by >= call.world_size) return;
  const std::byte* at = call.regions[call.rank] + probe_stored_offset(by);
  bool is_right = true;
  for (int pack = 0; pack < 2; ++pack)
    is_right = is_right &&
               is_same(load_data<Pack>(at + pack * kPackBytes), probe_stored(call.token, by, pack));
  call.seen[by] = is_right ? 1 : 0;
}

}  // namespace fastcoll
