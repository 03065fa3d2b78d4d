// SPDX-License-Identifier: Apache-2.0
// Adds rows of this rank's memory in their order, and rounds once. The rows are the sums of several
// nodes, or the parts of all ranks, brought by NCCL or by copy engines. No peer, no channel, no
// wait: nothing of the protocol. The kernel has every type and operation, with the CPU's bits. It
// is always loaded. Behind copy engines one of Triton's adds where that is, too (gpu/sums.py).
#pragma once

#include "cuda/partials.h"
#include "cuda/reduce_tile.cuh"

namespace fastcoll {

static_assert(kMaxGpuWorld <= kMaxPartials, "the parts of all ranks are added at once");

// The sums of rows of a type go to sink(offset_bytes, pack, bytes_left).
template <DType kDType, class Sink>
FASTCOLL_DEVICE void add_rows(const PartialsCall& call, Sink sink) {
  const Op op = device::plain_op<kDType>(call.op);
  const auto source = [&](int row) { return call.rows[row]; };
  bool aligned = true;
  for (int row = 0; row < call.num_rows; ++row)
    aligned = aligned && is_aligned(call.rows[row], kPackBytes);
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const uint64_t step = uint64_t{num_blocks()} * num_threads() * kPackBytes;
  for (uint64_t at = (uint64_t{block_idx()} * num_threads() + thread_idx()) * kPackBytes;
       at < num_bytes; at += step) {
    const uint64_t left = num_bytes - at;
    sink(at, reduce_rows<kDType>({call.num_rows, call.divisor}, op, aligned, source, at, left),
         left);
  }
}

template <DType kDType>
FASTCOLL_KERNEL add_partials(FASTCOLL_ARGUMENT(PartialsCall) call) {
  using Format = device::FormatOf<kDType>;
  using Storage = typename Format::Storage;
  if constexpr (sizeof(typename Format::Accumulator) > sizeof(Storage)) {
    if (call.widened) {
      return add_rows<DType::float32>(call, [&](uint64_t at, const Pack& sums, uint64_t left) {
        std::byte* to = call.output + at / sizeof(float) * sizeof(Storage);
        FASTCOLL_UNROLL
        for (int i = 0; i < int(kPackBytes / sizeof(float)); ++i)
          if (i * sizeof(float) < left)
            store_data<Storage>(to + i * sizeof(Storage),
                                Format::narrow(device::get_element<float>(sums.words, i)));
      });
    }
  }
  add_rows<kDType>(call, [&](uint64_t at, const Pack& sums, uint64_t left) {
    store_any(call.output + at, sums, left);
  });
}

}  // namespace fastcoll
