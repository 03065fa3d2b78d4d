// SPDX-License-Identifier: Apache-2.0
// The planted bugs, each a change to Protocol. That a test sees them shows that it can.
#pragma once

#include "cuda/channel.cuh"

namespace fastcoll::sim {

struct RelaxedArrive : Protocol {
  static void arrive(ArrivePack* pack, ArrivePack value) { store_relaxed(pack, value); }
  static void publish(uint64_t* word, uint64_t value) { store_relaxed(word, value); }
};
struct RelaxedWait : Protocol {
  static ArrivePack load(const ArrivePack* pack) { return load_relaxed(pack); }
  static uint64_t load(const uint64_t* word) { return load_relaxed(word); }
};
struct NoSyncBeforeArrive : Protocol {
  static bool before_arrive(bool failed) { return failed; }
};
struct NoSyncAfterWait : Protocol {
  static bool after_wait(bool failed) { return failed; }
};
struct SingleBuffer : Protocol {
  static constexpr uint32_t kParities = 1;
};
struct EqualityWait : Protocol {
  static bool reached(uint64_t seen, uint64_t target) { return seen == target; }
};
struct UncheckedPrevious : Protocol {
  static constexpr bool kChecksPrevious = false;
};
struct Unacknowledged : Protocol {
  static constexpr bool kAcknowledges = false;
};
struct NoExit : Protocol {
  static constexpr bool kExits = false;
};

}  // namespace fastcoll::sim
