// SPDX-License-Identifier: Apache-2.0
// one_shot: every rank reads the data of all ranks and reduces it, in rank order. An all_reduce
// reads all of it, a reduce_scatter its own chunk. One synchronisation. For the smallest messages
// the data travels in LL packs, which are data and flag in one. Else it is staged in scratch, or
// read in place from symmetric tensors.
//
// Memory traffic per rank of all_reduce, for S bytes on n ranks: (n + 3) S with copy-in, (n + 1) S
// from symmetric tensors.
#pragma once

#include "cuda/ll.cuh"
#include "cuda/parts.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

template <class P, DType kDType>
FASTCOLL_KERNEL one_shot_ll(FASTCOLL_CALL call) {
  constexpr uint64_t kElemBytes = dtype_size(kDType);
  Channel<P> channel(call);
  const uint64_t num_bytes = call.numel * kElemBytes;
  const LlInput input = call.verb == Verb::reduce_scatter ? LlInput::cut(call, num_bytes)
                                                          : LlInput{call.input, 0, num_bytes};
  const Op op = device::plain_op<kDType>(call.op);
  device::Reducer<kDType, 2> reducer;
  const bool ok = exchange_ll(
      channel, input,
      [&](int rank, uint64_t, uint64_t data) {
        const uint32_t words[2] = {uint32_t(data), uint32_t(data >> 32)};
        if (rank == 0) reducer.load(words);
        else reducer.accumulate(op, words);
      },
      [&](uint64_t at) {
        uint32_t words[2];
        reducer.finish(words, call.op == Op::avg ? call.world_size : 0);
        store_ll(call.output + at, uint64_t{words[1]} << 32 | words[0], num_bytes - at);
      });
  if (!ok) fill_nan(channel, call, num_bytes);
}

template <class P, DType kDType>
FASTCOLL_KERNEL one_shot(FASTCOLL_CALL call) {
  constexpr uint64_t kElemBytes = dtype_size(kDType);
  Channel<P> channel(call);
  const uint64_t num_bytes = call.numel * kElemBytes;
  const bool scatters = call.verb == Verb::reduce_scatter;
  // A reduce is an all_reduce with a result on the root alone.
  const bool all = call.verb != Verb::reduce, is_root = call.rank == call.root;
  const Tiles tiles(channel, num_bytes);
  // Where the chunk for `rank` starts in an input.
  const auto chunk = [&](int rank) { return scatters ? uint64_t(rank) * num_bytes : 0; };

  // In place, peers would still read data that this rank already overwrites. A reduce_scatter is
  // safe: only rank r itself reads part r.
  const uint32_t location =
      !scatters && call.input == call.output ? GpuLocation::kStaged : call.input_location;
  const Peers sources = all || is_root ? channel.peers() : Peers();
  Pipeline<P> pipeline(
      channel,
      {.sources = sources,
       .readers = all ? channel.peers() : Peers(call, call.root, call.root + 1),
       .meets = sources,
       .num_segments = tiles.num_segments(),
       .num_steps = 2,
       .slot_tiles = slot_tiles(Algorithm::one_shot, call.verb, 1, call.world_size),
       .reads = 1,
       .input_bytes = num_bytes * uint64_t(scatters ? call.world_size : 1)},
      GpuLocation::both(location, location));
  const auto stage = [&](uint32_t k, Span span) {
    if (!pipeline.staged() || (!all && is_root)) return;
    copy_tiles(scatters ? call.world_size - 1 : 1, span.num_bytes, [&](int i) {
      const int part = scatters ? channel.rank_after(1 + i) : 0;
      return TileCopy{pipeline.slot(call.rank, k, part),
                      given_part(call, part, chunk(part)) + span.start, span.num_bytes};
    });
  };
  const auto reduce = [&](uint32_t k, Span span) {
    const uint64_t start = chunk(call.rank) + span.start;
    const std::byte* own = given_part(call, call.rank, chunk(call.rank)) + span.start;
    const auto source = [&](int rank) -> const std::byte* {
      if (rank == call.rank) return own;
      const uint32_t location = GpuLocation::input(pipeline.location(rank));
      return location == GpuLocation::kStaged ? pipeline.slot(rank, k, scatters ? call.rank : 0)
                                              : pipeline.symmetric(rank, location) + start;
    };
    const bool aligned = is_aligned(own, kPackBytes) && start % kPackBytes == 0;
    std::byte* output = call.output + span.start;
    reduce_tile<kDType>(
        call, span.num_bytes, aligned, source,
        [&](uint64_t at, const Pack& pack, uint64_t left) { store_any(output + at, pack, left); });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    const Span span = tiles.tile(k);
    if (step == 0) stage(k, span);
    else if (all || is_root) reduce(k, span);
  });
  if (!ok && (all || is_root)) fill_nan(channel, call, num_bytes);
}

}  // namespace fastcoll
