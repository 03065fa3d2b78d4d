// SPDX-License-Identifier: Apache-2.0
// direct: the one algorithm of the verbs that move data. The owner stages its data or publishes the
// place of its symmetric tensor; the readers copy. A reduce by direct runs the kernel of one_shot.
#pragma once

#include "cuda/ll.cuh"
#include "cuda/parts.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

// ---- small: every rank sends to every rank

// all_gather and all_to_all.
template <class P>
FASTCOLL_KERNEL move_ll(FASTCOLL_CALL call) {
  Channel<P> channel(call);
  const uint64_t num_bytes = call.numel * call.elem_bytes;
  const LlInput input = call.verb == Verb::all_to_all ? LlInput::cut(call, num_bytes)
                                                      : LlInput{call.input, 0, num_bytes};
  const bool ok = exchange_ll(
      channel, input,
      [&](int rank, uint64_t at, uint64_t data) {
        if (at < num_bytes)
          store_ll(taken_part(call, rank, uint64_t(rank) * num_bytes) + at, data, num_bytes - at);
      },
      [](uint64_t) {});
  if (ok) return;
  for (int rank = 0; rank < call.world_size; ++rank)
    fill_nan(channel, call.dtype, taken_part(call, rank, uint64_t(rank) * num_bytes), num_bytes);
}

// ---- any size

// The chunks that a verb moves. A chunk that goes from one rank to another has the same size at
// both.
template <class P>
class Moves {
 public:
  FASTCOLL_DEVICE Moves(const Channel<P>& channel, const DeviceCall& call)
      : channel_(channel), call_(call), num_bytes_(call.numel * call.elem_bytes) {}

  // Chunks flow from the root alone, to the root alone, or between all ranks.
  FASTCOLL_DEVICE Peers sources() const {
    if (from_root()) return root();
    return takes() ? channel_.peers() : Peers();
  }
  FASTCOLL_DEVICE Peers readers() const {
    if (call_.verb == Verb::gather) return root();
    return !from_root() || is_root() ? channel_.peers() : Peers();
  }
  // The ranks from which I copy, me included: i counts up to num_copied().
  FASTCOLL_DEVICE int num_copied() const {
    if (from_root()) return 1;
    return takes() ? call_.world_size : 0;
  }
  FASTCOLL_DEVICE int copied(int i) const {
    return from_root() ? call_.root : channel_.rank_after(i);
  }
  // Whether every reader gets another chunk of a source's input.
  FASTCOLL_DEVICE bool cuts_input() const {
    return call_.verb == Verb::all_to_all || call_.verb == Verb::scatter;
  }
  FASTCOLL_DEVICE bool cuts_output() const {
    return call_.verb == Verb::all_to_all || call_.verb == Verb::all_gather ||
           call_.verb == Verb::gather;
  }
  // Where the chunk for a reader lies in an input: mine, or any if there are no counts.
  FASTCOLL_DEVICE Span given(int reader) const { return chunk(reader, cuts_input(), call_.counts); }
  // Where a source's chunk goes in my output.
  FASTCOLL_DEVICE Span taken(int source) const {
    return chunk(source, cuts_output(), call_.counts + call_.world_size);
  }
  FASTCOLL_DEVICE uint32_t num_segments() const {
    if (!call_.counted) return Tiles(channel_, num_bytes_).num_segments();
    uint32_t most = 1;
    for (int rank = 0; rank < call_.world_size; ++rank) {
      const uint32_t given_segments = Tiles(channel_, given(rank).num_bytes).num_segments();
      const uint32_t taken_segments = Tiles(channel_, taken(rank).num_bytes).num_segments();
      if (given_segments > most) most = given_segments;
      if (taken_segments > most) most = taken_segments;
    }
    return most;
  }
  // The output is lost if the call fails: not the tensor of a broadcast's root.
  FASTCOLL_DEVICE void fill_output() const {
    if (call_.verb == Verb::broadcast ? is_root() : !takes()) return;
    const int num_parts = cuts_output() ? call_.world_size : 1;
    for (int source = 0; source < num_parts; ++source) {
      const Span part = taken(source);
      fill_nan(channel_, call_.dtype, taken_part(call_, source, part.start), part.num_bytes);
    }
  }

 private:
  FASTCOLL_DEVICE bool is_root() const { return call_.rank == call_.root; }
  FASTCOLL_DEVICE bool from_root() const {
    return call_.verb == Verb::broadcast || call_.verb == Verb::scatter;
  }
  FASTCOLL_DEVICE bool takes() const { return call_.verb != Verb::gather || is_root(); }
  FASTCOLL_DEVICE Peers root() const { return Peers(call_, call_.root, call_.root + 1); }
  FASTCOLL_DEVICE Span chunk(int rank, bool cuts, const uint64_t* counts) const {
    if (!call_.counted) return {cuts ? uint64_t(rank) * num_bytes_ : 0, num_bytes_};
    uint64_t start = 0;
    for (int r = 0; cuts && r < rank; ++r) start += counts[r];
    return {start * call_.elem_bytes, counts[rank] * call_.elem_bytes};
  }

  const Channel<P>& channel_;
  const DeviceCall& call_;
  const uint64_t num_bytes_;
};

