// SPDX-License-Identifier: Apache-2.0
// one_shot: every rank stages its whole input, and reads and reduces everybody's, in rank order.
// One synchronisation. Per rank (n+3) S bytes move for a message of S bytes on n ranks.
#pragma once

#include "cpu/call.h"
#include "cpu/two_shot.h"

namespace fastcoll {

// In a reduce only the root reads; the others give and are through.

// The message travels inside the flag lines: no location, no second line for small messages. In two
// halves, between which time may pass: the first one waits for nobody.
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
  return {num_segments, round_up(div_up(plan.numel, num_segments) * elem, kLineBytes)};
}

template <class P>
void one_shot_staged(Call<P>& call) {
  Group<P>& group = call.group;
  const size_t elem = call.elem_bytes(), numel = call.plan.numel;
  const auto [num_segments, segment_bytes] = one_shot_staging(call.plan);
  const size_t stride = segment_bytes / elem;
  const auto segment = [&](size_t k) {
    const size_t start = std::min(k * stride, numel);
    return Span{start, std::min(stride, numel - start)};
  };
  // 1. Stage segment k, so that peers may read it.
  const auto stage = [&](size_t k) {
    call.read_input(group.claim_slot(k), 0, segment(k));
    if (k == 0) group.arrive(Location::kStaged, Location::kStaged);
    else group.publish_staged(k + 1);
  };

  if (!call.gets(call.rank())) {
    group.consume(num_segments);  // needs nothing of anybody: must not hold up its peers' slots
    for (size_t k = 0; k < num_segments; ++k) stage(k);
    return;
  }
  stage(0);
  for (int peer = 0; peer < call.world_size(); ++peer)
    if (peer != call.rank()) group.wait_arrival(peer);
  for (size_t k = 0; k < num_segments; ++k) {
    if (k + 1 < num_segments) stage(k + 1);
    // 2. Reduce segment k of all ranks.
    const void* srcs[kMaxWorld];
    for (int peer = 0; peer < call.world_size(); ++peer) {
      srcs[peer] = nullptr;
      if (peer == call.rank()) continue;
      if (k > 0) group.wait_staged(peer, k + 1);
      srcs[peer] = group.slot(peer, k);
    }
    void* dst = nullptr;
    call.reduce(segment(k), &dst, 1, srcs);
    group.consume(k + 1);
  }
}

// A reduce_scatter has only one shot: two_shot without its second.
template <class P>
Staging one_shot_staging(const Call<P>& call) {
  if (call.plan.inlined) return {1};
  return call.scatters() ? two_shot_staging(call) : one_shot_staging(call.plan);
}

template <class P>
void one_shot(Call<P>& call) {
  if (call.scatters()) return two_shot(call);
  one_shot_staged(call);
}

}  // namespace fastcoll
