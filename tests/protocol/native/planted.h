// SPDX-License-Identifier: Apache-2.0
// Bugs that tests plant in the protocol. They are switched on at run time: an instantiation of the
// library for each of them would take a minute to compile. AS_SHIPPED: a build in which no bug is
// planted, and which saves that one, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "cpu/atomics.h"
#include "words.h"

namespace planted {

#ifdef AS_SHIPPED
using Atomics = fastcoll::StdAtomics;
inline bool plant(const std::string&) { return false; }
#else
// The word of which an order is relaxed.
inline Which released = Which::none, acquired = Which::none;
inline bool relaxed_set_once = false, overwriting_set_once = false;
inline bool equality_wait = false, narrow_wait = false;

struct Atomics : fastcoll::StdAtomics {
  static void arrive(uint64_t& word, uint64_t value) {
    if (released != Which::none && word_of(&word) == released) store_relaxed(word, value);
    else StdAtomics::arrive(word, value);
  }
  static uint64_t load_acquire(const uint64_t& word) {
    return acquired != Which::none && word_of(&word) == acquired ? load_relaxed(word)
                                                                 : StdAtomics::load_acquire(word);
  }
  static bool reached(uint64_t seen, uint64_t target) {
    if (equality_wait) return seen == target;
    if (narrow_wait) return int32_t(uint32_t(seen - target)) >= 0;
    return StdAtomics::reached(seen, target);
  }
  static uint64_t set_once(uint64_t& word, uint64_t value) {
    if (overwriting_set_once) {
      store_release(word, value);
      return value;
    }
    if (!relaxed_set_once) return StdAtomics::set_once(word, value);
    uint64_t seen = 0;
    return std::atomic_ref(word).compare_exchange_strong(seen, value, std::memory_order_relaxed)
               ? value
               : seen;
  }
  static inline bool kChecksDone = true, kAwaitsReaders = true, kChainsStamps = true,
                     kClaimsSegments = true, kLooksAfterCopies = true, kLeavesKeptBays = true;
  static inline int kLines = StdAtomics::kLines, kSlots = StdAtomics::kSlots;
};

// Plant the bug of this name; false if there is none.
inline bool plant(const std::string& name) {
  for (int word = 0; word < int(Which::none); ++word) {
    if (name == std::string("relaxed_release_of_") + kWordNames[word]) released = Which(word);
    if (name == std::string("relaxed_acquire_of_") + kWordNames[word]) acquired = Which(word);
  }
  if (name == "single_line") Atomics::kLines = 1;
  if (name == "single_slot") Atomics::kSlots = 1;
  const std::map<std::string, std::pair<bool*, bool>> switches = {
      {"relaxed_set_once", {&relaxed_set_once, true}},
      {"overwriting_set_once", {&overwriting_set_once, true}},
      {"equality_wait", {&equality_wait, true}},
      {"narrow_wait", {&narrow_wait, true}},
      {"unchecked_done", {&Atomics::kChecksDone, false}},
      {"unawaited_readers", {&Atomics::kAwaitsReaders, false}},
      {"unawaited_receiver", {&Atomics::kAwaitsReaders, false}},
      {"unchained_stamps", {&Atomics::kChainsStamps, false}},
      {"written_kept_bays", {&Atomics::kLeavesKeptBays, false}},
      {"unclaimed_segments", {&Atomics::kClaimsSegments, false}},
      {"unwatched_copies", {&Atomics::kLooksAfterCopies, false}},
  };
  const auto found = switches.find(name);
  if (found != switches.end()) *found->second.first = found->second.second;
  return found != switches.end() || released != Which::none || acquired != Which::none ||
         Atomics::kLines == 1 || Atomics::kSlots == 1;
}
#endif

}  // namespace planted
