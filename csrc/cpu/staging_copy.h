// SPDX-License-Identifier: Apache-2.0
// How a rank fills its staging memory. Its peers' caches still hold the lines that it writes again,
// and each line is fetched from there first. With far cores a call waits mostly for these fetches.
// Cores are far on two sockets or dies; a hypervisor may move them apart for minutes. Stores past
// the caches don't fetch, but then the readers have to go to memory. That is slower where the cores
// are near. So some copies of both kinds are timed. While fetching costs much, nearly all copies go
// past the caches.
//
// The distance of two cores is measured by these copies because nothing else shows it. It differs
// between pairs of cores, and a hypervisor changes it while a job runs, so no table can hold it.
// The time of a flag is nearly the same in places where different copies win. This is the one
// decision that ranks don't agree on: it changes neither bits nor signals.
//
// Tried without gain: always storing past the caches (a little faster at 4 to 8 KiB, much slower
// from 32 KiB on).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/copy.h"
#include "layout.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace fastcoll {

template <class P>
class StagingCopy {
 public:
  void operator()(void* dst, const void* src, size_t num_bytes) {
    if (num_bytes < kLeastBytes) return copy_bytes(dst, src, num_bytes);
    if (streams()) {
      streamed_bytes_left_ -= std::min(num_bytes, streamed_bytes_left_);
      copy_past_caches(dst, src, num_bytes);
    } else if (num_untimed_left_ > 0) {
      --num_untimed_left_;
      copy_bytes(dst, src, num_bytes);
    } else {
      copy_timed(dst, src, num_bytes);
    }
  }
  // Whether the next copy goes past the caches.
  bool streams() const { return streamed_bytes_left_ > 0; }

 private:
  static constexpr size_t kLeastBytes = 1024;  // less gains nothing
  static constexpr int kTimedOneIn = 16;
  // Pairs in a row until copies stream; one keeps them at it. A copy may have been interrupted.
  static constexpr int kConvincing = 2;
  static constexpr size_t kStreamed = 400;  // times a pair's bytes, until ordinary ones are tried

  // Ordinary and past the caches by turns, the second only if the first was slow.
  void copy_timed(void* dst, const void* src, size_t num_bytes) {
    timed_bytes_ += num_bytes;
    const uint64_t start = ticks();
    if (fetching_ticks_ == 0) {
      copy_bytes(dst, src, num_bytes);
      fetching_ticks_ = 1 + ticks_per_line(start, num_bytes);
      if (!P::is_slow(fetching_ticks_, 0)) judge(0);
    } else {
      copy_past_caches(dst, src, num_bytes);
      judge(ticks_per_line(start, num_bytes));
    }
  }
  // Ordinary copies follow, or precede the next pair if copies stream now. After a pause of the
  // program, and after such stores, the first ones fetch lines from memory. That says nothing of
  // the cores: judged at once, calls of 2 MiB of near ranks took twice as long.
  void judge(uint64_t streaming_ticks) {
    num_slow_ = P::is_slow(fetching_ticks_, streaming_ticks) ? num_slow_ + 1 : 0;
    if (num_slow_ >= kConvincing) streamed_bytes_left_ = timed_bytes_ * kStreamed;
    num_untimed_left_ = kTimedOneIn - 1;
    fetching_ticks_ = 0;
    timed_bytes_ = 0;
  }

#if defined(__x86_64__)
  static uint64_t ticks() { return __rdtsc(); }
  static uint64_t ticks_per_line(uint64_t start, size_t num_bytes) {
    _mm_mfence();  // or up to 4 KiB would still be on their way
    return (ticks() - start) / (num_bytes / kLineBytes);
  }
#else
  // Never slow: there are no stores past the caches (copy.h).
  static uint64_t ticks() { return 0; }
  static uint64_t ticks_per_line(uint64_t, size_t) { return 0; }
#endif

  int num_untimed_left_ = 0;
  int num_slow_ = 0;
  uint64_t fetching_ticks_ = 0;  // of the last timed ordinary copy, a line's; 0: none
  size_t timed_bytes_ = 0;
  size_t streamed_bytes_left_ = 0;
};

}  // namespace fastcoll
