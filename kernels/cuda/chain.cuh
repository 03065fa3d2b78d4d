// SPDX-License-Identifier: Apache-2.0
// chain: accumulators travel from rank 0 to rank n-1, each rank adding its own, and the result
// travels back. Neighbours only, like a ring, but summed in the order of ranks: the bits of
// one_shot and two_shot. Pipelined by segments. A reduce_scatter keeps only its own part of the
// returning result.
//
// Over each link go S bytes of accumulators (4 S of fp8, 2 S of half floats) forward and S back.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

template <class P, DType kDType>
FASTCOLL_KERNEL chain(FASTCOLL_CALL call) {
  using Reducer = device::Reducer<kDType, 4>;
  constexpr uint32_t kPartial = Reducer::kPartialPacks;
  Channel<P> channel(call);
  const int last = call.world_size - 1;
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const bool scatters = call.verb == Verb::reduce_scatter;
  const Span window = {scatters ? uint64_t(call.rank) * num_bytes : 0, num_bytes};
  const Tiles tiles(channel, scatters ? num_bytes * uint64_t(call.world_size) : num_bytes);
  const Op op = device::plain_op<kDType>(call.op);
  const Peers neighbours(call, call.rank - 1, call.rank + 2);
  Pipeline<P> pipeline(channel,
                       {.sources = neighbours,
                        .readers = neighbours,
                        .meets = channel.peers(),
                        .num_segments = tiles.num_segments(),
                        .num_steps = 2 * uint32_t(last) + 1,
                        .slot_tiles = slot_tiles(Algorithm::chain, call.verb, kPartial, last + 1),
                        .reads = 1},
                       GpuLocation::both(GpuLocation::kStaged, GpuLocation::kStaged));
  const auto results = [&](int rank, uint32_t k) { return pipeline.slot(rank, k, kPartial); };

  // 1. Add my input to the left neighbour's sum; the last rank rounds.
  const auto forward = [&](uint32_t k) {
    const Span span = tiles.tile(k);
    const std::byte* partial = call.rank == 0 ? nullptr : pipeline.slot(call.rank - 1, k);
    std::byte* const to = pipeline.slot(call.rank, k, call.rank < last ? 0 : int(kPartial));
    add_tile<kDType>(op, call.input + span.start, partial, uint32_t(span.num_bytes),
                     [&](uint32_t at, const Reducer& reducer, uint32_t left) {
                       if (call.rank < last) return reducer.store_partial(to + at * kPartial);
                       const Pack result = device::finish_pack(reducer, call);
                       if (last > 0) store_data<Pack>(to + at, result);
                       store_clipped(call.output, window, span.start + at, result, left);
                     });
  };
  // 2. Hand the result back to the left, and keep my part of it.
  const auto backward = [&](uint32_t k) {
    const Span span = tiles.tile(k);
    std::byte* const to = call.rank > 0 ? results(call.rank, k) : nullptr;
    // Offsets of the window in the tile; packs before and behind it are handed on alone.
    const auto is_inside = [&](uint64_t at) {
      return span.start + at >= window.start &&
             span.start + at + kPackBytes <= window.start + window.num_bytes;
    };
    const auto is_outside = [&](uint64_t at) {
      return span.start + at + kPackBytes <= window.start ||
             span.start + at >= window.start + window.num_bytes;
    };
    std::byte* const output = call.output + span.start - window.start;
    const bool aligned = is_aligned(output, kPackBytes);
    take_packs(
        results(call.rank + 1, k), uint32_t(span.num_bytes),
        [&](uint32_t at, uint32_t) { return (aligned && is_inside(at)) || is_outside(at); },
        [&](uint32_t at, const Pack& result) {
          if (to != nullptr) store_data<Pack>(to + at, result);
          if (is_inside(at)) store_data<Pack>(output + at, result);
        },
        [&](uint32_t at, const Pack& result, uint32_t left) {
          if (to != nullptr) store_data<Pack>(to + at, result);
          store_clipped(call.output, window, span.start + at, result, left);
        });
  };
  // Each rank has its own turns among the steps of a segment.
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == uint32_t(call.rank)) forward(k);
    else if (step == uint32_t(2 * last - call.rank)) backward(k);
  });
  if (!ok) fill_nan(channel, call, num_bytes);
}

}  // namespace fastcoll
