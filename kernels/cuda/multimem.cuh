// SPDX-License-Identifier: Apache-2.0
// multimem: the switch reduces (NVLS). Rank r asks the switch for the sum of all ranks' part r, and
// stores the result into all regions through the switch. It needs sm_90 or later, and a multicast
// object over the regions. The switch's order is its own: sums of floats are admitted with
// numerics="fast" only. Integers have the same bits in any order. MIN and MAX of floats stay with
// the other algorithms: PTX promises neither NaN nor -0 < +0 there, and has none of float32.
//
// One address of the switch's means the same offset in every region, or in every heap. That holds
// where all ranks stage, or have symmetric tensors at one offset. With any other mix rank r itself
// reads and writes all ranks' part r, in the order of ranks. The inputs and the outputs are
// compared apart.
//
// Over the links of each rank go S + S/n bytes of an all_reduce of S bytes on n ranks.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/reduce_tile.cuh"
#include "cuda/tiles.cuh"

namespace fastcoll {

// The protocol of memory that has two addresses: a region's and the switch's. A publication lies
// between an access through one of them and an access through the other by another rank or a later
// kernel.
template <class P>
struct TwoAddresses : P {
  static FASTCOLL_DEVICE void arrive(ArrivePack* pack, ArrivePack value) {
    sync_aliases();
    P::arrive(pack, value);
  }
  static FASTCOLL_DEVICE void publish(uint64_t* word, uint64_t value) {
    sync_aliases();
    P::publish(word, value);
  }
};

// The places that the ranks of a call have published, as the switch sees them.
template <class P>
class SwitchPlaces {
 public:
  static constexpr uint64_t kInput = GpuLocation::both(~0u, 0);
  static constexpr uint64_t kOutput = GpuLocation::both(0, ~0u);

  FASTCOLL_DEVICE SwitchPlaces(const DeviceCall& call, const Pipeline<TwoAddresses<P>>& pipeline)
      : call_(call), pipeline_(pipeline) {}

  // Whether all ranks published the same place, as far as `bits` go.
  FASTCOLL_DEVICE bool agree(uint64_t bits) const {
    uint64_t differs = 0;
    for (int rank = 0; rank < call_.world_size; ++rank)
      differs |= pipeline_.location(rank) ^ pipeline_.location(call_.rank);
    return (differs & bits) == 0 || !P::kComparesPlaces;
  }
  // The memory of all ranks in which a place lies, as the switch knows it.
  FASTCOLL_DEVICE SwitchMemory common(uint32_t location) const {
    return location == GpuLocation::kStaged
               ? SwitchMemory{call_.multicast, call_.regions, call_.world_size}
               : SwitchMemory{call_.heap_multicast, call_.heaps, call_.world_size};
  }
  FASTCOLL_DEVICE bool is_common(uint32_t location) const {
    return location == GpuLocation::kStaged || call_.heap_multicast != nullptr;
  }
  FASTCOLL_DEVICE size_t offset(const std::byte* ptr, uint32_t location) const {
    const bool staged = location == GpuLocation::kStaged;
    return size_t(ptr - (staged ? call_.regions : call_.heaps)[call_.rank]);
  }

