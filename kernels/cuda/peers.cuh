// SPDX-License-Identifier: Apache-2.0
// Sets of the ranks that a rank speaks with in a call, and which of them are a thread's own.
#pragma once

#include "prim.cuh"

namespace fastcoll {

// Ranks in a row, without this one: all peers, one, both neighbours, or none. No algorithm needs
// another set. It is as cheap for many ranks as for a few, where a bit for each would take a thread
// several registers more.
class Peers {
 public:
  FASTCOLL_DEVICE Peers() {}
  // Those of first to end - 1 that the group has.
  FASTCOLL_DEVICE Peers(const GroupCall& call, int first, int end)
      : first_(first < 0 ? 0 : first),
        end_(end > call.world_size ? call.world_size : end),
        self_(call.rank) {}

  FASTCOLL_DEVICE bool has(int rank) const {
    return rank >= first_ && rank < end_ && rank != self_;
  }
  FASTCOLL_DEVICE int count() const {
    return end_ - first_ - (self_ >= first_ && self_ < end_ ? 1 : 0);
  }
  FASTCOLL_DEVICE bool is_empty() const { return count() == 0; }

 private:
  int first_ = 0, end_ = 0, self_ = -1;
};

static_assert(kMaxGpuWorld <= 32 * 32, "a block has 32 threads or more, with 32 ranks each");
// f(rank, bit) for the ranks that a thread of the block speaks with: thread t has t, t +
// num_threads(), ... The bits tell its ranks apart in a word of its own.
template <class F>
FASTCOLL_DEVICE void for_own_ranks(int world_size, F f) {
  uint32_t bit = 1;
  FASTCOLL_NO_UNROLL
  for (int rank = int(thread_idx()); rank < world_size; rank += int(num_threads()), bit <<= 1)
    f(rank, bit);
}

}  // namespace fastcoll
