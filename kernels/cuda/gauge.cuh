// SPDX-License-Identifier: Apache-2.0
// Kernels that measure the cost of one step, for bench/gpu alone, with the stores and loads of
// collectives. A word or an LL pack goes to and fro between two ranks, and packs are copied into
// another rank's region or out of it. No call of the group may be under way on any rank: the words
// lie at the start of scratch, like those of the probes.
#pragma once

#include "cuda/gauge.h"
#include "cuda/packs.cuh"

namespace fastcoll {

FASTCOLL_DEVICE uint64_t* gauge_word(std::byte* region) {
  return reinterpret_cast<uint64_t*>(region + kGpuScratchOffsetBytes);
}
FASTCOLL_DEVICE LlPack* gauge_pack(std::byte* region) {
  return reinterpret_cast<LlPack*>(region + kGpuScratchOffsetBytes + kLineBytes);
}

// Wait until look() returns the expected value. False: the limit is over.
template <class Look>
FASTCOLL_DEVICE bool await_gauge(const GaugeCall& call, uint64_t expected, Look look) {
  uint64_t started_ns = 0;
  for (int polls = 0;;) {
    const uint64_t seen = look();
    if (seen == expected) return true;
    spin(call.peer, Phase::arrival, expected, seen);
    if (++polls < kPollsPerLook) continue;
    polls = 0;
    const uint64_t now = time_ns();
    if (started_ns == 0) started_ns = now;
    if (now - started_ns >= call.limit_ns) return false;
  }
}

// The lower rank begins each round, the other one answers. Every value is sent once, and a rank
// sends the next one only when it has seen the peer's: nothing is overwritten unseen.
template <class Send, class Look>
FASTCOLL_DEVICE void ping_pong(const GaugeCall& call, Send send, Look look) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  const bool begins = call.rank < call.peer;
  uint64_t num_done = 0, started_ns = 0;
  for (uint32_t round = 1; round <= call.rounds; ++round) {
    const uint64_t value = call.token + round;
    if (begins) send(value);
    if (!await_gauge(call, value, look)) break;
    if (!begins) send(value);
    // The first round waits for the peer's launch.
    if (++num_done == 1) started_ns = time_ns();
  }
  call.answer[kGaugeRounds] = num_done;
  call.answer[kGaugeNs] = time_ns() - started_ns;
}

// A word as ranks arrive by: released, and polled with acquire.
FASTCOLL_KERNEL gauge_signal(FASTCOLL_ARGUMENT(GaugeCall) call) {
  ping_pong(
      call, [&](uint64_t value) { store_release(gauge_word(call.regions[call.peer]), value); },
      [&] { return load_acquire(gauge_word(call.regions[call.rank])); });
}

// Data and flag in one atom, which orders no other memory. A pack whose data belongs to another
// flag counts as not arrived.
FASTCOLL_KERNEL gauge_ll_pack(FASTCOLL_ARGUMENT(GaugeCall) call) {
  ping_pong(
      call,
      [&](uint64_t value) {
        store_relaxed(gauge_pack(call.regions[call.peer]), LlPack{~value, value});
      },
      [&] {
        const LlPack seen = load_relaxed(gauge_pack(call.regions[call.rank]));
        return seen.data == ~seen.slot ? seen.slot : 0;
      });
}

// The part of a copy that is this block's: whole packs.
FASTCOLL_DEVICE Span gauge_part(const GaugeCall& call) {
  const uint64_t packs = (call.num_bytes + kPackBytes - 1) / kPackBytes;
  const uint64_t part = (packs + num_blocks() - 1) / num_blocks() * kPackBytes;
  const uint64_t start = block_idx() * part;
  if (start >= call.num_bytes) return {call.num_bytes, 0};
  return {start, call.num_bytes - start < part ? call.num_bytes - start : part};
}

// From this rank's own memory into the peer's region.
FASTCOLL_KERNEL gauge_put(FASTCOLL_ARGUMENT(GaugeCall) call) {
  const Span part = gauge_part(call);
  std::byte* to = call.regions[call.peer] + call.offset_bytes;
  copy_tile(to + part.start, call.local + part.start, part.num_bytes);
}

// And out of it.
FASTCOLL_KERNEL gauge_get(FASTCOLL_ARGUMENT(GaugeCall) call) {
  const Span part = gauge_part(call);
  const std::byte* from = call.regions[call.peer] + call.offset_bytes;
  copy_tile(call.local + part.start, from + part.start, part.num_bytes);
}

}  // namespace fastcoll
