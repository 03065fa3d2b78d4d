// SPDX-License-Identifier: Apache-2.0
// The ring of slots in a rank's scratch: which slot a segment has, and from when it may be written.
//
// Peers' caches may still hold a line that is written again. Then it is taken back from them first,
// which takes longer than fetching a line that no cache holds. So a message goes to other lines
// each time: the slots go by turns, and so do the places in a slot. A call that stages nothing
// takes no turn. Barriers between other calls would else leave every second slot out: half a ring
// fits a cache. Measured by turns on a Zen 4, whose L2 has 1 MiB: with 8 slots a reduce_scatter of
// 64 KiB takes 1.4 times as long. Behind a barrier it took 1.9 times as long. An all_reduce takes
// few slots and gains nothing.
//
// Two ranks may change scratch with each round of the slots instead (CopyWays::answers_in_place).
// Each writes a segment of up to kMostChangedBytes where it has read the peer's a round before. The
// places in a slot stay the same then. A call in which one rank only reads gains nothing: its peer
// would write lines again that the reader's cache holds. A broadcast of 16 KiB took 1.9 us so on a
// Zen 4, and takes 1.1.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cpu/copy.h"
#include "layout.h"

namespace fastcoll {

// A call's share of the scratch, the same on every rank: so many segments, none of more bytes than
// these. A call that stages nothing has one segment, and takes no slot.
struct Staging {
  uint64_t num_segments;
  size_t segment_bytes = kSlotBytes;
  bool in_few_slots = false;  // takes kFewSlots by turns, not all
  bool stages = true;
  bool exchanges = false;  // every rank stages, and reads from every rank

  // Bytes of one place in a slot. Large messages go to other lines anyhow.
  size_t place_bytes() const {
    static_assert(std::has_single_bit(kSlotBytes));
    if (in_few_slots || num_segments * segment_bytes > kSlotBytes) return kSlotBytes;
    return std::bit_ceil(std::max(segment_bytes, kLeastPlaceBytes));
  }
};

// All ranks make the same calls, so they agree without a word. P::kSlots are really in use.
template <class P>
class Slots {
 public:
  // ---- a call, from begin to end. Its segments are numbered from first_segment on ---------------
  void begin(const Staging& staging, uint64_t first_segment, int world_size) {
    first_segment_ = first_segment;
    first_turn_ = next_turn_;
    if (!staging.stages) return;
    take(staging.num_segments);
    place_bytes_ = staging.place_bytes();
    in_few_slots_ = staging.in_few_slots;
    changes_ = world_size == 2 && staging.exchanges && copy_ways.answers_in_place &&
               place_bytes_ <= kMostChangedBytes;
  }
  // As many segments as the call turned out to have.
  void take(uint64_t num_segments) { next_turn_ = first_turn_ + num_segments; }
  // Note the last segment in each slot, whichever ranks wrote it.
  void end() {
    uint64_t turn = next_turn_ - std::min<uint64_t>(next_turn_ - first_turn_, num_slots());
    for (; turn != next_turn_; ++turn)
      done_with_[slot_of(turn)] = first_segment_ + (turn - first_turn_) + 1;
  }

  // ---- segment k of it --------------------------------------------------------------------------
  size_t slot(uint64_t k) const { return slot_of(first_turn_ + k) % P::kSlots; }
  // Where it begins in a rank's scratch. It owns its whole slot, wherever in the slot it lies.
  size_t offset_bytes(uint64_t k) const {
    return slot(k) * kSlotBytes + (changes_ ? 0 : round(k) * place_bytes_ % kSlotBytes);
  }
  // Whose scratch a rank's segment lies in.
  int owner(int rank, uint64_t k) const { return changes_ && round(k) % 2 != 0 ? 1 - rank : rank; }
  // The `done` that every rank must have reached before any rank writes it: behind the last segment
  // in its slot.
  uint64_t done_before(uint64_t k) const {
    return k < num_slots() ? done_with_[slot_of(first_turn_ + k)]
                           : first_segment_ + (k - num_slots()) + 1;
  }
  // The same of the next call's first, should it take all slots.
  uint64_t done_before_next() const { return done_with_[next_turn_ % kNumSlots]; }

 private:
  static constexpr size_t kMostChangedBytes = size_t{64} << 10;  // of a segment

  uint64_t round(uint64_t k) const { return (first_turn_ + k) / P::kSlots; }
  uint64_t num_slots() const { return in_few_slots_ ? kFewSlots : kNumSlots; }
  size_t slot_of(uint64_t turn) const {
    return in_few_slots_ ? turn % kFewSlots : turn % kNumSlots;  // constants: no slow division
  }

  uint64_t first_segment_ = 0;
  uint64_t first_turn_ = 0;  // counts the segments of all calls that staged any
  uint64_t next_turn_ = 0;
  size_t place_bytes_ = kSlotBytes;
  bool in_few_slots_ = false;
  bool changes_ = false;                         // two ranks' scratch, with each round
  std::array<uint64_t, kNumSlots> done_with_{};  // the end of each slot's last segment
};

}  // namespace fastcoll
