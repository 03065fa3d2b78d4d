// SPDX-License-Identifier: Apache-2.0
// The shipped accesses on the machine of relacy_machine.h. One order of one word may be weakened.
#pragma once

#include <cstdint>

#include "cpu/atomics.h"
#include "relacy_machine.h"
#include "words.h"

namespace weakened {

using namespace fastcoll;
using machine::Order;

struct Mutation {
  Which word = Which::none;
  bool weakens_release = false, weakens_acquire = false;
  bool removes_barrier = false;
};
inline Mutation mutation;

template <class T>
Order release_of(const T& word) {
  return mutation.weakens_release && word_of(&word) == mutation.word ? Order::relaxed
                                                                     : Order::release;
}
template <class T>
Order acquire_of(const T& word) {
  return mutation.weakens_acquire && word_of(&word) == mutation.word ? Order::relaxed
                                                                     : Order::acquire;
}

struct RelacyAtomics : StdAtomics {
  static uint64_t load_acquire(const uint64_t& word) {
    return machine::load(&word, acquire_of(word));
  }
  static uint64_t load_relaxed(const uint64_t& word) {
    return machine::load(&word, Order::relaxed);
  }
  static void store_release(uint64_t& word, uint64_t value) {
    machine::store(&word, value, release_of(word));
  }
  static void store_relaxed(uint64_t& word, uint64_t value) {
    machine::store(&word, value, Order::relaxed);
  }
  static void arrive(uint64_t& word, uint64_t value) { store_release(word, value); }
  static constexpr bool is_slow(uint64_t, uint64_t) { return false; }  // time is no order of events
  static uint64_t set_once(uint64_t& word, uint64_t value) {
    const bool acquires = acquire_of(word) == Order::acquire;
    const bool releases = release_of(word) == Order::release;
    return machine::set_once(&word, value,
                             acquires   ? (releases ? Order::acq_rel : Order::acquire)
                             : releases ? Order::release
                                        : Order::relaxed);
  }
  static uint32_t load_sleepers(const SleepLine& line) {
    return uint32_t(machine::load(&line.sleepers, Order::relaxed));
  }
  static void set_sleepers(SleepLine& line) { machine::store(&line.sleepers, 1, Order::relaxed); }
  static void clear_sleepers(SleepLine& line) { machine::store(&line.sleepers, 0, Order::relaxed); }
  static uint32_t load_wake(const SleepLine& line) {
    return uint32_t(machine::load(&line.wake, acquire_of(line.wake)));
  }
  static void advance_wake(SleepLine& line) {
    machine::increment(&line.wake, release_of(line.wake));
  }

  static constexpr int kYields = 20, kSpinsPerYield = 1;
  static constexpr int64_t kSliceUs = INT64_MAX;  // time is no order of events: always yield
  static inline bool kLooksBeforeSleep = true;
  // So that a message uses a place of chunks twice.
  static constexpr size_t kPairSpanBytes = PairChannel::kLeastSpanBytes;
};
struct Drowsy : RelacyAtomics {  // sleeps at once
  static constexpr int kYields = 1;
  static constexpr int kTransferSpins = 0;
};

}  // namespace weakened
