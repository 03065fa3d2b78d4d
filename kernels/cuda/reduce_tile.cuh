// SPDX-License-Identifier: Apache-2.0
// Reduces one tile by all threads of a block. Each takes every num_threads()-th pack, reads it from
// every rank in the order of ranks, and hands the result on.
//
// One kernel serves all numbers of ranks. It loads the packs of four ranks at once (eight for LL);
// each load has a predicate for the rank's existence. Kernels for 2, 4 and 8 ranks would make four
// of each, and an install would compile them all. With eight at once the 128 registers of a thread
// do not suffice: two_shot and one_shot of bfloat16 and float8 keep some in memory.
#pragma once

#include "cuda/arithmetic.cuh"
#include "cuda/channel.cuh"
#include "cuda/packs.cuh"

namespace fastcoll {

// Sources whose loads are in flight at the same time.
inline constexpr int kLoadsAtOnce = 4;

struct Rows {
  int count;
  int divisor;  // of AVG, else 0
};

// One pack of rows, which are added in their order by a plain_op: see reduce_tile.
template <DType kDType, class Source>
FASTCOLL_DEVICE Pack reduce_rows(Rows rows, Op op, bool aligned, Source source, uint64_t at,
                                 uint64_t left) {
  device::Reducer<kDType, 4> reducer;
  if (aligned && left >= kPackBytes) {
    for (int first = 0; first < rows.count; first += kLoadsAtOnce) {
      Pack packs[kLoadsAtOnce];
      FASTCOLL_UNROLL
      for (int i = 0; i < kLoadsAtOnce; ++i)
        if (first + i < rows.count) packs[i] = load_data<Pack>(source(first + i) + at);
      FASTCOLL_UNROLL
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        if (first + i >= rows.count) break;
        if (first + i == 0) reducer.load(packs[i].words);
        else reducer.accumulate(op, packs[i].words);
      }
    }
  } else {
    for (int row = 0; row < rows.count; ++row) {
      const Pack pack = load_any(source(row) + at, left);
      if (row == 0) reducer.load(pack.words);
      else reducer.accumulate(op, pack.words);
    }
  }
  Pack result;
  reducer.finish(result.words, rows.divisor);
  return result;
}

// One pack of a tile of all ranks.
template <DType kDType, class Source>
FASTCOLL_DEVICE Pack reduce_pack(const DeviceCall& call, Op op, bool aligned, Source source,
                                 uint64_t at, uint64_t left) {
  const Rows rows{call.world_size, call.op == Op::avg ? call.world_size : 0};
  return reduce_rows<kDType>(rows, op, aligned, source, at, left);
}

// The tile of a rank starts at source(rank). The results go to sink(offset_bytes, pack,
// bytes_left). If `aligned`, every source starts on a pack.
template <DType kDType, class Source, class Sink>
FASTCOLL_DEVICE void reduce_tile(const DeviceCall& call, uint64_t num_bytes, bool aligned,
                                 Source source, Sink sink) {
  const Op op = device::plain_op<kDType>(call.op);
  for_packs(num_bytes, [&](uint64_t at, uint64_t left) {
    sink(at, reduce_pack<kDType>(call, op, aligned, source, at, left), left);
  });
}

// Adds a tile of this rank's own to the accumulators that a neighbour has handed on; `partial` is
// nullptr if there are none yet. The sums go to sink(offset_bytes, reducer, bytes_left). Several
// packs are under way at once: as many as a thread has registers for.
template <DType kDType, class Sink>
FASTCOLL_DEVICE void add_tile(Op op, const std::byte* own, const std::byte* partial,
                              uint32_t num_bytes, Sink sink) {
  using Reducer = device::Reducer<kDType, 4>;
  constexpr uint32_t kPartial = Reducer::kPartialPacks;
  constexpr uint32_t kAtOnce = dtype_size(kDType) == 1 ? 1 : kPacksAtOnce / kPartial;
  const uint32_t stride = num_threads() * uint32_t{kPackBytes};
  const auto sum = [&](uint32_t at, const Pack& pack) {
    Reducer reducer;
    if (partial == nullptr) {
      reducer.load(pack.words);
    } else {
      reducer.load_partial(partial + at * kPartial);
      reducer.accumulate(op, pack.words);
    }
    return reducer;
  };
  const bool whole = is_aligned(own, kPackBytes) && num_bytes % kPackBytes == 0;
  for (uint32_t at = thread_idx() * uint32_t{kPackBytes}; at < num_bytes; at += kAtOnce * stride) {
    if (whole && kAtOnce > 1) {
      Pack packs[kAtOnce];
      Reducer reducers[kAtOnce];
      FASTCOLL_UNROLL
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (at + i * stride < num_bytes) packs[i] = load_data<Pack>(own + at + i * stride);
      FASTCOLL_UNROLL
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (at + i * stride < num_bytes) reducers[i] = sum(at + i * stride, packs[i]);
      FASTCOLL_UNROLL
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (at + i * stride < num_bytes)
          sink(at + i * stride, reducers[i], num_bytes - at - i * stride);
      continue;
    }
    FASTCOLL_NO_UNROLL
    for (uint32_t i = 0; i < kAtOnce && at + i * stride < num_bytes; ++i) {
      const uint32_t place = at + i * stride, left = num_bytes - place;
      sink(place, sum(place, load_any(own + place, left)), left);
    }
  }
}

// The output of a call that failed: NaN, where the type has one. Each channel fills its part.
template <class P>
FASTCOLL_DEVICE void fill_nan(const Channel<P>& channel, DType dtype, std::byte* output,
                              uint64_t num_bytes) {
  const uint64_t pattern = device::nan_pattern(dtype);
  if (pattern == 0) return;
  const Pack pack{
      {uint32_t(pattern), uint32_t(pattern >> 32), uint32_t(pattern), uint32_t(pattern >> 32)}};
  const uint64_t thread = uint64_t{channel.idx()} * num_threads() + thread_idx();
  const uint64_t stride = uint64_t{channel.count()} * num_threads() * kPackBytes;
  for (uint64_t at = thread * kPackBytes; at < num_bytes; at += stride)
    store_any(output + at, pack, num_bytes - at);
}
template <class P>
FASTCOLL_DEVICE void fill_nan(const Channel<P>& channel, const DeviceCall& call,
                              uint64_t num_bytes) {
  fill_nan(channel, call.dtype, call.output, num_bytes);
}

}  // namespace fastcoll
