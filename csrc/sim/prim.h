// SPDX-License-Identifier: Apache-2.0
// The simulator's body of kernels/prim.cuh, which includes it. Shared words are atomics, data is
// plain memory, and every touch of a shared word lets other fibers run.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/convert.h"
#include "sim/scheduler.h"

#define FASTCOLL_DEVICE inline
#define FASTCOLL_SLOW_PATH inline
#define FASTCOLL_KERNEL void
#define FASTCOLL_ARGUMENT(type) const type&
#define FASTCOLL_CALL FASTCOLL_ARGUMENT(DeviceCall)
#define FASTCOLL_KERNEL_FN void (*)(const DeviceCall&)
#define FASTCOLL_UNROLL
#define FASTCOLL_NO_UNROLL

namespace fastcoll {

// Polls between two looks at the clock: few, so that tests reach the slow path.
inline constexpr int kPollsPerLook = 8;

inline uint32_t thread_idx() { return sim::self().thread; }
inline uint32_t num_threads() { return sim::self().num_threads; }
inline uint32_t block_idx() { return sim::self().block; }
inline uint32_t num_blocks() { return sim::self().num_blocks; }

inline bool sync_any(bool value) {
  __atomic_fetch_add(sim::block_sync(), 1, __ATOMIC_ACQ_REL);
  const bool any = sim::barrier(value);
  (void)__atomic_load_n(sim::block_sync(), __ATOMIC_ACQUIRE);
  return any;
}
inline void sync_block() { sync_any(false); }

template <class T>
T& block_shared() {
  static_assert(sizeof(T) <= sim::kBlockMemoryBytes);
  return *static_cast<T*>(sim::block_memory());
}

inline void await_stream() { sim::await_stream(); }
inline void let_next_start() { sim::let_next_start(); }

template <class T>
T load_relaxed(const T* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}
inline uint64_t load_acquire(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store_relaxed(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
  sim::progress();
  sim::yield();
}
inline void store_release(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  sim::progress();
  sim::yield();
}

// One atom of 16 bytes: no other fiber runs between its halves.
inline ArrivePack load_relaxed(const ArrivePack* pack) {
  return {load_relaxed(&pack->slot), load_relaxed(&pack->location)};
}
inline ArrivePack load_acquire(const ArrivePack* pack) {
  return {load_acquire(&pack->slot), load_relaxed(&pack->location)};
}
inline void store_relaxed(ArrivePack* pack, ArrivePack value) {
  __atomic_store_n(&pack->location, value.location, __ATOMIC_RELAXED);
  store_relaxed(&pack->slot, value.slot);
}
inline void store_release(ArrivePack* pack, ArrivePack value) {
  __atomic_store_n(&pack->location, value.location, __ATOMIC_RELAXED);
  store_release(&pack->slot, value.slot);
}
inline LlPack load_relaxed(const LlPack* pack) {
  return {load_relaxed(&pack->data), load_relaxed(&pack->slot)};
}
inline void store_relaxed(LlPack* pack, LlPack value) {
  __atomic_store_n(&pack->data, value.data, __ATOMIC_RELAXED);
  store_relaxed(&pack->slot, value.slot);
}

inline StateHalf load_relaxed(const StateHalf* half) {
  return {load_relaxed(&half->slot), load_relaxed(&half->count), load_relaxed(&half->mark)};
}
inline void store_relaxed(StateHalf* half, StateHalf value) {
  __atomic_store_n(&half->count, value.count, __ATOMIC_RELAXED);
  __atomic_store_n(&half->mark, value.mark, __ATOMIC_RELAXED);
  store_relaxed(&half->slot, value.slot);
}

inline uint64_t exchange(uint64_t* word, uint64_t value) {
  sim::yield();  // an earlier read may be stale by now
  const uint64_t seen = __atomic_exchange_n(word, value, __ATOMIC_RELAXED);
  sim::progress();
  return seen;
}
inline bool claim(uint64_t* word) {
  uint64_t free = 0;
  return __atomic_compare_exchange_n(word, &free, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
inline void store_release_host(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

template <class T>
T load_data(const std::byte* from) {
  if constexpr (sizeof(T) == sizeof(Pack)) sim::count_load();
  return *reinterpret_cast<const T*>(from);
}
template <class T>
void store_data(std::byte* to, T value) {
  if constexpr (sizeof(T) == sizeof(Pack)) sim::count_store();
  *reinterpret_cast<T*>(to) = value;
}

inline uint64_t time_ns() { return sim::now_ns(); }
inline void spin(int peer, Phase phase, uint64_t expected, uint64_t seen) {
  sim::spin(peer, kPhaseNames[int(phase)], expected, seen);
}

inline float widen_fp16(uint16_t code) { return Fp16::widen(code); }
inline uint16_t narrow_fp16(float value) { return uint16_t(Fp16::narrow(value)); }

// The switch, which here sums in the order of ranks. Like a GPU it takes whole packs only.
inline void check_pack_offset(size_t offset_bytes, size_t grain_bytes = kPackBytes) {
  if (offset_bytes % grain_bytes == 0) return;
  std::fprintf(stderr, "WRONG: the switch was given the offset %zu\n", offset_bytes);
  std::exit(1);
}
inline bool switch_forgets_halves = false;  // a planted bug: it leaves out the last rank's
template <DType kDType, class Call>
Pack multimem_sum(const Call& call, size_t offset_bytes) {
  check_pack_offset(offset_bytes);
  const auto load = [&](int rank, int i) {
    const std::byte* from = call.regions[rank] + offset_bytes;
    if constexpr (kDType == DType::float32) return load_data<float>(from + i * 4);
    const auto code = load_data<uint16_t>(from + i * 2);
    return kDType == DType::float16 ? Fp16::widen(code) : widen_bf16(code);
  };
  Pack pack{};
  constexpr int kNumel = int(kPackBytes / dtype_size(kDType));
  const int num_ranks = call.world_size - (switch_forgets_halves && dtype_size(kDType) == 2);
  for (int i = 0; i < kNumel; ++i) {
    float sum = load(0, i);
    for (int rank = 1; rank < num_ranks; ++rank) sum += load(rank, i);
    auto* to = reinterpret_cast<std::byte*>(pack.words) + size_t(i) * dtype_size(kDType);
    if constexpr (kDType == DType::float32) store_data(to, sum);
    else store_data(to, kDType == DType::float16 ? narrow_fp16(sum) : narrow_bf16(sum));
  }
  return pack;
}
template <class Call>
void multimem_store(const Call& call, size_t offset_bytes, const Pack& pack) {
  check_pack_offset(offset_bytes);
  for (int rank = 0; rank < call.world_size; ++rank)
    store_data<Pack>(call.regions[rank] + offset_bytes, pack);
}
// Integers: the last rank's first, as no order may matter. Planted bugs: MIN and MAX of bare bits,
// no integers of 8 bytes, no stores of words.
inline bool switch_forgets_signs = false, switch_lacks_longs = false, switch_drops_words = false;
template <Op kOp, DType kDType, class Word>
Word multimem_word(const SwitchMemory& memory, size_t offset_bytes) {
  static_assert(sizeof(Word) == dtype_size(kDType));
  check_pack_offset(offset_bytes, sizeof(Word));
  const auto load = [&](int rank) { return load_data<Word>(memory.regions[rank] + offset_bytes); };
  constexpr bool kSigned = kDType == DType::int32 || kDType == DType::int64;
  const Word sign = kSigned && !switch_forgets_signs ? Word{1} << (8 * sizeof(Word) - 1) : Word{0};
  if (switch_lacks_longs && sizeof(Word) == 8) return 0;
  Word word = load(memory.world_size - 1);
  for (int rank = memory.world_size - 2; rank >= 0; --rank) {
    const Word other = load(rank);
    if (kOp == Op::sum) word += other;
    if (kOp == Op::min) word = (other ^ sign) < (word ^ sign) ? other : word;
    if (kOp == Op::max) word = (other ^ sign) > (word ^ sign) ? other : word;
    if (kOp == Op::band) word &= other;
    if (kOp == Op::bor) word |= other;
    if (kOp == Op::bxor) word ^= other;
  }
  return word;
}
template <class Word>
void multimem_store_word(const SwitchMemory& memory, size_t offset_bytes, Word word) {
  check_pack_offset(offset_bytes, sizeof(Word));
  for (int rank = 0; rank < memory.world_size && !switch_drops_words; ++rank)
    store_data<Word>(memory.regions[rank] + offset_bytes, word);
}
inline void sync_aliases() {}  // no address of its own

}  // namespace fastcoll
