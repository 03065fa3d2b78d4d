// SPDX-License-Identifier: Apache-2.0
// Names the word of a region at an address. So a test can weaken the orders of one word and leave
// the others as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/pair_channel.h"

// In the order of kWordNames. `none`: not a word, or nothing.
enum class Which {
  arrive,
  inlined,
  staged,
  reduced,
  done,
  poison,
  sleepers,
  wake,
  ping,
  blocked,
  polling,
  sample,
  single_copy,
  sequence,
  descriptor,
  timed,
  identity,
  signals,
  // of a pair of ranks
  offer,
  sent,
  message,
  granted,
  received,
  taken,
  none
};
inline constexpr const char* kWordNames[] = {
    "arrive",   "inlined", "staged",  "reduced", "done",        "poison",   "sleepers",   "wake",
    "ping",     "blocked", "polling", "sample",  "single_copy", "sequence", "descriptor", "timed",
    "identity", "signals", "offer",   "sent",    "message",     "granted",  "received",   "taken"};
static_assert(std::size(kWordNames) == size_t(Which::none));

namespace words {
inline const std::byte* first_region = nullptr;
inline size_t region_bytes = 0;
}  // namespace words

// Where all regions lie, one behind the other.
inline void set_words(const void* first_region, size_t region_bytes) {
  words::first_region = static_cast<const std::byte*>(first_region);
  words::region_bytes = region_bytes;
}

inline Which word_of_pair(size_t at) {
  using fastcoll::PairChannel;
  if (at < offsetof(PairChannel, sent)) return Which::offer;
  if (at < offsetof(PairChannel, messages)) return Which::sent;
  if (at < offsetof(PairChannel, granted)) {
    const bool is_number = (at - offsetof(PairChannel, messages)) % sizeof(fastcoll::Message) == 0;
    return is_number ? Which::message : Which::none;
  }
  if (at < offsetof(PairChannel, received)) return Which::granted;
  if (at < offsetof(PairChannel, taken)) return Which::received;
  return at < offsetof(PairChannel, sites) ? Which::taken : Which::none;
}

inline Which word_of_entry(size_t at) {
  using fastcoll::Descriptor;
  if (at < offsetof(Descriptor, words)) return Which::sequence;
  const bool is_timed =
      at >= offsetof(Descriptor, timed_call) && at < offsetof(Descriptor, began_us);
  return is_timed ? Which::timed : Which::descriptor;
}

// The channels' distance in a region; of 1 if it has none.
inline size_t channel_bytes_in(size_t region_bytes) {
  int size = fastcoll::kMaxWorld;
  while (size > 0 && fastcoll::mapped_bytes(size) != region_bytes) --size;
  return size > 0 ? fastcoll::channel_bytes(size) : 1;
}

// Which word lies so far behind the beginning of a region of so many bytes.
inline Which word_at(size_t at, size_t region_bytes) {
  using fastcoll::Pad;
  if (at >= fastcoll::kRegionBytes)
    return word_of_pair((at - fastcoll::kRegionBytes) % channel_bytes_in(region_bytes));
  if (at >= offsetof(Pad, ring) && at < offsetof(Pad, verdict))
    return word_of_entry((at - offsetof(Pad, ring)) % sizeof(fastcoll::Descriptor));
  struct {
    size_t offset;
    Which which;
  } constexpr kWords[] = {
      {offsetof(Pad, arrive), Which::arrive},
      {offsetof(Pad, inlined), Which::inlined},
      {offsetof(Pad, staged), Which::staged},
      {offsetof(Pad, reduced), Which::reduced},
      {offsetof(Pad, done), Which::done},
      {offsetof(Pad, poison), Which::poison},
      {offsetof(Pad, sleep.sleepers), Which::sleepers},
      {offsetof(Pad, sleep.wake), Which::wake},
      {offsetof(Pad, ping), Which::ping},
      {offsetof(Pad, blocked), Which::blocked},
      {offsetof(Pad, polling), Which::polling},
      {offsetof(Pad, sample), Which::sample},
      {offsetof(Pad, single_copy), Which::single_copy},
      {offsetof(Pad, verdict), Which::none},
      {offsetof(Pad, identity), Which::identity},
      {offsetof(Pad, sites), Which::descriptor},
      {offsetof(Pad, signals), Which::signals},
      {offsetof(Pad, parts_held), Which::none},  // not written by a call
      {offsetof(Pad, counts), Which::none},      // read by no rank
      {fastcoll::kPadBytes, Which::none},
  };
  Which found = Which::none;
  for (const auto& [offset, which] : kWords)
    if (at >= offset) found = which;
  return found;
}

inline Which word_of(const void* word) {
  return word_at(
      size_t(static_cast<const std::byte*>(word) - words::first_region) % words::region_bytes,
      words::region_bytes);
}
