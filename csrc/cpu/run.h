// SPDX-License-Identifier: Apache-2.0
// Carry out a plan: the one door from a checked request to the algorithms.
#pragma once

#include "cpu/chain.h"
#include "cpu/direct.h"
#include "cpu/one_shot.h"
#include "cpu/ring.h"
#include "cpu/two_shot.h"

namespace fastcoll {

template <class P>
size_t num_segments(const Call<P>& call) {
  switch (call.plan.algorithm) {
    case Algorithm::one_shot:
      return one_shot_segments(call);
    case Algorithm::two_shot:
      return two_shot_segments(call);
    case Algorithm::ring:
      return ring_segments(call);
    case Algorithm::chain:
      return chain_segments(call);
    case Algorithm::direct:
      return direct_segments(call.plan);
  }
  throw Failure(ErrorKind::usage, "a plan with an unknown algorithm");
}

template <class P>
void run_alone(const Call<P>& call) {  // a group of one rank: arithmetic, but nobody to meet
  if (call.plan.verb == Verb::all_reduce || call.plan.verb == Verb::reduce_scatter) {
    const void* src = call.input;
    void* dst = call.output;
    call.reduce(&dst, 1, &src, call.plan.numel);
  } else if (call.output != call.input && call.plan.numel != 0) {
    std::memmove(call.output, call.input, call.plan.numel * call.elem_bytes());
  }
}

template <class P>
void run_together(Call<P>& call) {
  switch (call.plan.algorithm) {
    case Algorithm::one_shot:
      return one_shot(call);
    case Algorithm::two_shot:
      return two_shot(call);
    case Algorithm::ring:
      return ring(call);
    case Algorithm::chain:
      return chain(call);
    case Algorithm::direct:
      break;
  }
  Direct<P> direct(call);
  switch (call.plan.verb) {
    case Verb::all_gather:
      return direct.all_gather();
    case Verb::broadcast:
      return direct.broadcast();
    default:
      return direct.barrier();
  }
}

// Blocks until the call is complete on this rank. input and output are contiguous, and equal or
// disjoint. Throws Failure (then the group's verdict is set) or Interrupted.
template <class P>
void run(Group<P>& group, const Plan& plan, const void* input, void* output, Host& host,
         double timeout_s = -1) {
  Call<P> call{group, plan, static_cast<const std::byte*>(input), static_cast<std::byte*>(output)};
  if (plan.inlined && call.input_numel() * call.elem_bytes() > kInlineMaxBytes)
    throw Failure(ErrorKind::usage,
                  "an inlined plan for more than " + std::to_string(kInlineMaxBytes) + " bytes");
  group.begin(plan, num_segments(call), host, timeout_s);
  try {
    if (group.world_size() == 1) run_alone(call);
    else run_together(call);
  } catch (...) {
    group.abandon();
    throw;
  }
  group.end();
}

}  // namespace fastcoll
