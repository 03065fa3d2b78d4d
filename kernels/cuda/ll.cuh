// SPDX-License-Identifier: Apache-2.0
// The exchange of LL packs. A pack holds 8 bytes of data and the call's slot in one atom. It is
// pushed into every peer's pad and compared there on ==. It is arrival and data at once: nothing
// else is exchanged.
#pragma once

#include "cuda/channel.cuh"
#include "cuda/packs.cuh"

namespace fastcoll {

// LL packs whose loads are in flight at the same time.
inline constexpr int kLlLoadsAtOnce = 8;

// The data for a rank is give(rank, offset_bytes); num_bytes of it go to each rank. Then take(rank,
// offset_bytes, data) gets the data of each rank, in the order of ranks, mine included. At last
// comes end(offset_bytes). False: failed.
template <class P, class Give, class Take, class End>
FASTCOLL_DEVICE bool exchange_ll(Channel<P>& channel, uint64_t num_bytes, Give give, Take take,
                                 End end) {
  const DeviceCall& call = channel.call();
  const uint32_t parity = channel.begin_ll();
  if (channel.failed()) return false;  // no store to a peer in a broken group
  const uint64_t packs = (num_bytes + kLlBytes - 1) / kLlBytes;
  const uint64_t part = (packs + channel.count() - 1) / channel.count();
  const uint64_t first = channel.idx() * part;
  // A channel without data sends one pack all the same: it is how ranks meet.
  const uint64_t least = first < packs ? first : packs;
  const uint64_t mine = packs - least < part ? packs - least : part;
  const uint32_t count = mine == 0 ? 1 : uint32_t(mine);
  const auto area = [&](int owner, int source) { return channel.ll(owner, parity, source); };

  for (uint32_t i = thread_idx(); i < count; i += num_threads()) {
    const uint64_t at = (least + i) * kLlBytes;
    for (int rank = 0; rank < call.world_size; ++rank) {
      if (rank == call.rank) continue;
      store_relaxed(&area(rank, call.rank)[i],
                    LlPack{at < num_bytes ? give(rank, at) : 0, channel.slot()});
    }
  }
  for (uint32_t i = thread_idx(); i < count; i += num_threads()) {
    const uint64_t at = (least + i) * kLlBytes;
    const uint64_t own = at < num_bytes ? give(call.rank, at) : 0;
    for (int base = 0; base < call.world_size; base += kLlLoadsAtOnce) {
      LlPack seen[kLlLoadsAtOnce];
      typename Channel<P>::Patience patience{};
      for (;;) {
        int missing = -1;
        uint64_t missing_slot = 0;
        FASTCOLL_UNROLL
        for (int q = 0; q < kLlLoadsAtOnce; ++q) {
          const int rank = base + q;
          if (rank >= call.world_size || rank == call.rank) continue;
          seen[q] = load_relaxed(&area(call.rank, rank)[i]);
        }
        FASTCOLL_UNROLL
        for (int q = 0; q < kLlLoadsAtOnce; ++q) {
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
      for (int q = 0; q < kLlLoadsAtOnce; ++q) {
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
