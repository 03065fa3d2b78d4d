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
// A yield that lasts as long as a slice may have gone to a stranger. So may the time between two
// looks of a rank that spins. Peers that compute, and the kernel's own threads, take such a slice
// now and then. So lost slices count as company only once they take more than an eighth of the
// time. Until the next full second, waits then sleep after few spins. All ranks forget at the same
// moment, as one that yields among sleepers loses slices to them. Before that, four ranks alone on
// two cores slept on and on. An all_reduce of 8 B took 47 us so, and 9 by yields (Zen 3). A rank
// decides for itself: no plan and no result depends on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastcoll {

class Company {
 public:
  // Time slices last 700 us and more. Peers yield sooner: they wait, or work on one segment.
  static constexpr int64_t kSliceUs = 400;
  static constexpr int64_t kMemoryUs = 1000000;
  static constexpr int64_t kShare = 8;       // one part in so many of the time may be lost
  static constexpr int64_t kBurstUs = 4000;  // and so much at once

  // slice_us: a yield of that length or more is a lost slice.
  explicit Company(int64_t slice_us = kSliceUs) : slice_us_(slice_us) {}

  // This thread yielded or looked at the first time, and ran on at the second. Other threads' notes
  // may be lost, as the next lost slice tells the same.
  void note_pause(int64_t start_us, int64_t end_us) {
    const int64_t lost_us = end_us - start_us;
    if (lost_us < slice_us_) return;
    const int64_t most_us = end_us + 2 * kBurstUs * kShare;  // a machine may have slept for hours
    const int64_t made_up_us =
        std::min(most_us, std::max(start_us, made_up_us_.load(std::memory_order_relaxed)) +
                              lost_us * kShare);
    made_up_us_.store(made_up_us, std::memory_order_relaxed);
    if (made_up_us - end_us > kBurstUs * kShare)
      until_us_.store((end_us / kMemoryUs + 1) * kMemoryUs, std::memory_order_relaxed);
  }
  bool is_there(int64_t time_us) const {
    return time_us < until_us_.load(std::memory_order_relaxed);
  }

 private:
  const int64_t slice_us_;
  // Sends and receives wait in other threads, too.
  std::atomic<int64_t> until_us_{0};
  std::atomic<int64_t> made_up_us_{0};  // when the lost slices are the allowed share of the time
};

}  // namespace fastcoll
