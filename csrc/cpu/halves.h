// SPDX-License-Identifier: Apache-2.0
// A small call in two halves, between which time may pass and threads may change. The give half
// waits for no rank; no rank waits for the take half.
//
// Why halves: waking a thread costs several times a small call, and the program waits for most
// calls. So the give half runs where the call is made, if nothing is queued before it. The take
// half runs in the thread that waits for the call. A test of the handle, a released handle or the
// next call takes it at once if every rank has arrived; else a thread does. Ctrl-C or the limit of
// one wait must not end the call: the waiting thread leaves it (Host::steps_out) and another
// continues it.
//
// Peers don't notice a call that rests. This rank's data is already there, and a later call waits
// for this rank as for any late one. Excluded are ring and chain, whose second half peers wait for,
// and messages of direct that peers read in place. A two_shot has halves if all other ranks have
// arrived: then the give half reduces this rank's chunk, too. Those ranks wait in it, and a thread
// of this rank would keep them waiting. The take half moves at most 128 KiB: above that a thread
// beside the program is worth its wake-up. A rank alone waits for nobody, and its take half is the
// call.
//
// The queue tells torch's compiled backend when a call is over. The backend tells the queue when a
// handle is gone (c10d_work.h). Handles of torch are counted references, so the queue keeps a weak
// one.
#pragma once

#include "cpu/run.h"

namespace fastcoll {

// Whether there are two such halves, and the second is short. Each rank may decide for itself.
template <class P>
bool has_halves(const Call<P>& call) {
  // More takes about as long as it takes to wake up a thread, beside which the program goes on.
  constexpr size_t kMostTakenBytes = size_t{128} << 10;
  const bool is_alone = call.world_size() == 1;
  if (is_alone && !call.parts && !call.lies_apart() && call.input == call.output) return true;
  const size_t message_bytes = call.input_numel() * call.elem_bytes();
  if (message_bytes * size_t(call.world_size()) > kMostTakenBytes) return false;
  if (is_alone) return true;
  switch (call.plan.algorithm) {
    case Algorithm::one_shot:
      return call.plan.inlined || (!call.scatters() && staging(call).num_segments == 1);
    case Algorithm::two_shot:
      return staging(call).num_segments == 1 && call.group.has_next_arrivals(call.plan);
    case Algorithm::direct:
      return Direct<P>(call).has_halves();
    default:
      return false;
  }
}

template <class P>
void give(Call<P>& call) {
  if (call.world_size() == 1) return;
  if (call.plan.algorithm == Algorithm::direct) Direct<P>(call).give();
  else if (call.plan.algorithm == Algorithm::two_shot) TwoShot<P>(call).give();
  else if (call.plan.inlined) give_inlined(call);
  else StagedOneShot<P>(call).give();
}

template <class P>
void take(Call<P>& call) {
  if (call.world_size() == 1) return run_alone(call);
  if (call.plan.algorithm == Algorithm::direct) Direct<P>(call).take();
  else if (call.plan.algorithm == Algorithm::two_shot) TwoShot<P>(call).take();
  else if (call.plan.inlined) take_inlined(call);
  else StagedOneShot<P>(call).take();
}

// Begin a call and give this rank's part, if that takes no wait; returns whether it did. Then
// `finish` must be called, in any thread, before any other call of the group. Throws Failure.
template <class P>
bool begin_half(Call<P>& call, Host& host, double timeout_s) {
  if (!has_halves(call) || !call.group.may_begin(!call.plan.inlined)) return false;
  check_inlined(call);
  call.group.begin(call.plan, staging(call), host, timeout_s);
  give(call);
  return true;
}

// Whether `finish` would not wait.
template <class P>
bool may_finish(Call<P>& call) {
  if (call.plan.algorithm == Algorithm::two_shot && call.world_size() > 1)
    return TwoShot<P>(call).may_take();
  const bool is_direct = call.plan.algorithm == Algorithm::direct;
  const size_t inlined_bytes = call.plan.inlined ? call.input_numel() * call.elem_bytes() : 0;
  for (int peer = 0; peer < call.world_size(); ++peer) {
    const bool is_awaited =
        is_direct ? Direct<P>(call).gets_from(peer) : peer != call.rank() && call.gets(call.rank());
    if (is_awaited && !call.group.has_arrived(peer, inlined_bytes)) return false;
  }
  return true;
}

// As `run`, of a call that was begun. May throw SteppedOut: then it is to be called again.
template <class P>
void finish(Call<P>& call, Host& host) {
  Group<P>& group = call.group;
  group.go_on(host);
  try {
    take(call);
  } catch (const SteppedOut&) {
    throw;
  } catch (...) {
    group.abandon();
    throw;
  }
  group.end();
}

}  // namespace fastcoll
