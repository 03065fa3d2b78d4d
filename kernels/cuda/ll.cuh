// SPDX-License-Identifier: Apache-2.0
// The exchange of LL packs. A pack holds 8 bytes of data and the call's slot in one atom. It is
// pushed into every peer's pad and compared there on ==. It is arrival and data at once: nothing
// else is exchanged.
#pragma once

#include "cuda/channel.cuh"
#include "cuda/packs.cuh"

namespace fastcoll {

// Ranks whose packs a thread handles at the same time: so many loads are under way at once.
inline constexpr int kLlRanksAtOnce = 8;

// The data that this rank gives to each rank.
struct LlInput {
  const std::byte* first;                   // for rank 0
  uint64_t stride_bytes;                    // to the next rank's; 0: all ranks get the same
  uint64_t num_bytes;                       // for one rank
  const std::byte* const* apart = nullptr;  // in place of the first two: by rank

  // An input of a part for each rank.
  FASTCOLL_DEVICE static LlInput cut(const DeviceCall& call, uint64_t part_bytes) {
    return {call.input, part_bytes, part_bytes, call.input_apart ? call.input_parts : nullptr};
  }
  FASTCOLL_DEVICE bool is_whole() const { return stride_bytes == 0; }
  FASTCOLL_DEVICE const std::byte* end_to_end(int rank, uint64_t at) const {
    return first + uint64_t(rank) * stride_bytes + at;
  }
  // The data of one pack. Behind the message there is none.
  FASTCOLL_DEVICE uint64_t load(int rank, uint64_t at) const {
    if (at >= num_bytes) return 0;
    return load_ll(apart != nullptr ? apart[rank] + at : end_to_end(rank, at), num_bytes - at);
  }
  // Whether every rank's data at this place is one load of 8 bytes.
  FASTCOLL_DEVICE bool is_plain(uint64_t at) const {
    return at + kLlBytes <= num_bytes && is_aligned(first + at, kLlBytes) &&
           stride_bytes % kLlBytes == 0;
  }
};

// This rank's data for its thread's first pack, loaded before the call begins: no turn or peer has
// a say in it. Behind a store each load would be a wait of its own. Not of parts that lie apart:
// beside those the compiler forgets in which memory all others lie.
struct LlAhead {
  uint64_t own = 0;
  uint64_t parts[kLlRanksAtOnce];  // for the first ranks, if each gets another part
  bool has_own = false, has_parts = false;

  FASTCOLL_DEVICE LlAhead(const LlInput& input, const GroupCall& call, uint64_t at) {
    has_own = input.apart == nullptr;
    if (!has_own || at >= input.num_bytes) return;
    own = load_ll(input.end_to_end(call.rank, at), input.num_bytes - at);
    has_parts = !input.is_whole() && input.is_plain(at);
    if (!has_parts) return;
    FASTCOLL_UNROLL
    for (int rank = 0; rank < kLlRanksAtOnce; ++rank)
      if (rank < call.world_size) parts[rank] = load_data<uint64_t>(input.end_to_end(rank, at));
  }
};

// The packs of this block: `count` of them from `first` on. A channel without data sends one pack
// all the same: it is how ranks meet.
struct LlShare {
  uint64_t first;
  uint32_t count;

  FASTCOLL_DEVICE LlShare(uint64_t num_bytes, uint32_t idx, uint32_t num_channels) {
    const uint64_t packs = (num_bytes + kLlBytes - 1) / kLlBytes;
    const uint64_t part = (packs + num_channels - 1) / num_channels;
    first = idx * part < packs ? idx * part : packs;
    const uint64_t mine = packs - first < part ? packs - first : part;
    count = mine == 0 ? 1 : uint32_t(mine);
  }
};

// The input for every rank but mine, as packs in their areas.
template <class P>
FASTCOLL_DEVICE void push_ll(const Channel<P>& channel, uint32_t parity, const LlInput& input,
                             const LlShare& share, const LlAhead& ahead) {
  const GroupCall& call = channel.call();
  for (uint32_t i = thread_idx(); i < share.count; i += num_threads()) {
    const uint64_t at = (share.first + i) * kLlBytes;
    const auto store = [&](int rank, uint64_t data) {
      if (rank != call.rank)
        store_relaxed(&channel.ll(rank, parity, call.rank)[i], LlPack{data, channel.slot()});
    };
    const bool is_first = i < num_threads();
    int rank = 0;
    if (is_first && ahead.has_parts) {
      FASTCOLL_UNROLL
      for (int q = 0; q < kLlRanksAtOnce; ++q)
        if (q < call.world_size) store(q, ahead.parts[q]);
      rank = kLlRanksAtOnce;
    }
    const bool has_own = is_first && ahead.has_own;
    const uint64_t own = has_own ? ahead.own : input.is_whole() ? input.load(call.rank, at) : 0;
    for (; rank < call.world_size; ++rank)
      store(rank, input.is_whole() ? own : input.load(rank, at));
  }
}

// Every rank gives each rank its part of the input. Then take(rank, offset_bytes, data) gets the
// data of each rank, in the order of ranks, mine included. At last comes end(offset_bytes). False:
// failed.
template <class P, class Take, class End>
FASTCOLL_DEVICE bool exchange_ll(Channel<P>& channel, const LlInput& input, Take take, End end) {
  const GroupCall& call = channel.call();
  const LlShare share(input.num_bytes, channel.idx(), channel.count());
  const uint64_t num_bytes = input.num_bytes;
  const LlAhead ahead(
      input, call,
      thread_idx() < share.count ? (share.first + thread_idx()) * kLlBytes : num_bytes);
  const uint32_t parity = channel.begin_ll();
  if (channel.failed()) return false;  // no store to a peer in a broken group
  push_ll(channel, parity, input, share, ahead);
  const auto area = [&](int source) { return channel.ll(call.rank, parity, source); };

  for (uint32_t i = thread_idx(); i < share.count; i += num_threads()) {
    const uint64_t at = (share.first + i) * kLlBytes;
    const bool has_own = i < num_threads() && ahead.has_own;
    const uint64_t own = has_own ? ahead.own : input.load(call.rank, at);
    for (int base = 0; base < call.world_size; base += kLlRanksAtOnce) {
      LlPack seen[kLlRanksAtOnce];
      typename Channel<P>::Patience patience{};
      for (;;) {
        int missing = -1;
        uint64_t missing_slot = 0;
        FASTCOLL_UNROLL
        for (int q = 0; q < kLlRanksAtOnce; ++q) {
          const int rank = base + q;
          if (rank >= call.world_size || rank == call.rank) continue;
          seen[q] = load_relaxed(&area(rank)[i]);
        }
        FASTCOLL_UNROLL
        for (int q = 0; q < kLlRanksAtOnce; ++q) {
          const int rank = base + q;
          if (rank >= call.world_size || rank == call.rank) continue;
          if (seen[q].slot != channel.slot()) {
            missing = rank;
            missing_slot = seen[q].slot;
          }
        }
        if (missing < 0 || channel.failed()) break;
        channel.look_around(patience, {missing, Phase::arrival, channel.slot(), channel.slot(),
                                       missing_slot, true});
      }
      FASTCOLL_UNROLL
      for (int q = 0; q < kLlRanksAtOnce; ++q) {
        const int rank = base + q;
        if (rank < call.world_size) take(rank, at, rank == call.rank ? own : seen[q].data);
      }
    }
    if (at < num_bytes) end(at);
  }
  if (channel.sync_failed()) return false;
  channel.end_ll();
  return true;
}

}  // namespace fastcoll
