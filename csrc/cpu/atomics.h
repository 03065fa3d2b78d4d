// SPDX-License-Identifier: Apache-2.0
// The access to shared words: memory orders, and the constants of a wait. All files above are
// templates over such a policy. So a test runs the very same code with a planted bug
// (tests/protocol/native/planted.h).
//
// Tests run the shipped code with relaxed orderings, with one buffer, or without a look at `done`.
// They show that each of these bugs is caught (tests/protocol/native/test_protocol.cpp). A model of
// the signals is explored completely (tests/protocol/models). The checks that catch each bug stand
// in kernels/README.md.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/company.h"
#include "cpu/pair_channel.h"
#include "layout.h"

namespace fastcoll {

// The shipped policy: acquire and release on every shared word. It has no stand-alone fences, since
// race detectors can't see them. ThreadSanitizer runs it, too.
struct StdAtomics {
  static uint64_t load_acquire(const uint64_t& word) {
    return ref(word).load(std::memory_order_acquire);
  }
  static uint64_t load_relaxed(const uint64_t& word) {
    return ref(word).load(std::memory_order_relaxed);
  }
  static void store_release(uint64_t& word, uint64_t value) {
    ref(word).store(value, std::memory_order_release);
  }
  static void store_relaxed(uint64_t& word, uint64_t value) {
    ref(word).store(value, std::memory_order_relaxed);
  }
  // Publishes a slot, a progress word or `done`. All earlier writes are visible to a reader that
  // acquires the word.
  static void arrive(uint64_t& word, uint64_t value) { store_release(word, value); }

  // A progress word: a fast peer may already be further, so >= on the circle, never ==.
  static constexpr bool reached(uint64_t seen, uint64_t target) {
    return int64_t(seen - target) >= 0;
  }

  // 0 -> value once and for all; returns the value that holds.
  static uint64_t set_once(uint64_t& word, uint64_t value) {
    uint64_t seen = 0;
    return ref(word).compare_exchange_strong(seen, value, std::memory_order_acq_rel) ? value : seen;
  }

  static uint32_t load_sleepers(const SleepLine& line) {
    return ref(line.sleepers).load(std::memory_order_relaxed);
  }
  static void set_sleepers(SleepLine& line) {
    ref(line.sleepers).store(1, std::memory_order_relaxed);
  }
  static void clear_sleepers(SleepLine& line) {
    ref(line.sleepers).store(0, std::memory_order_relaxed);
  }
  static uint32_t load_wake(const SleepLine& line) {
    return ref(line.wake).load(std::memory_order_acquire);
  }
  static void advance_wake(SleepLine& line) {
    ref(line.wake).fetch_add(1, std::memory_order_release);
  }

  // Spins before yielding: some 20 to 50 us, less than a sleep and a wake would cost. With fewer
  // CPUs than ranks, the awaited peer may need this very CPU, even if its arrival line names
  // another one.
  static constexpr int kSpins = 2000;
  static constexpr int kSpinsIfCrowded = 100;
  static constexpr int kYields = 64;  // then sleep
  static constexpr int kSpinsPerYield = 50;
  static constexpr int64_t kSliceUs = Company::kSliceUs;
  static constexpr int kTransferSpins = 300;  // of a wait for a send or a receive
  // Whether fetching the lines to write takes so long that writing past the caches is better
  // (staging_copy.h). In ticks of the time stamp counter (2 to 4 GHz), for a line of a copy. The
  // figures are from a Zen 3. Near cores took 5 to 12 ticks to fetch a line, up to 20 in the
  // smallest copies. Past the caches a line took 6 to 25 ticks, and calls took twice as long. Far
  // cores took 22 to 37 ticks to fetch a line, against 6 to 12 past the caches. There calls past
  // the caches took about half as long. Hardly any copy past the caches took fewer ticks than 6.
  static constexpr bool is_slow(uint64_t fetching, uint64_t streaming) {
    return fetching >= std::max<uint64_t>(streaming, 6) + 10 && fetching <= kMostFetchingTicks;
  }
  // A line that takes longer was not fetched alone. Its page was new (160 to 225 ticks), or the
  // copy was interrupted. On a Zen 4 such copies made exchanges of 1 MiB three times as long. Far
  // cores of a Zen 4 took 61 to 122 ticks, against 7 to 27 past the caches.
  static constexpr uint64_t kMostFetchingTicks = 140;

  // Every call writes its descriptor and is stamped. False only to measure the cost of that
  // (bench/checks_cost.cpp).
  static constexpr bool kChecksCalls = true;
  static constexpr bool kChecksDone = true;
  static constexpr bool kAwaitsReaders = true;     // of a message that is read where it lies
  static constexpr bool kLeavesKeptBays = true;    // to the receiver, until its answer comes
  static constexpr bool kChecksPlaces = true;      // that peers publish, before their use
  static constexpr bool kChainsStamps = true;      // a call's stamp depends on all calls before
  static constexpr bool kClaimsSegments = true;    // of a schedule, before their first step
  static constexpr bool kLooksAfterCopies = true;  // of private memory: is its owner still there
  static constexpr bool kLooksBeforeSleep = true;  // of a transfer, once `sleepers` is set
  static constexpr int kLines = kDepth;            // arrival lines in use
  static constexpr int kSlots = kNumSlots;         // scratch slots in use
  static constexpr size_t kPairSpanBytes = PairChannel::kMostSpanBytes;  // in use, at most

 private:
  template <class T>
  static std::atomic_ref<T> ref(const T& word) {
    return std::atomic_ref<T>(const_cast<T&>(word));
  }
};

// Pins the wrap of the 64-bit compare: a plain >= fails here.
static_assert(StdAtomics::reached(0, ~uint64_t{0}));
static_assert(StdAtomics::reached(5, 5) && StdAtomics::reached(6, 5) && !StdAtomics::reached(4, 5));
static_assert(!StdAtomics::reached(~uint64_t{0}, 0));
// And to 32 bits: a word that was idle for 2^31 calls or more is behind, and one that passes 2^32
// is ahead.
static_assert(!StdAtomics::reached(0, uint64_t{1} << 31) &&
              !StdAtomics::reached(0, uint64_t{3} << 31) &&
              !StdAtomics::reached(0xffffffff, uint64_t{1} << 32) &&
              StdAtomics::reached(uint64_t{1} << 32, 0xffffffff));

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; isb stalls about as PAUSE
#endif
}

}  // namespace fastcoll
