// SPDX-License-Identifier: Apache-2.0
// The planted bugs, each a change to Protocol, or to the machine of the kernels. They show that a
// test can see such a bug. They are switched on at run time: kernels of their own for each would
// take a minute to compile.
#pragma once

#include <map>
#include <string>

#include "cuda/channel.cuh"
#include "machine.h"

namespace fastcoll::sim {

struct Planted : Protocol {
  static inline bool relaxed_arrive = false, relaxed_wait = false;
  static inline bool syncs_before_arrive = true, syncs_after_wait = true;
  static inline bool equality_wait = false, ignored_turns = false;
  static inline bool awaits_stream = true, awaits_late = false, lets_early = false;
  static inline bool forgets_ranks = false;  // those that a word of 64 bits has no bit for

  static void arrive(ArrivePack* pack, ArrivePack value) {
    relaxed_arrive ? store_relaxed(pack, value) : Protocol::arrive(pack, value);
  }
  static void publish(uint64_t* word, uint64_t value) {
    relaxed_arrive ? store_relaxed(word, value) : Protocol::publish(word, value);
  }
  static ArrivePack load(const ArrivePack* pack) {
    return relaxed_wait ? load_relaxed(pack) : Protocol::load(pack);
  }
  static uint64_t load(const uint64_t* word) {
    return relaxed_wait ? load_relaxed(word) : Protocol::load(word);
  }
  static bool before_arrive(bool failed) {
    return syncs_before_arrive ? Protocol::before_arrive(failed) : failed;
  }
  static bool after_wait(bool failed) {
    return syncs_after_wait ? Protocol::after_wait(failed) : failed;
  }
  static bool reached(uint64_t seen, uint64_t target) {
    return equality_wait ? seen == target : Protocol::reached(seen, target);
  }
  static int known_ranks(int world_size) {
    return forgets_ranks && world_size > 64 ? 64 : Protocol::known_ranks(world_size);
  }
  static void begin_kernel() {
    if (awaits_stream) Protocol::begin_kernel();
  }
  static uint64_t take(uint64_t* turn) {
    if (awaits_late) Protocol::begin_kernel();
    if (lets_early) Protocol::end_waits();
    const uint64_t seen = Protocol::take(turn);
    if (!ignored_turns || seen != ChannelState::kTaken) return seen;
    const auto* state = reinterpret_cast<const ChannelState*>(
        reinterpret_cast<const std::byte*>(turn) - offsetof(ChannelState, turn));
    return ChannelState::turn_after(load_relaxed(&state->last).slot);
  }
  static inline uint32_t kParities = Protocol::kParities;
  static inline bool kChecksPrevious = true, kAcknowledges = true, kExits = true;
  static inline bool kReadsAgain = true;
  static inline bool kChecksPlaces = true, kComparesPlaces = true, kHearsAborts = true;
  static inline bool kReports = true;
};

// Plant the bug of this name; false if there is none.
inline bool plant(const std::string& name) {
  if (name == "single_buffer") {
    Planted::kParities = 1;
    return true;
  }
  if (name == "late_await") {  // all but the input is protected
    Planted::awaits_stream = false;
    Planted::awaits_late = true;
    return true;
  }
  const std::map<std::string, bool*> switches = {
      {"relaxed_arrive", &Planted::relaxed_arrive},
      {"relaxed_wait", &Planted::relaxed_wait},
      {"no_sync_before_arrive", &Planted::syncs_before_arrive},
      {"no_sync_after_wait", &Planted::syncs_after_wait},
      {"equality_wait", &Planted::equality_wait},
      {"ignored_turns", &Planted::ignored_turns},
      {"old_state", &Planted::kReadsAgain},
      {"unawaited_stream", &Planted::awaits_stream},
      {"early_start", &Planted::lets_early},
      {"unchecked_previous", &Planted::kChecksPrevious},
      {"unacknowledged", &Planted::kAcknowledges},
      {"no_exit", &Planted::kExits},
      {"unchecked_places", &Planted::kChecksPlaces},
      {"uncompared_places", &Planted::kComparesPlaces},
      {"unheard_aborts", &Planted::kHearsAborts},
      {"unreported", &Planted::kReports},
      {"switch_without_halves", &switch_forgets_halves},
      {"switch_without_signs", &switch_forgets_signs},
      {"switch_without_longs", &switch_lacks_longs},
      {"switch_without_words", &switch_drops_words},
      {"misplaced_parts", &Machine::misplaces_parts},
      {"swapped_parts", &Machine::swaps_parts},
      {"forgotten_ranks", &Planted::forgets_ranks},
  };
  const auto found = switches.find(name);
  if (found == switches.end()) return false;
  *found->second = !*found->second;
  return true;
}

}  // namespace fastcoll::sim
