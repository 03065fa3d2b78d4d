// SPDX-License-Identifier: Apache-2.0
// How a message is cut: into segments, a tile of each for every channel and rank. A function of the
// plan alone, the same on every rank. All offsets count bytes; a tile starts on a pack of the
// chunk.
#pragma once

#include "cuda/channel.cuh"
#include "cuda/packs.cuh"

namespace fastcoll {

class Tiles {
 public:
  // parts: tiles that a segment has in each channel.
  template <class P>
  FASTCOLL_DEVICE Tiles(const Channel<P>& channel, uint64_t num_bytes, int parts = 1)
      : num_bytes_(num_bytes),
        tile_(channel.tile_bytes()),
        first_(channel.idx() * uint64_t(parts) * tile_),
        row_(channel.count() * uint64_t(parts) * tile_) {}

  FASTCOLL_DEVICE uint32_t num_segments() const {
    return num_bytes_ <= row_ ? 1 : uint32_t((num_bytes_ + row_ - 1) / row_);
  }
  FASTCOLL_DEVICE Span tile(uint32_t segment_idx, int part = 0) const {
    const uint64_t start = segment_idx * row_ + first_ + uint64_t(part) * tile_;
    if (start >= num_bytes_) return {num_bytes_, 0};
    return {start, num_bytes_ - start < tile_ ? num_bytes_ - start : tile_};
  }

 private:
  uint64_t num_bytes_, tile_, first_, row_;
};

}  // namespace fastcoll
