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
  const uint32_t neighbours =
      channel.peers() & ((call.rank > 0 ? 1u << (call.rank - 1) : 0) | 1u << (call.rank + 1));
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
    for_packs(span.num_bytes, [&](uint64_t at, uint64_t left) {
      const Pack own = load_any(call.input + span.start + at, left);
      Reducer reducer;
      if (call.rank == 0) {
        reducer.load(own.words);
      } else {
        reducer.load_partial(pipeline.slot(call.rank - 1, k) + at * kPartial);
        reducer.accumulate(op, own.words);
      }
      if (call.rank < last)
        return reducer.store_partial(pipeline.slot(call.rank, k) + at * kPartial);
      const Pack result = device::finish_pack(reducer, call);
      if (last > 0) store_data<Pack>(results(call.rank, k) + at, result);
      store_clipped(call.output, window, span.start + at, result, left);
    });
  };
  // 2. Hand the result back to the left, and keep my part of it.
  const auto backward = [&](uint32_t k) {
    const Span span = tiles.tile(k);
    for_packs(span.num_bytes, [&](uint64_t at, uint64_t left) {
      const Pack result = load_data<Pack>(results(call.rank + 1, k) + at);
      if (call.rank > 0) store_data<Pack>(results(call.rank, k) + at, result);
      store_clipped(call.output, window, span.start + at, result, left);
    });
  };
  // Each rank has its own turns among the steps of a segment.
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == uint32_t(call.rank)) forward(k);
    else if (step == uint32_t(2 * last - call.rank)) backward(k);
  });
  if (!ok) fill_nan(channel, num_bytes);
}

}  // namespace fastcoll
