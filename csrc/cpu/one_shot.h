// SPDX-License-Identifier: Apache-2.0
// one_shot: every rank stages its whole input, then reads and reduces the inputs of all ranks, in
// rank order. One synchronisation. Per rank (n+3) S bytes move for a message of S bytes on n ranks.
#pragma once

#include "cpu/call.h"
#include "cpu/two_shot.h"

namespace fastcoll {

// In a reduce only the root reads; the others give and are through.

// The message travels inside the flag lines: no location, no second line for small messages. In two
// halves, between which time may pass: the first one waits for no rank.
template <class P>
FASTCOLL_HOT void give_inlined(Call<P>& call) {
  Group<P>& group = call.group;
  const size_t num_bytes = call.input_numel() * call.elem_bytes();
  group.arrive_inlined(call.whole_input(group.inbox(call.rank())), num_bytes);
}

template <class P>
FASTCOLL_HOT void take_inlined(Call<P>& call) {
  Group<P>& group = call.group;
  if (!call.gets(call.rank())) return;
  const size_t num_bytes = call.input_numel() * call.elem_bytes();
  const size_t own_start =
      call.scatters() ? size_t(call.rank()) * call.plan.numel * call.elem_bytes() : 0;

  const void* srcs[kMaxWorld];
  for (int peer = 0; peer < call.world_size(); ++peer) {
    if (peer == call.rank()) {
      srcs[peer] = nullptr;
    } else if (num_bytes <= ArriveLine::kPayloadBytes) {
      // Read in place: the peer can't rewrite its line before this call is consumed.
      srcs[peer] = group.wait_arrival(peer).payload + own_start;
    } else {
      std::byte* message = group.inbox(peer);
      group.read_inlined(peer, message, num_bytes);
      srcs[peer] = message + own_start;
    }
  }
  void* dst = nullptr;
  call.reduce({0, call.plan.numel}, &dst, 1, srcs);
}

// Of whole messages, in equal segments rather than full ones and a small rest.
inline Staging one_shot_staging(const Plan& plan) {
  const size_t elem = plan.elem_bytes();
  const size_t num_segments = std::max<size_t>(1, div_up(plan.numel * elem, plan.segment_bytes));
  return {.num_segments = num_segments,
          .segment_bytes = round_up(div_up(plan.numel, num_segments) * elem, kLineBytes),
          .exchanges = !verb_has_root(plan.verb)};
}

// In two halves, too: of one segment, the second stages nothing.
template <class P>
class StagedOneShot {
 public:
  explicit StagedOneShot(Call<P>& call)
      : call_(call),
        group_(call.group),
        num_segments_(one_shot_staging(call.plan).num_segments),
        stride_(one_shot_staging(call.plan).segment_bytes / call.elem_bytes()) {}

  void give() {
    // A rank that gets nothing reads no peer's memory: it must not hold up its peers' slots.
    if (!call_.gets(call_.rank())) group_.consume(num_segments_);
    stage(0);
  }

  void take() {
    if (!call_.gets(call_.rank())) {
      for (size_t k = 1; k < num_segments_; ++k) stage(k);
      return;
    }
    for (int peer = 0; peer < call_.world_size(); ++peer)
      if (peer != call_.rank()) group_.wait_arrival(peer);
    for (size_t k = 0; k < num_segments_; ++k) {
      if (k + 1 < num_segments_) stage(k + 1);
      reduce(k);
      group_.consume(k + 1);
    }
  }

 private:
  Span segment(size_t k) const {
    const size_t start = std::min(k * stride_, call_.plan.numel);
    return {start, std::min(stride_, call_.plan.numel - start)};
  }

  // 1. Stage segment k, so that peers may read it. No peer reads the input of a reduce's root.
  void stage(size_t k) {
    if (call_.plan.verb != Verb::reduce || call_.rank() != call_.plan.root)
      call_.read_input(group_.claim_slot(k), 0, segment(k));
    if (k == 0) group_.arrive(Location::kStaged, Location::kStaged);
    else group_.publish_staged(k + 1);
  }

  // 2. Reduce segment k of all ranks.
  void reduce(size_t k) {
    const void* srcs[kMaxWorld];
    for (int peer = 0; peer < call_.world_size(); ++peer) {
      srcs[peer] = nullptr;
      if (peer == call_.rank()) continue;
      if (k > 0) group_.wait_staged(peer, k + 1);
      srcs[peer] = group_.slot(peer, k);
    }
    void* dst = nullptr;
    call_.reduce(segment(k), &dst, 1, srcs);
  }

  Call<P>& call_;
  Group<P>& group_;
  const size_t num_segments_, stride_;  // elements from one segment to the next
};

// A reduce_scatter has only one shot: two_shot without its second.
template <class P>
Staging one_shot_staging(const Call<P>& call) {
  return call.scatters() ? two_shot_staging(call) : one_shot_staging(call.plan);
}

template <class P>
void one_shot(Call<P>& call) {
  if (call.scatters()) return two_shot(call);
  StagedOneShot<P> staged(call);
  staged.give();
  staged.take();
}

}  // namespace fastcoll
