// SPDX-License-Identifier: Apache-2.0
// multimem: the switch adds (NVLS). Every rank stages its input; rank r asks the switch for the sum
// of everybody's part r, and the switch hands the result to everybody. sm_90 and later, where a
// multicast object over the regions could be made. The switch's order of summing is its own, so
// this is admitted with numerics="fast" only. Tensors are staged also if they are symmetric: the
// switch needs the same offset on every rank, which only scratch is known to have.
//
// Over the links of each rank go S + S/n bytes of an all_reduce of S bytes on n ranks.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

// all_reduce and reduce_scatter, SUM and AVG, of float32, float16 and bfloat16.
template <class P, DType kDType>
FASTCOLL_KERNEL multimem(FASTCOLL_CALL call) {
  Channel<P> channel(call);
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const bool scatters = call.verb == Verb::reduce_scatter;
  const Tiles tiles(channel, num_bytes, scatters ? 1 : call.world_size);
  Pipeline<P> pipeline(
      channel,
      {.sources = channel.peers(),
       .readers = channel.peers(),
       .meets = channel.peers(),
       .num_segments = tiles.num_segments(),
       .num_steps = scatters ? 2u : 3u,
       .slot_tiles = slot_tiles(Algorithm::multimem, call.verb, 1, call.world_size),
       .reads = scatters ? 1u : 2u},
      GpuLocation::both(GpuLocation::kStaged, GpuLocation::kStaged));
  const auto tile = [&](uint32_t k, int part) {
    return scatters ? tiles.tile(k) : tiles.tile(k, part);
  };

  // 1. Every part of my input, my own too, into my slot.
  const auto stage = [&](uint32_t k) {
    for (int part = 0; part < call.world_size; ++part) {
      const Span span = tile(k, part);
      const uint64_t chunk = scatters ? uint64_t(part) * num_bytes : 0;
      copy_tile(pipeline.slot(call.rank, k, part), call.input + chunk + span.start, span.num_bytes);
    }
  };
  // 2. The sum of everybody's part that is mine, to my output or into everybody's slot.
  const auto reduce = [&](uint32_t k) {
    const Span span = tile(k, call.rank);
    const size_t offset = size_t(pipeline.slot(call.rank, k, call.rank) - call.regions[call.rank]);
    for_packs(span.num_bytes, [&](uint64_t at, uint64_t left) {
      const Pack sum = multimem_sum<kDType>(call, offset + at);
      device::Reducer<kDType, 4> reducer;  // for AVG and the canonical NaN
      reducer.load(sum.words);
      const Pack result = device::finish_pack(reducer, call);
      if (scatters) store_any(call.output + span.start + at, result, left);
      else multimem_store(call, offset + at, result);
    });
  };
  // 3. All parts, from my own slot.
  const auto copy_out = [&](uint32_t k) {
    for (int part = 0; part < call.world_size; ++part) {
      const Span span = tile(k, part);
      copy_tile(call.output + span.start, pipeline.slot(call.rank, k, part), span.num_bytes);
    }
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == 0) stage(k);
    else if (step == 1) reduce(k);
    else copy_out(k);
  });
  if (!ok) fill_nan(channel, num_bytes);
}

}  // namespace fastcoll
