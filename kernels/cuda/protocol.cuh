// SPDX-License-Identifier: Apache-2.0
// The protocol's accesses and rules, one by one. The kernels have them as a template parameter. So
// the very same kernels also run with a planted bug (tests/protocol/sim).
#pragma once

#include "cuda/call.h"
#include "prim.cuh"

namespace fastcoll {

struct Protocol {
  static FASTCOLL_DEVICE void arrive(ArrivePack* pack, ArrivePack value) {
    store_release(pack, value);
  }
  static FASTCOLL_DEVICE void publish(uint64_t* word, uint64_t value) {
    store_release(word, value);
  }
  static FASTCOLL_DEVICE ArrivePack load(const ArrivePack* pack) { return load_acquire(pack); }
  static FASTCOLL_DEVICE uint64_t load(const uint64_t* word) { return load_acquire(word); }
  // All threads have done their part of the data to publish.
  static FASTCOLL_DEVICE bool before_arrive(bool failed) { return sync_any(failed); }
  // All threads may touch the awaited data.
  static FASTCOLL_DEVICE bool after_wait(bool failed) { return sync_any(failed); }
  // A fast peer may be ahead: on the circle, never ==.
  static FASTCOLL_DEVICE bool reached(uint64_t seen, uint64_t target) {
    return int64_t(seen - target) >= 0;
  }
  // The ranks that a thread looks through for those that it speaks with: all.
  static FASTCOLL_DEVICE int known_ranks(int world_size) { return world_size; }
  // Each thread of each kernel does this first.
  static FASTCOLL_DEVICE void begin_kernel() { await_stream(); }
  // The block waits for no peer any more.
  static FASTCOLL_DEVICE void end_waits() { let_next_start(); }
  // A kernel of this rank that is in a call of the channel holds its turn.
  static FASTCOLL_DEVICE uint64_t take(uint64_t* turn) {
    return exchange(turn, ChannelState::kTaken);
  }
  static constexpr bool kReadsAgain = true;      // the state, if another call has ended meanwhile
  static constexpr uint32_t kParities = 2;       // buffers that calls use in turn
  static constexpr bool kChecksPrevious = true;  // all ranks have ended the call before last
  static constexpr bool kAcknowledges = true;    // a staged segment is read before it's overwritten
  static constexpr bool kExits = true;           // a symmetric tensor is its owner's at the end
  static constexpr bool kChecksPlaces = true;    // a peer's tensor must lie in its region
  static constexpr bool kComparesPlaces = true;  // the switch knows one place for all ranks
  static constexpr bool kHearsAborts = true;     // a wait ends when the host gives up
  static constexpr bool kReports = true;         // the host is told of a long wait
};

}  // namespace fastcoll
