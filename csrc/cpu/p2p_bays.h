// SPDX-License-Identifier: Apache-2.0
// The bays of a pair of ranks, which hold messages of middle size. A rank that has read a message
// writes its own next one in the same bay, whose lines its cache holds. The peer that reads that
// one has its bay back, and answers in it as well. A rank that never answers leaves bays to the
// sender.
//
// Two processes on an Ice Lake Xeon exchanged messages in a loop outside of this library. With bays
// of each sender's own, 4 KiB took 0.97 us and 64 KiB 7.0 us; 0.70 and 5.1 us with bays that change
// hands. Other ways tried there took longer: small rings, stores past the caches, reading lines
// with a fetch to write. Fetching all lines before they are written came next, with 0.83 us for 4
// KiB.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/pair_channel.h"

namespace fastcoll {

// The bays that one rank shares with one peer, as this rank knows them. Locations are those of
// `Message`.
class Bays {
 public:
  static constexpr uint64_t kAnyBay = Message::kInBay | Message::kInPeersBay;
  static constexpr uint64_t offset_of(uint64_t location) { return location & ~kAnyBay; }

  explicit Bays(size_t span_bytes = 0) : bay_bytes_(span_bytes / PairChannel::kBays) {
    bay_at_.fill(kNoBay);
  }

  // Whether messages of so many bytes lie in bays, each of which has room for two.
  bool fits(size_t num_bytes) const {
    return num_bytes <= std::min(PairChannel::kBayBytes, bay_bytes_ / 2);
  }
  // Whether such a message can lie where a peer says that it does.
  bool is_inside(uint64_t location, size_t num_bytes) const {
    return fits(num_bytes) && offset_of(location) <= PairChannel::kBays * bay_bytes_ - num_bytes;
  }

  // Choose the location of a message to the peer, which has its place and number. 0: no bay is
  // free.
  uint64_t claim(int place, uint64_t number, size_t num_bytes) {
    sends_ = true;
    uint64_t location = std::exchange(read_last_, 0);
    if (location == 0) {
      if (free_ == 0) return 0;
      location = Message::kInBay | turn_in(std::countr_zero(free_), number, num_bytes);
      free_ &= free_ - 1;
    } else if (const uint64_t start = offset_of(location) % bay_bytes_;
               start + num_bytes > bay_bytes_) {
      location -= start;
    }
    if (location & Message::kInBay) bay_at_[size_t(place)] = int8_t(bay_of(location));
    return location;
  }
  // The peer took the message in a place. is_kept: it has kept the bay.
  void note_taken(int place, bool is_kept) {
    const int bay = std::exchange(bay_at_[size_t(place)], kNoBay);
    if (bay != kNoBay && !is_kept) free_ |= 1U << bay;
  }
  // I have read a message of the peer's. Returns whether I keep its bay for my next message.
  bool note_read(uint64_t location, bool may_keep) {
    const bool has_peers_bay = (read_last_ & Message::kInPeersBay) != 0;
    if (location & Message::kInPeersBay) {  // a bay of mine, which the peer had kept
      if (has_peers_bay) free_ |= 1U << bay_of(location);
      else replace(Message::kInBay | offset_of(location));
      return false;
    }
    if (!may_keep || !sends_ || has_peers_bay) return false;
    replace(Message::kInPeersBay | offset_of(location));
    return true;
  }

 private:
  static constexpr int8_t kNoBay = -1;
  // The least bytes of a bay that a message takes: less gains nothing more.
  static constexpr size_t kLeastTurnBytes = size_t{4} << 10;

  int bay_of(uint64_t location) const { return int(offset_of(location) / bay_bytes_); }
  uint64_t turn_in(int bay, uint64_t number, size_t num_bytes) const {
    const size_t turn_bytes = std::bit_ceil(std::max(num_bytes, kLeastTurnBytes));
    return size_t(bay) * bay_bytes_ + number / PairChannel::kBays * turn_bytes % bay_bytes_;
  }
  // read_last_ is 0, or in a bay of mine.
  void replace(uint64_t location) {
    if (read_last_ != 0) free_ |= 1U << bay_of(read_last_);
    read_last_ = location;
  }

  size_t bay_bytes_;
  uint32_t free_ = (1U << PairChannel::kBays) - 1;  // bays of mine, as bits
  // Of a message that the peer wrote: where mine may lie next. 0: in no such place.
  uint64_t read_last_ = 0;
  bool sends_ = false;                                 // I have sent a message of such a size
  std::array<int8_t, PairChannel::kMessages> bay_at_;  // mine, by the message's place
};

}  // namespace fastcoll
