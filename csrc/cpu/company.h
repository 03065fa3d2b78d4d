// SPDX-License-Identifier: Apache-2.0
// Whether other programs want the CPU on which a rank waits. If they do, the rank sleeps instead of
// yielding.
//
// Among ranks a yield is the shortest way to let a peer run. But to a stranger it gives a whole
// time slice, and Linux takes the rest of the yielding thread's slice as well (seen on 6.18). A
// thread that sleeps loses nothing: it runs soon after it was woken. Measured were two ranks beside
// a busy process per core, with a 256 x 256 matmul and an all_reduce of 1 MiB a step. They made 38
// steps a second by yielding, 718 by sleeping, and 323 on Gloo (Xeon).
//
// A yield that lasts as long as a slice tells of a stranger. For a second from then on, waits sleep
// after few spins. The next yield tries again: a few slices in a second, at most. Peers that
// compute for long look the same; a sleep costs nothing that is felt then. A rank decides for
// itself: no plan and no result depends on it.
#pragma once

#include <atomic>
#include <cstdint>

namespace fastcoll {

class Company {
 public:
  // Time slices last 700 us and more. Peers yield sooner: they wait, or work on one segment.
  static constexpr int64_t kSliceUs = 400;
  static constexpr int64_t kMemoryUs = 1000000;

  // slice_us: a yield of that length or more went to a stranger.
  explicit Company(int64_t slice_us = kSliceUs) : slice_us_(slice_us) {}

  void note_yield(int64_t start_us, int64_t end_us) {
    if (end_us - start_us < slice_us_) return;
    until_us_.store(end_us + kMemoryUs, std::memory_order_relaxed);
  }
  bool is_there(int64_t time_us) const {
    return time_us < until_us_.load(std::memory_order_relaxed);
  }

 private:
  const int64_t slice_us_;
  std::atomic<int64_t> until_us_{0};  // sends and receives wait in other threads, too
};

}  // namespace fastcoll