 private:
  const DeviceCall& call_;
  const Pipeline<TwoAddresses<P>>& pipeline_;
};

// Elements that a thread asks the switch for before it stores the first of them.
inline constexpr int kWordsAtOnce = 4;

// The results of a tile of integers, one by one: sink(offset_bytes, word). The elements of
// neighbouring threads lie side by side, so that a warp's requests do.
template <DType kDType, class Sink>
FASTCOLL_DEVICE void reduce_words(const DeviceCall& call, Op op, const SwitchMemory& memory,
                                  size_t offset_bytes, uint32_t num_bytes, Sink sink) {
  constexpr uint32_t kWordBytes = uint32_t(dtype_size(kDType));
  using Word = std::conditional_t<kWordBytes == 4, uint32_t, uint64_t>;
  const uint32_t stride = num_threads() * kWordBytes;
  for (uint32_t at = thread_idx() * kWordBytes; at < num_bytes; at += kWordsAtOnce * stride) {
    Word words[kWordsAtOnce];
    const auto ask = [&]<Op kOp>() {
      FASTCOLL_UNROLL
      for (int i = 0; i < kWordsAtOnce; ++i)
        if (at + uint32_t(i) * stride < num_bytes)
          words[i] =
              multimem_word<kOp, kDType, Word>(memory, offset_bytes + at + uint32_t(i) * stride);
    };
    switch (op) {
      case Op::min:
        ask.template operator()<Op::min>();
        break;
      case Op::max:
        ask.template operator()<Op::max>();
        break;
      case Op::band:
        ask.template operator()<Op::band>();
        break;
      case Op::bor:
        ask.template operator()<Op::bor>();
        break;
      case Op::bxor:
        ask.template operator()<Op::bxor>();
        break;
      default:
        ask.template operator()<Op::sum>();
    }
    FASTCOLL_UNROLL
    for (int i = 0; i < kWordsAtOnce; ++i) {
      if (at + uint32_t(i) * stride >= num_bytes) break;
      device::Reducer<kDType, kWordBytes / 4> reducer;  // for AVG
      uint32_t halves[2] = {uint32_t(words[i]), uint32_t(uint64_t{words[i]} >> 32)};
      reducer.load(halves);
      reducer.finish(halves, call.op == Op::avg ? call.world_size : 0);
      words[i] = kWordBytes == 4 ? Word(halves[0]) : Word(uint64_t{halves[1]} << 32 | halves[0]);
      sink(at + uint32_t(i) * stride, words[i]);
    }
  }
}

// all_reduce and reduce_scatter: SUM and AVG of floats, all but PRODUCT of integers.
template <class P, DType kDType>
FASTCOLL_KERNEL multimem(FASTCOLL_CALL call) {
  Channel<TwoAddresses<P>> channel(call);
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const bool scatters = call.verb == Verb::reduce_scatter;
  const Tiles tiles(channel, num_bytes, scatters ? 1 : call.world_size);
  // A reduce_scatter in place overwrites part r, which only rank r itself reads.
  Pipeline<TwoAddresses<P>> pipeline(
      channel,
      {.sources = channel.peers(),
       .readers = channel.peers(),
       .meets = channel.peers(),
       .num_segments = tiles.num_segments(),
       .num_steps = scatters ? 2u : 3u,
       .slot_tiles = slot_tiles(Algorithm::multimem, call.verb, 1, call.world_size),
       .reads = scatters ? 1u : 2u,
       .pushes = !scatters,
       .input_bytes = num_bytes * uint64_t(scatters ? call.world_size : 1),
       .output_bytes = num_bytes},
      GpuLocation::both(call.input_location,
                        scatters ? call.input_location : call.output_location));
  const auto tile = [&](uint32_t k, int part) {
    return scatters ? tiles.tile(k) : tiles.tile(k, part);
  };
  // Where the tile of a part starts in an input.
  const auto start = [&](const Span& span, int part) {
    return span.start + (scatters ? uint64_t(part) * num_bytes : 0);
  };
  const SwitchPlaces<P> places(call, pipeline);
  const uint32_t input_place = GpuLocation::input(pipeline.location(call.rank));
  const uint32_t output_place = GpuLocation::output(pipeline.location(call.rank));

  // 1. Every part of my input, my own too, into my slot.
  const auto stage = [&](uint32_t k) {
    if (!pipeline.staged()) return;
    copy_tiles(call.world_size, call.tile_bytes, [&](int part) {
      const Span span = tile(k, part);
      return TileCopy{pipeline.slot(call.rank, k, part), call.input + start(span, part),
                      span.num_bytes};
    });
  };
  // 2. The sum of all ranks' part that is mine, to my output or to all outputs: into tensors or
  // slots.
  const auto reduce = [&](uint32_t k) {
    const Span span = tile(k, call.rank);
    const auto source = [&](int rank) -> const std::byte* {
      const uint32_t location = GpuLocation::input(pipeline.location(rank));
      return location == GpuLocation::kStaged
                 ? pipeline.slot(rank, k, call.rank)
                 : pipeline.symmetric(rank, location) + start(span, call.rank);
    };
    const auto target = [&](int rank) {
      const uint32_t location = GpuLocation::output(pipeline.location(rank));
      return location == GpuLocation::kStaged ? pipeline.slot(rank, k, call.rank)
                                              : pipeline.symmetric(rank, location) + span.start;
    };
    const bool to_all = places.agree(SwitchPlaces<P>::kOutput) && places.is_common(output_place);
    const auto sink = [&](uint64_t at, const Pack& pack, uint64_t left) {
      if (scatters) return store_any(call.output + span.start + at, pack, left);
      // The bytes behind the end of a tensor are not ours to write.
      if (to_all && left >= kPackBytes)
        return multimem_store(places.common(output_place),
                              places.offset(target(call.rank), output_place) + at, pack);
      for (int rank = 0; rank < call.world_size; ++rank) store_any(target(rank) + at, pack, left);
    };
    const size_t mine = places.offset(source(call.rank), input_place);
    const bool by_switch = places.agree(SwitchPlaces<P>::kInput) && places.is_common(input_place) &&
                           mine % kPackBytes == 0;
    const bool aligned = start(span, call.rank) % kPackBytes == 0;
    const Op op = device::plain_op<kDType>(call.op);
    if constexpr (switch_reduces_integers(kDType)) {
      // A rank alone waits for nothing between two steps: its threads keep to their own packs.
      if (by_switch && call.world_size > 1) {
        const size_t to = places.offset(target(call.rank), output_place);
        reduce_words<kDType>(call, op, places.common(input_place), mine, uint32_t(span.num_bytes),
                             [&](uint32_t at, auto word) {
                               if (!scatters && to_all)
                                 return multimem_store_word(places.common(output_place), to + at,
                                                            word);
                               const uint64_t bits = word;
                               const Pack pack{{uint32_t(bits), uint32_t(bits >> 32), 0, 0}};
                               const auto put = [&](std::byte* place) {
                                 if (is_aligned(place, sizeof word)) store_data(place, word);
                                 else store_pieces<uint8_t>(place, pack, sizeof word);
                               };
                               if (scatters) return put(call.output + span.start + at);
                               for (int rank = 0; rank < call.world_size; ++rank)
                                 put(target(rank) + at);
                             });
        return;
      }
    }
    for_packs(span.num_bytes, [&](uint64_t at, uint64_t left) {
      // Whole packs: the bytes behind the part may be another rank's, which overwrites them in
      // place.
      if constexpr (!switch_reduces_integers(kDType)) {
        if (by_switch && left >= kPackBytes) {
          device::Reducer<kDType, 4> reducer;  // for AVG and the canonical NaN
          reducer.load(multimem_sum<kDType>(places.common(input_place), mine + at).words);
          return sink(at, device::finish_pack(reducer, call), left);
        }
      }
      sink(at, reduce_pack<kDType>(call, op, aligned, source, at, left), left);
    });
  };
  // 3. All parts, from my own slot.
  const auto copy_out = [&](uint32_t k) {
    if (call.output_location != GpuLocation::kStaged) return;
    copy_tiles(call.world_size, call.tile_bytes, [&](int part) {
      const Span span = tile(k, part);
      return TileCopy{call.output + span.start, pipeline.slot(call.rank, k, part), span.num_bytes};
    });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == 0) stage(k);
    else if (step == 1) reduce(k);
    else copy_out(k);
  });
  if (!ok) fill_nan(channel, call, num_bytes);
}

