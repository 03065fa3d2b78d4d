// SPDX-License-Identifier: Apache-2.0
// Finds the reason why sends and receives stand still. It may be a broken group, a lost peer, a
// limit, a cycle, or a rank that holds up a chain of others.
#pragma once

#include "cpu/p2p.h"
#include "cpu/status.h"

namespace fastcoll {

template <class P>
void PointToPoint<P>::fail_all(const std::exception_ptr& error) {
  for (const auto& transfer : open_) {
    if (transfer->done) continue;
    transfer->error = error;
    finish(*transfer);
  }
  open_.clear();
}

template <class P>
void PointToPoint<P>::patrol(int64_t time_us) {
  if (closed_) return;
  looked_.reset();
  try {
    if (group_.is_broken()) {
      // A peer may have ended the group since it gave its messages: they are here.
      for (const auto& transfer : open_)
        while (advance_alone(*transfer) && !transfer->done) {
        }
      forget_done();
      group_.check();
    }
    for (const auto& transfer : open_) {
      look_for_loss(*transfer);
      if (!transfer->done && transfer->waited.is_over(time_us)) fail_timeout(*transfer);
    }
    forget_done();
  } catch (const Failure&) {
    fail_all(std::current_exception());
  }
}

template <class P>
std::string PointToPoint<P>::name(const Transfer& transfer) const {
  std::string text = describe(transfer);
  if (!transfer.site.empty()) text += at_site(transfer.site) + ",";
  return text + " in group \"" + group_.options().name + "\" (seen by rank " +
         std::to_string(group_.rank()) + " of " + std::to_string(group_.world_size()) + ")";
}

template <class P>
bool PointToPoint<P>::advance_alone(Transfer& transfer) {
  std::bitset<kMaxWorld> must_queue;
  if (!transfer.sends) return advance_receive(transfer);
  return transfer.state != Transfer::State::fresh && advance_send(transfer, must_queue);
}

template <class P>
void PointToPoint<P>::look_for_loss(Transfer& transfer) {
  if (transfer.peer == group_.rank()) return;
  if (transfer.peer == kAnyPeer) {
    if (group_.world_size() == 1 || transfer.has_other_senders) return;
    for (int peer = 0; peer < group_.world_size(); ++peer)
      if (peer != group_.rank() && !peer_is_gone(group_.options().links[size_t(peer)])) return;
  } else if (!peer_is_gone(group_.options().links[size_t(transfer.peer)])) {
    return;
  }
  if (advance_alone(transfer)) return;
  const int peer = transfer.peer == kAnyPeer ? (group_.rank() ? 0 : 1) : transfer.peer;
  group_.fail(ErrorKind::peer_lost,
              name(transfer) + " lost rank " + std::to_string(peer) +
                  ": its process ended or left the group",
              uint64_t{1} << peer);
}

template <class P>
void PointToPoint<P>::fail_timeout(const Transfer& transfer) {
  uint64_t ranks = 0;
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (transfer.peer == kAnyPeer ? peer != group_.rank() : peer == transfer.peer)
      ranks |= uint64_t{1} << peer;
  std::string text = name(transfer) + " waited " + seconds_text(transfer.waited.waited_us()) +
                     " for rank " +
                     (transfer.peer == kAnyPeer ? "any" : std::to_string(transfer.peer)) +
                     (transfer.sends ? ", which did not receive it" : ", which did not send it");
  if (transfer.peer != kAnyPeer) text += chain(transfer, &ranks);
  for (int peer = 0; peer < group_.world_size(); ++peer) {
    const int pid = group_.options().links[size_t(peer)].pid;
    if ((ranks >> peer & 1) && process_is_stopped(pid))
      text += "; process " + std::to_string(pid) + " is stopped";
  }
  group_.fail(ErrorKind::timeout,
              text +
                  ". If the ranks are only slow, raise the timeout (timeout_s=, "
                  "FASTCOLL_TIMEOUT_S)",
              ranks);
}

// The chain of waits: "; rank 0 sends to rank 1, which receives from rank 2". `ranks` become those
// at its end, which hold up all others. A chain that ends nowhere leaves them as they are.
template <class P>
std::string PointToPoint<P>::chain(const Transfer& transfer, uint64_t* ranks) const {
  std::string text = "; rank " + std::to_string(group_.rank());
  std::bitset<kMaxWorld> seen;
  bool sends = transfer.sends;
  int peer = transfer.peer;
  for (int hops = 1;; ++hops) {
    text += (sends ? " sends to rank " : " receives from rank ") + std::to_string(peer);
    if (peer == group_.rank()) return text + ": a cycle. Use isend, or batch_isend_irecv";
    if (seen[size_t(peer)]) return text;
    seen.set(size_t(peer));
    const uint64_t blocked = P::load_relaxed(group_.pad(peer).blocked.value);
    const int next = int(int8_t(blocked >> 8 & 0xff));
    const bool waits = blocked != 0 && next >= 0 && next < group_.world_size() &&
                       !process_is_stopped(group_.options().links[size_t(peer)].pid);
    if (!waits) {
      *ranks = uint64_t{1} << peer;
      const uint64_t awaited = blocked ? 0 : group_.awaited_by(peer);
      if (awaited) *ranks = awaited;
      if (!awaited) return hops == 1 ? "" : text;
      text += ", which waits in a call for rank";
      for (int other = 0; other < group_.world_size(); ++other)
        if (awaited >> other & 1) text += " " + std::to_string(other);
      return text;
    }
    text += ", which";
    sends = (blocked & 0xff) == 1;
    peer = next;
  }
}

}  // namespace fastcoll
