// SPDX-License-Identifier: Apache-2.0
// nccl: NCCL moves the bytes, and this kernel adds them in the order of ranks. The parts of all
// ranks lie in this rank's memory. No peer, no channel, no wait: nothing of the protocol. Part r
// starts a whole number of packs behind part r - 1.
//
// The same kernel adds behind the copy engines. It has every type and operation with the CPU's
// bits, and is loaded before anything waits. A Triton kernel would do the same sums a second time
// and need Triton where nothing else does. It would be compiled in the middle of the first call,
// while the peers' limits run. Triton is for operations that a program fuses behind a reduction;
// there the kernel waits by itself.
#pragma once

#include "cuda/reduce_tile.cuh"

namespace fastcoll {

// numel: of one part.
template <DType kDType>
FASTCOLL_KERNEL fold(FASTCOLL_CALL call) {
  const uint64_t num_bytes = call.numel * dtype_size(kDType);
  const uint64_t part_bytes = (num_bytes + kPackBytes - 1) / kPackBytes * kPackBytes;
  const uint64_t row = uint64_t{num_blocks()} * call.tile_bytes;
  const bool aligned = is_aligned(call.input, kPackBytes);
  for (uint64_t start = uint64_t{block_idx()} * call.tile_bytes; start < num_bytes; start += row) {
    const uint64_t left = num_bytes - start;
    const auto source = [&](int rank) { return call.input + uint64_t(rank) * part_bytes + start; };
    std::byte* output = call.output + start;
    reduce_tile<kDType>(
        call, left < call.tile_bytes ? left : call.tile_bytes, aligned, source,
        [&](uint64_t at, const Pack& pack, uint64_t rest) { store_any(output + at, pack, rest); });
  }
}

}  // namespace fastcoll
