// SPDX-License-Identifier: Apache-2.0
// two_shot: rank r reduces part r of every segment in the order of ranks, and every rank takes the
// reduced parts of the others. Copy-in, reduction and copy-out of different segments overlap in one
// kernel; symmetric tensors are read and written where they lie. (A reduce_scatter has one shot
// only: that is one_shot's.)
//
// Memory traffic per rank for S bytes on n ranks: (5 - 2/n) S with both copies; from and to
// symmetric tensors S read and S written, over links (n-1)/n of each.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

template <class P, DType kDType>
FASTCOLL_KERNEL two_shot(FASTCOLL_CALL call) {
  Channel<P> channel(call);
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const Tiles tiles(channel, num_bytes, call.world_size);
  Pipeline<P> pipeline(
      channel,
      {.sources = channel.peers(),
       .readers = channel.peers(),
       .meets = channel.peers(),
       .num_segments = tiles.num_segments(),
       .num_steps = 3,
       .slot_tiles = slot_tiles(Algorithm::two_shot, Verb::all_reduce, 1, call.world_size),
       .reads = 2,
       .pushes = true,
       .input_bytes = num_bytes,
       .output_bytes = num_bytes},
      GpuLocation::both(call.input_location, call.output_location));
  const auto output_location = [&](int rank) {
    return GpuLocation::output(pipeline.location(rank));
  };

  // 1. The others' parts into my slot; my own stays where it is.
  const auto stage = [&](uint32_t k) {
    if (!pipeline.staged()) return;
    copy_tiles(call.world_size - 1, call.tile_bytes, [&](int i) {
      const int part = channel.rank_after(1 + i);
      const Span span = tiles.tile(k, part);
      return TileCopy{pipeline.slot(call.rank, k, part), call.input + span.start, span.num_bytes};
    });
  };
  // 2. My part, from every input to every output, or to my slot for the ranks that take it from
  // there.
  const auto reduce = [&](uint32_t k) {
    const Span span = tiles.tile(k, call.rank);
    const auto source = [&](int rank) -> const std::byte* {
      if (rank == call.rank) return call.input + span.start;
      const uint32_t location = GpuLocation::input(pipeline.location(rank));
      return location == GpuLocation::kStaged ? pipeline.slot(rank, k, call.rank)
                                              : pipeline.symmetric(rank, location) + span.start;
    };
    const auto sink = [&](uint64_t at, const Pack& pack, uint64_t left) {
      store_any(call.output + span.start + at, pack, left);
      bool pulled = false;
      for (int rank = 0; rank < call.world_size; ++rank) {
        if (rank == call.rank) continue;
        const uint32_t location = output_location(rank);
        if (location == GpuLocation::kStaged) pulled = true;
        else store_any(pipeline.symmetric(rank, location) + span.start + at, pack, left);
      }
      if (pulled) store_data<Pack>(pipeline.slot(call.rank, k, call.rank) + at, pack);
    };
    const bool aligned = is_aligned(call.input + span.start, kPackBytes);
    reduce_tile<kDType>(call, span.num_bytes, aligned, source, sink);
  };
  // 3. The others' reduced parts, where they could not put them into my output themselves.
  const auto copy_out = [&](uint32_t k) {
    if (call.output_location != GpuLocation::kStaged) return;
    copy_tiles(call.world_size - 1, call.tile_bytes, [&](int i) {
      const int part = channel.rank_after(1 + i);
      const Span span = tiles.tile(k, part);
      return TileCopy{call.output + span.start, pipeline.slot(part, k, part), span.num_bytes};
    });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == 0) stage(k);
    else if (step == 1) reduce(k);
    else copy_out(k);
  });
  if (!ok) fill_nan(channel, call, num_bytes);
}

}  // namespace fastcoll