// all_gather and broadcast: a source pushes its part into all outputs, or into all slots, through
// the switch. So a part leaves its rank once, for any number of ranks.
template <class P>
FASTCOLL_KERNEL multimem_move(FASTCOLL_CALL call) {
  Channel<TwoAddresses<P>> channel(call);
  const uint64_t num_bytes = call.numel * call.elem_bytes;
  const bool gathers = call.verb == Verb::all_gather;
  const bool gives = gathers || call.rank == call.root;
  const uint64_t output_bytes = num_bytes * uint64_t(gathers ? call.world_size : 1);
  const Tiles tiles(channel, num_bytes);
  // No rank reads the input of another. All exchange progress where any output is staged. A source
  // may not push before a rank is there, nor before it has copied an older segment out.
  Pipeline<TwoAddresses<P>> pipeline(
      channel,
      {.sources = channel.peers(),
       .readers = channel.peers(),
       .meets = channel.peers(),
       .num_segments = tiles.num_segments(),
       .num_steps = 3,
       .slot_tiles = slot_tiles(Algorithm::multimem, call.verb, 1, call.world_size),
       .reads = 2,
       .pushes = true,
       .input_bytes = output_bytes,
       .output_bytes = output_bytes},
      GpuLocation::both(call.output_location, call.output_location));
  const SwitchPlaces<P> places(call, pipeline);
  const uint64_t own_start = gathers ? uint64_t(call.rank) * num_bytes : 0;

  const auto push = [&](uint32_t k) {
    const Span span = tiles.tile(k);
    const std::byte* from = call.input + span.start;
    std::byte* const own = call.output + own_start + span.start;
    const auto target = [&](int rank) {
      const uint32_t location = GpuLocation::output(pipeline.location(rank));
      return location == GpuLocation::kStaged
                 ? pipeline.slot(rank, k, gathers ? call.rank : 0)
                 : pipeline.symmetric(rank, location) + own_start + span.start;
    };
    const uint32_t place = GpuLocation::output(pipeline.location(call.rank));
    const size_t to = places.offset(target(call.rank), place);
    const bool to_all =
        places.agree(SwitchPlaces<P>::kOutput) && places.is_common(place) && to % kPackBytes == 0;
    const bool aligned = is_aligned(from, kPackBytes);
    take_packs(
        from, uint32_t(span.num_bytes),
        [&](uint32_t, uint32_t left) { return to_all && aligned && left >= kPackBytes; },
        [&](uint32_t at, const Pack& pack) {
          multimem_store(places.common(place), to + at, pack);
          if (place == GpuLocation::kStaged && own != from) store_any(own + at, pack, kPackBytes);
        },
        [&](uint32_t at, const Pack& pack, uint32_t left) {
          if (own != from) store_any(own + at, pack, left);
          // The bytes behind the end of a tensor are not ours to write.
          if (to_all && left >= kPackBytes)
            return multimem_store(places.common(place), to + at, pack);
          for (int rank = 0; rank < call.world_size; ++rank)
            if (rank != call.rank) store_any(target(rank) + at, pack, left);
        });
  };
  // The others' parts, from my own slot.
  const auto copy_out = [&](uint32_t k) {
    if (call.output_location != GpuLocation::kStaged || (!gathers && gives)) return;
    copy_tiles(gathers ? call.world_size - 1 : 1, call.tile_bytes, [&](int i) {
      const int part = gathers ? channel.rank_after(1 + i) : 0;
      const Span span = tiles.tile(k);
      return TileCopy{call.output + uint64_t(part) * num_bytes + span.start,
                      pipeline.slot(call.rank, k, part), span.num_bytes};
    });
  };
  const bool ok = pipeline.run([&](uint32_t step, uint32_t k) {
    if (step == 1 && gives) push(k);
    else if (step == 2) copy_out(k);
  });
  if (!ok && (gathers || !gives)) fill_nan(channel, call, output_bytes);
}

}  // namespace fastcoll
