// SPDX-License-Identifier: Apache-2.0
// How shared words are read and written. Everything above is a template over one of these policies,
// so that a test can run the very same code with a planted bug (tests/protocol/native/planted.h).
//
// Thus the shipped code also runs with relaxed orderings, with one buffer, or without a look at
// `done`, and tests show that each of these is caught (tests/protocol/native/test_protocol.cpp).
// Its signals are also explored completely, as a model (tests/protocol/models). kernels/README.md
// says which check catches which bug.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "layout.h"

namespace fastcoll {

// The real thing: acquire and release on every shared word, no stand-alone fences (race detectors
// can't see them). Also what ThreadSanitizer runs.
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
  // Publishing a slot, a progress word or `done`: everything written before is visible to whoever
  // acquires it.
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
  // CPUs than ranks, whoever is awaited may need this very CPU, whatever it said when it arrived.
  static constexpr int kSpins = 2000;
  static constexpr int kSpinsIfCrowded = 100;
  static constexpr int kYields = 64;  // then sleep
  static constexpr int kSpinsPerYield = 50;
  static constexpr int kTransferSpins = 300;  // of who waits for a send or a receive
  // Whether fetching a line that is written takes so long that writing past the caches is better
  // (staging_copy.h). In ticks of the time stamp counter (2 to 4 GHz), for a line of a copy. In
  // an experiment on a Zen 3, calls with near cores (5 to 12 ticks to fetch, up to 20 in the
  // smallest copies) took twice as long past the caches (6 to 25 ticks), with far ones (22 to 37,
  // against 6 to 12) about half as long. Hardly a copy past the caches took fewer ticks than 6.
  static constexpr bool is_slow(uint64_t fetching, uint64_t streaming) {
    return fetching >= std::max<uint64_t>(streaming, 6) + 10;
  }

  // Every call says what it is, and is stamped; false only to measure what that costs
  // (bench/checks_cost.cpp).
  static constexpr bool kChecksCalls = true;
  static constexpr bool kChecksDone = true;
  static constexpr bool kAwaitsReaders = true;     // of a message that is read where it lies
  static constexpr bool kChecksPlaces = true;      // that peers publish, before their use
  static constexpr bool kChainsStamps = true;      // a call's stamp depends on all calls before
  static constexpr bool kClaimsSegments = true;    // of a schedule, before their first step
  static constexpr bool kLooksAfterCopies = true;  // of private memory: is its owner still there
  static constexpr bool kLooksBeforeSleep = true;  // of a transfer, once `sleepers` is set
  static constexpr int kLines = kDepth;            // arrival lines in use
  static constexpr int kSlots = kNumSlots;         // scratch slots in use

 private:
  template <class T>
  static std::atomic_ref<T> ref(const T& word) {
    return std::atomic_ref<T>(const_cast<T&>(word));
  }
};

// Wrap of the 64-bit compare: the defence against "simplifying" it to a plain >=.
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
