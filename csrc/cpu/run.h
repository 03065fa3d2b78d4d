// SPDX-License-Identifier: Apache-2.0
// Carries out a plan: the one door from a checked request to the algorithms. Decides which
// algorithm runs, and how many segments the call takes: the same on every rank.
#pragma once

#include "cpu/chain.h"
#include "cpu/direct.h"
#include "cpu/executor.h"
#include "cpu/one_shot.h"
#include "cpu/ring.h"
#include "cpu/two_shot.h"

namespace fastcoll {

inline bool is_inlined_reduction(const Plan& plan) {
  return plan.inlined && plan.algorithm == Algorithm::one_shot;
}

template <class P>
Staging staging_of_algorithm(const Call<P>& call) {
  switch (call.plan.algorithm) {
    case Algorithm::one_shot:
      return one_shot_staging(call);
    case Algorithm::two_shot:
      return two_shot_staging(call);
    case Algorithm::ring:
      return ring_staging(call);
    case Algorithm::chain:
      return chain_staging(call);
    case Algorithm::direct:
    case Algorithm::single_copy:
      return direct_staging(call);
    case Algorithm::schedule:
      return executor_staging(call);
    case Algorithm::multimem:
    case Algorithm::nccl:
    case Algorithm::copy_engine:
      break;
  }
  throw Failure(ErrorKind::usage, "a plan that is not for CPUs");
}

template <class P>
FASTCOLL_HOT Staging staging(const Call<P>& call) {
  if (is_inlined_reduction(call.plan)) [[likely]]
    return {.num_segments = 1, .stages = false};
  return staging_of_algorithm(call);
}

// A group of one rank has nothing to combine: every verb gives the input, bit for bit.
template <class P>
void run_alone(const Call<P>& call) {
  if (verb_reduces(call.plan.verb) || !call.parts) {
    if (call.plan.verb != Verb::broadcast) call.copy_own();
  } else {
    const Part& from = call.parts->inputs[0];
    if (from.num_bytes != 0) std::memmove(call.parts->outputs[0].ptr, from.ptr, from.num_bytes);
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
    case Algorithm::single_copy:
      return Direct<P>(call).run();
    case Algorithm::schedule:
      return execute(call);
    case Algorithm::multimem:
    case Algorithm::nccl:
    case Algorithm::copy_engine:
      break;
  }
}

template <class P>
FASTCOLL_HOT void check_inlined(const Call<P>& call) {
  if (call.plan.inlined && call.input_numel() * call.elem_bytes() > kInlineMaxBytes)
    throw Failure(ErrorKind::usage,
                  "an inlined plan for more than " + std::to_string(kInlineMaxBytes) + " bytes");
}

// Blocks until the call is complete on this rank. input and output are contiguous, and equal or
// disjoint. Throws Failure (then the group's verdict is set) or Interrupted.
template <class P>
void run(Call<P>& call, Host& host, double timeout_s) {
  Group<P>& group = call.group;
  const Plan& plan = call.plan;
  check_inlined(call);
  const Staging staged = staging(call);
  try {
    group.begin(plan, staged, host, timeout_s);
    if (group.world_size() == 1) run_alone(call);
    else if (is_inlined_reduction(plan)) {
      give_inlined(call);
      take_inlined(call);
    } else {
      run_together(call);
    }
  } catch (...) {
    group.abandon();
    throw;
  }
  group.end();
}

template <class P>
void run(Group<P>& group, const Plan& plan, const void* input, void* output, Host& host,
         double timeout_s = -1, const Program* program = nullptr) {
  Call<P> call{group, plan, static_cast<const std::byte*>(input), static_cast<std::byte*>(output)};
  call.program = program;
  run(call, host, timeout_s);
}

}  // namespace fastcoll