// all_gather, all_to_all (with or without counts), broadcast, gather, scatter.
template <class P>
FASTCOLL_KERNEL move(FASTCOLL_CALL call) {
  Channel<P> channel(call);
  const Moves<P> moves(channel, call);
  const bool cuts_input = moves.cuts_input();
  const Peers readers = moves.readers();
  const uint32_t location = call.counted ? GpuLocation::kStaged : call.input_location;
  Pipeline<P> pipeline(
      channel,
      {.sources = moves.sources(),
       .readers = readers,
       .meets = moves.sources(),
       .num_segments = moves.num_segments(),
       .num_steps = 2,
       .slot_tiles = slot_tiles(Algorithm::direct, call.verb, 1, call.world_size),
       .reads = 1,
       .input_bytes = call.numel * call.elem_bytes * uint64_t(cuts_input ? call.world_size : 1)},
      GpuLocation::both(location, location), call.counted ? call.counts : nullptr);
  const auto stage = [&](uint32_t k) {
    if (!pipeline.staged() || readers.is_empty()) return;
    copy_tiles(cuts_input ? call.world_size - 1 : 1, call.tile_bytes, [&](int i) {
      const int part = cuts_input ? channel.rank_after(1 + i) : 0;
      const Span chunk = moves.given(part);
      const Span span = Tiles(channel, chunk.num_bytes).tile(k);
      return TileCopy{pipeline.slot(call.rank, k, part),
                      given_part(call, part, chunk.start) + span.start, span.num_bytes};
    });
  };
  const auto copy = [&](uint32_t k) {
    copy_tiles(moves.num_copied(), call.tile_bytes, [&](int i) {
      const int source = moves.copied(i);
      const Span chunk = moves.taken(source);
      const Span span = Tiles(channel, chunk.num_bytes).tile(k);
      const uint32_t place = GpuLocation::input(pipeline.location(source));
      const std::byte* from;
      if (source == call.rank)
        from = given_part(call, call.rank, moves.given(call.rank).start) + span.start;
      else if (call.counted || place == GpuLocation::kStaged)
        from = pipeline.slot(source, k, cuts_input ? call.rank : 0);
      else from = pipeline.symmetric(source, place) + moves.given(call.rank).start + span.start;
      std::byte* to = taken_part(call, source, chunk.start) + span.start;
      return TileCopy{to, from, from == to ? 0 : span.num_bytes};
    });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == 0) stage(k);
    else copy(k);
  });
  if (!ok) moves.fill_output();
}

// Every rank waits for every rank, and all ranks see its earlier writes. A barrier has no output;
// the meetings of a copy_engine call have the call's.
template <class P>
FASTCOLL_KERNEL barrier(FASTCOLL_CALL call) {
  Channel<P> channel(call);
  Pipeline<P> pipeline(channel,
                       {.sources = channel.peers(),
                        .readers = channel.peers(),
                        .meets = channel.peers(),
                        .num_segments = 1,
                        .num_steps = 2,
                        .slot_tiles = 0,
                        .reads = 1},
                       GpuLocation::both(GpuLocation::kStaged, GpuLocation::kStaged));
  const bool ok = pipeline.run([](uint32_t, uint32_t) {});
  if (!ok && call.verb != Verb::barrier) fill_nan(channel, call, call.numel * call.elem_bytes);
}

// Sends and receives. Small messages leave before the receiver is there.
template <class P>
FASTCOLL_KERNEL send_recv(FASTCOLL_ARGUMENT(PairCall) call) {
  const PairPart& part = call.parts[block_idx() / uint32_t{kPairChannels}];
  const uint32_t idx = block_idx() % uint32_t{kPairChannels};
  if (idx >= part.channels) return P::begin_kernel();  // whoever awaits it awaits the stream
  Channel<P> channel(call.common, part, idx);
  const bool sends = part.verb == Verb::send;
  const uint64_t num_bytes = part.numel * part.elem_bytes;
  const Tiles tiles(channel, num_bytes);
  const uint32_t location = sends ? part.location : GpuLocation::kStaged;
  Pipeline<P> pipeline(channel,
                       {.sources = sends ? Peers() : channel.peers(),
                        .readers = sends ? channel.peers() : Peers(),
                        .meets = sends ? Peers() : channel.peers(),
                        .num_segments = tiles.num_segments(),
                        .num_steps = 2,
                        .slot_tiles = 1,
                        .reads = 1,
                        .input_bytes = num_bytes},
                       GpuLocation::both(location, location));
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    const Span span = tiles.tile(k);
    if (sends && step == 0 && pipeline.staged())
      copy_tile(pipeline.slot(call.common.rank, k), part.data + span.start, span.num_bytes);
    if (sends || step == 0) return;
    const uint32_t place = GpuLocation::input(pipeline.location(part.peer));
    const std::byte* from = place == GpuLocation::kStaged
                                ? pipeline.slot(part.peer, k)
                                : pipeline.symmetric(part.peer, place) + span.start;
    copy_tile(part.data + span.start, from, span.num_bytes);
  });
  if (!ok && !sends) fill_nan(channel, part.dtype, part.data, num_bytes);
}

}  // namespace fastcoll
