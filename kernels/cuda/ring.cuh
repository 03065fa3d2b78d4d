// SPDX-License-Identifier: Apache-2.0
// ring: every rank exchanges data with its neighbours only. Chunk c travels as accumulators from
// rank c + 1 to rank c, each rank adding its own. As a result it goes once more around. Pipelined
// by segments: in one iteration a rank does every step, each of another segment. The order of the
// sum differs from chunk to chunk. So this is admitted only where the order can't matter or
// numerics="fast" was asked for.
//
// Over each link go 2 S (n-1)/n bytes of an all_reduce of S bytes on n ranks. Half types travel as
// float accumulators on the first way.
#pragma once

#include "cuda/parts.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

template <class P, DType kDType>
FASTCOLL_KERNEL ring(FASTCOLL_CALL call) {
  using Reducer = device::Reducer<kDType, 4>;
  constexpr uint32_t kPartial = Reducer::kPartialPacks;
  Channel<P> channel(call);
  const int world = call.world_size;
  const uint32_t whole = uint32_t(world) - 1;  // the step in which a chunk gets whole
  const int left = (call.rank + world - 1) % world, right = (call.rank + 1) % world;
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const bool scatters = call.verb == Verb::reduce_scatter;
  const Tiles tiles(channel, num_bytes, scatters ? 1 : world);
  const Op op = device::plain_op<kDType>(call.op);
  Pipeline<P> pipeline(channel,
                       {.sources = Peers(call, left, left + 1),
                        .readers = Peers(call, right, right + 1),
                        .meets = channel.peers(),
                        .num_segments = tiles.num_segments(),
                        .num_steps = scatters ? whole + 1 : 2 * whole + 1,
                        .slot_tiles = slot_tiles(Algorithm::ring, call.verb, kPartial, world),
                        .reads = 1},
                       GpuLocation::both(GpuLocation::kStaged, GpuLocation::kStaged));
  // A step's data for the right neighbour: accumulators, and from `whole` on results.
  const auto area = [&](int rank, uint32_t k, uint32_t step) {
    const uint32_t tile = step < whole ? step * kPartial : whole * kPartial + step - whole;
    return pipeline.slot(rank, k, int(tile));
  };

  const auto reduce = [&](uint32_t step, uint32_t k) {
    const int chunk = (call.rank + 2 * world - 1 - int(step)) % world;
    const Span span = scatters ? tiles.tile(k) : tiles.tile(k, chunk);
    const std::byte* input =
        (scatters ? given_part(call, chunk, uint64_t(chunk) * num_bytes) : call.input) + span.start;
    const std::byte* partial = step == 0 ? nullptr : area(left, k, step - 1);
    std::byte* const to = area(call.rank, k, step);
    add_tile<kDType>(op, input, partial, uint32_t(span.num_bytes),
                     [&](uint32_t at, const Reducer& reducer, uint32_t left_bytes) {
                       if (step < whole) return reducer.store_partial(to + at * kPartial);
                       const Pack result = device::finish_pack(reducer, call);
                       if (!scatters && world > 1) store_data<Pack>(to + at, result);
                       store_any(call.output + span.start + at, result, left_bytes);
                     });
  };
  const auto pass_on = [&](uint32_t step, uint32_t k) {
    const int chunk = (call.rank + world + int(whole) - int(step)) % world;
    const Span span = tiles.tile(k, chunk);
    std::byte* const output = call.output + span.start;
    std::byte* const to = step < 2 * whole ? area(call.rank, k, step) : nullptr;
    const bool aligned = is_aligned(output, kPackBytes);
    take_packs(
        area(left, k, step - 1), uint32_t(span.num_bytes),
        [&](uint32_t, uint32_t left_bytes) { return aligned && left_bytes >= kPackBytes; },
        [&](uint32_t at, const Pack& result) {
          if (to != nullptr) store_data<Pack>(to + at, result);
          store_data<Pack>(output + at, result);
        },
        [&](uint32_t at, const Pack& result, uint32_t left_bytes) {
          if (to != nullptr) store_data<Pack>(to + at, result);
          store_any(output + at, result, left_bytes);
        });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step <= whole) reduce(step, k);
    else pass_on(step, k);
  });
  if (!ok) fill_nan(channel, call, num_bytes);
}

}  // namespace fastcoll
