// SPDX-License-Identifier: Apache-2.0
// How sends and receives make progress: offers and their places, matching, chunks, copies. The
// bytes of a message stay in place until the receiver has published that it took them.
#pragma once

#include <bit>

#include "cpu/p2p.h"

namespace fastcoll {

template <class P>
void PointToPoint<P>::begin_pass(bool again) {
  looks_again_ = again;
  is_under_way_ = has_large_ = false;
  looked_.reset();
}

// must_queue: an older send to this peer has no place yet.
template <class P>
bool PointToPoint<P>::advance(Transfer& transfer, std::bitset<kMaxWorld>& must_queue) {
  const bool moved =
      transfer.sends ? advance_send(transfer, must_queue) : advance_receive(transfer);
  if (transfer.done) return moved;
  is_under_way_ |= transfer.moved_bytes != 0;
  has_large_ |= transfer.sends && transfer.is_copied;
  return moved;
}

template <class P>
bool PointToPoint<P>::run_at_once(Transfer& transfer) {
  begin_pass(true);
  std::bitset<kMaxWorld> must_queue;
  try {
    if (advance(transfer, must_queue)) group_.wake_sleepers();
  } catch (const Failure&) {
    transfer.error = std::current_exception();
    finish(transfer);
  }
  return transfer.done;
}

template <class P>
bool PointToPoint<P>::pass(bool again) {
  bool moved = false;
  begin_pass(again);
  std::bitset<kMaxWorld> must_queue;
  try {
    for (const auto& transfer : open_) moved |= advance(*transfer, must_queue);
  } catch (const Failure&) {
    fail_all(std::current_exception());
    return true;
  }
  if (!moved) return false;
  forget_done();
  group_.wake_sleepers();
  return true;
}

template <class P>
bool PointToPoint<P>::advance_send(Transfer& transfer, std::bitset<kMaxWorld>& must_queue) {
  PairChannel& channel = *mine_[size_t(transfer.peer)];  // I send in mine,
  PairChannel& back = *theirs_[size_t(transfer.peer)];   // the peer answers in its own
  if (transfer.state == Transfer::State::fresh) {
    if (must_queue[size_t(transfer.peer)] || !offer(transfer, channel, back)) {
      must_queue[size_t(transfer.peer)] = true;
      return false;
    }
    if (comes_with_offer(transfer)) finish(transfer);
    return true;
  }
  const bool is_granted = P::load_relaxed(back.granted.value) == transfer.number;
  if (transfer.is_copied && !is_granted) {
    // A later message may have had the place since I looked.
    const uint64_t taken = P::load_acquire(back.taken[transfer.place]) & ~PairChannel::kKept;
    if (P::kAwaitsReaders && int64_t(taken - transfer.number) < 0) return false;
    finish(transfer);
    return true;
  }
  if (transfer.state == Transfer::State::offered) {
    // The free chunks follow from `received`; this word only gives the turn.
    if (!is_granted) return false;
    transfer.is_copied = false;
    transfer.state = Transfer::State::moving;
  }
  uint64_t sent = channel.sent.value;
  const uint64_t received = P::load_acquire(back.received.value);
  if (sent - received > PairChannel::kChunks)
    group_.fail_damaged(name(transfer), transfer.peer, "that it has chunks nobody sent");
  bool moved = false;
  for (; transfer.moved_bytes < transfer.num_bytes && sent - received < PairChannel::kChunks;
       ++sent) {
    const size_t num_bytes = next_chunk(transfer);
    staging_copy_(chunk(channel, transfer, sent), transfer.data + transfer.moved_bytes, num_bytes);
    transfer.moved_bytes += num_bytes;
    P::arrive(channel.sent.value, sent + 1);
    moved = true;
  }
  if (transfer.moved_bytes == transfer.num_bytes) finish(transfer);
  return moved;
}

template <class P>
bool PointToPoint<P>::offer(Transfer& transfer, PairChannel& channel, PairChannel& back) {
  // The peer writes `taken`, so each look costs a fetch of its line: one for several messages.
  uint32_t& free = free_[size_t(transfer.peer)];
  if ((free & kUsualPlaces) == 0) free = find_free(transfer.peer, channel, back);
  if (free == 0) return false;
  transfer.place = std::countr_zero(free);
  free &= free - 1;
  transfer.number = channel.offered.value + 1;
  Message& message = channel.messages[transfer.place];
  fetch_to_write(&message);
  transfer.location = locate(transfer, channel, back);
  if (comes_with_offer(transfer))
    staging_copy_(room(channel, back, transfer), transfer.data, transfer.num_bytes);
  else transfer.is_copied = transfer.location != 0;
  message.numel = transfer.numel;
  message.tag_and_dtype = uint64_t(transfer.tag) | uint64_t(transfer.dtype) << 32 |
                          (transfer.is_awaited ? Message::kWaited : 0);
  message.location = transfer.location;
  if (group_.options().traces) [[unlikely]]
    write_site<P>(channel.sites[transfer.place], transfer.site);
  transfer.state = Transfer::State::offered;
  P::arrive(message.number, transfer.number);
  P::arrive(channel.offered.value, transfer.number);
  return true;
}

template <class P>
uint64_t PointToPoint<P>::locate(const Transfer& transfer, const PairChannel& channel,
                                 const PairChannel& back) {
  const size_t num_bytes = transfer.num_bytes;
  if (num_bytes <= Message::kPayloadBytes) return 0;
  Bays& bays = bays_[size_t(transfer.peer)];
  if (bays.fits(num_bytes)) {
    if (const uint64_t location = bays.claim(transfer.place, transfer.number, num_bytes))
      return location;
    find_free(transfer.peer, channel, back);
    if (const uint64_t location = bays.claim(transfer.place, transfer.number, num_bytes))
      return location;
  }
  const bool is_copied =
      may_copy_ && num_bytes >= kLeastCopiedBytes && readable_.covers(transfer.data, num_bytes);
  return is_copied ? uint64_t(uintptr_t(transfer.data)) : 0;
}

template <class P>
uint32_t PointToPoint<P>::find_free(int peer, const PairChannel& channel, const PairChannel& back) {
  uint32_t free = 0;
  for (int i = 0; i < PairChannel::kMessages; ++i) {
    const uint64_t taken = P::load_acquire(back.taken[i]);
    if (channel.messages[i].number != (taken & ~PairChannel::kKept)) continue;
    free |= uint32_t{1} << i;
    bays_[size_t(peer)].note_taken(i, P::kLeavesKeptBays && (taken & PairChannel::kKept) != 0);
  }
  return free;
}

template <class P>
bool PointToPoint<P>::advance_receive(Transfer& transfer) {
  if (transfer.state == Transfer::State::fresh && !match(transfer)) return false;
  PairChannel& back = *mine_[size_t(transfer.peer)];
  const PairChannel& channel = *theirs_[size_t(transfer.peer)];
  if (comes_with_offer(transfer)) {
    copy_bytes(transfer.data, room<const PairChannel>(channel, back, transfer), transfer.num_bytes);
    return taken(transfer, back);
  }
  Transfer*& mover = movers_[size_t(transfer.peer)];
  if (transfer.location != 0 && mover != &transfer) {
    if (is_exchanged(transfer)) {
      transfer.is_copied = true;
    } else if (!transfer.is_copied &&
               !comes_in_chunks(transfer, channel.messages[transfer.place], mover != nullptr)) {
      const int64_t most_us = kPatienceUs + int64_t(transfer.num_bytes / kPatienceBytes);
      if (looks_again_ && !mover && now_us() - transfer.matched_us < most_us) return false;
      transfer.is_copied = true;
    }
    if (transfer.is_copied) return copy_out(transfer, back);
  }
  const bool grants = !mover;  // which its sender may sleep for
  if (grants) {
    mover = &transfer;
    P::store_relaxed(back.granted.value, transfer.number);
  }
  if (mover != &transfer) return false;  // another message of this pair comes first
  uint64_t received = back.received.value;
  const uint64_t sent = P::load_acquire(channel.sent.value);
  const bool moved = grants || received != sent;
  // A sender is never further ahead than the ring is long, nor than its message.
  const size_t left_bytes = transfer.num_bytes - transfer.moved_bytes;
  const size_t left = (left_bytes + PairChannel::kChunkBytes - 1) / PairChannel::kChunkBytes;
  if (sent - received > std::min<size_t>(left, PairChannel::kChunks))
    group_.fail_damaged(name(transfer), transfer.peer, "chunks that it was not asked for");
  for (; received != sent; ++received) {
    const size_t num_bytes = next_chunk(transfer);
    copy_some(transfer.data + transfer.moved_bytes, chunk(channel, transfer, received), num_bytes,
              transfer.num_bytes, copy_ways.fetched_past_caches);
    transfer.moved_bytes += num_bytes;
    P::arrive(back.received.value, received + 1);
  }
  if (transfer.moved_bytes < transfer.num_bytes) return moved;
  mover = nullptr;
  return taken(transfer, back);
}

template <class P>
bool PointToPoint<P>::comes_in_chunks(const Transfer& transfer, const Message& message,
                                      bool is_busy) const {
  if (is_busy || copies_always_ || group_.is_crowded()) return false;
  return (message.tag_and_dtype & Message::kWaited) != 0 ||
         P::load_relaxed(group_.pad(transfer.peer).polling.value) != 0;
}

template <class P>
bool PointToPoint<P>::is_exchanged(const Transfer& receive) const {
  if (receive.num_bytes < copy_ways.exchanged) return false;
  return std::any_of(open_.begin(), open_.end(), [](const auto& one) {
    return one->sends && one->num_bytes >= copy_ways.exchanged;
  });
}

template <class P>
bool PointToPoint<P>::copy_out(Transfer& transfer, PairChannel& back) {
  // A send whose receiver copies the message moves without me.
  const bool is_alone = std::all_of(open_.begin(), open_.end(), [&](const auto& one) {
    return one.get() == &transfer || (one->sends && one->is_copied);
  });
  const size_t most_bytes = is_alone ? kCopyBytes : kSharedCopyBytes;
  const size_t num_bytes = std::min(most_bytes, transfer.num_bytes - transfer.moved_bytes);
  read_private(group_, transfer.peer, transfer.location + transfer.moved_bytes,
               transfer.data + transfer.moved_bytes, num_bytes, [&] { return name(transfer); });
  transfer.moved_bytes += num_bytes;
  return transfer.moved_bytes < transfer.num_bytes || taken(transfer, back);
}

template <class P>
bool PointToPoint<P>::taken(Transfer& transfer, PairChannel& back) {
  const bool has_peer = transfer.peer != group_.rank();
  const bool is_kept = (transfer.location & Bays::kAnyBay) != 0 &&
                       bays_[size_t(transfer.peer)].note_read(
                           transfer.location, has_peer && copy_ways.answers_in_place);
  P::arrive(back.taken[transfer.place], transfer.number | (is_kept ? PairChannel::kKept : 0));
  finish(transfer);
  return true;
}

template <class P>
bool PointToPoint<P>::match(Transfer& transfer) {
  if (transfer.peer != kAnyPeer) return match_from(transfer, transfer.peer);
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (match_from(transfer, peer)) return true;
  return false;
}

template <class P>
uint64_t PointToPoint<P>::offered_by(int peer) {
  if (!looked_[size_t(peer)]) {
    offered_[size_t(peer)] = P::load_acquire(theirs_[size_t(peer)]->offered.value);
    looked_[size_t(peer)] = true;
  }
  return offered_[size_t(peer)];
}

template <class P>
bool PointToPoint<P>::match_from(Transfer& transfer, int peer) {
  const PairChannel& channel = *theirs_[size_t(peer)];
  if (match_next(transfer, peer)) return true;
  const uint64_t offered = offered_by(peer);
  // An offer that was there at this receive's last look, and did not match, will not match later.
  if (transfer.peer != kAnyPeer && offered == transfer.seen) return false;
  // An offer that comes while I look may lie before the place of a younger one. So offers after
  // `offered` wait for the next look.
  int found = -1, num_left = 0;
  uint64_t least = offered + 1;
  for (int i = 0; i < PairChannel::kMessages; ++i) {
    const Message& message = channel.messages[i];
    const uint64_t number = P::load_relaxed(message.number);  // up to `offered` it is there
    if (number <= claimed_[size_t(peer)][size_t(i)] || number > offered) continue;
    ++num_left;
    if (number >= least || uint32_t(message.tag_and_dtype) != transfer.tag) continue;
    found = i;
    least = number;
  }
  if (num_left == (found < 0 ? 0 : 1)) all_claimed_[size_t(peer)] = offered;
  if (found < 0) {
    if (transfer.peer != kAnyPeer) transfer.seen = offered;
    return false;
  }
  claim(transfer, peer, found, least);
  return true;
}

template <class P>
bool PointToPoint<P>::match_next(Transfer& transfer, int peer) {
  const int place = expected_[size_t(peer)];
  const Message& message = theirs_[size_t(peer)]->messages[place];
  const uint64_t number = all_claimed_[size_t(peer)] + 1;
  if (looked_[size_t(peer)] || P::load_acquire(message.number) != number ||
      number <= claimed_[size_t(peer)][size_t(place)] ||
      uint32_t(message.tag_and_dtype) != transfer.tag)
    return false;
  all_claimed_[size_t(peer)] = number;
  claim(transfer, peer, place, number);
  return true;
}

template <class P>
void PointToPoint<P>::claim(Transfer& transfer, int peer, int place, uint64_t number) {
  const PairChannel& channel = *theirs_[size_t(peer)];
  const Message& message = channel.messages[place];
  const DType dtype = DType(message.tag_and_dtype >> 32 & 0xff);
  if (int(dtype) >= kNumDTypes)
    group_.fail_damaged(name(transfer), peer, "a message of a type that there is not");
  if (dtype != transfer.dtype || message.numel != transfer.numel)
    group_.fail(ErrorKind::desync,
                "rank " + std::to_string(peer) + " sends " + std::to_string(message.numel) + " x " +
                    dtype_name(dtype) + " to rank " + std::to_string(group_.rank()) +
                    at_site(read_site<P>(channel.sites[place])) + ", which receives " +
                    std::to_string(transfer.numel) + " x " + dtype_name(transfer.dtype) + " (tag " +
                    std::to_string(transfer.tag) + ", group \"" + group_.options().name + "\")" +
                    at_site(transfer.site),
                uint64_t{1} << peer | uint64_t{1} << group_.rank());
  claimed_[size_t(peer)][size_t(place)] = number;
  expected_[size_t(peer)] = (place + 1) % PairChannel::kUsualPlaces;
  transfer.peer = peer;
  transfer.place = place;
  transfer.number = number;
  transfer.state = Transfer::State::moving;
  transfer.location = transfer.num_bytes > Message::kPayloadBytes ? message.location : 0;
  if (transfer.location & Bays::kAnyBay) {
    if (!bays_[size_t(peer)].is_inside(transfer.location, transfer.num_bytes))
      group_.fail_damaged(name(transfer), peer, "a message in no bay");
  } else if (transfer.location != 0) {
    transfer.matched_us = now_us();
  }
}
}  // namespace fastcoll
