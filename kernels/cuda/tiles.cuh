// SPDX-License-Identifier: Apache-2.0
// How a message is cut: into segments, a tile of each for every channel and rank. A function of the
// plan alone, the same on every rank. All offsets count bytes; a tile starts on a pack of the
// chunk.
#pragma once

#include "cuda/call.h"
#include "prim.cuh"

namespace fastcoll {

struct Span {
  uint64_t start, num_bytes;
};

class Tiles {
 public:
  // split: into world_size parts, one tile of every segment for each rank; else a tile is for all.
  FASTCOLL_DEVICE Tiles(const DeviceCall& call, uint64_t num_bytes, bool split)
      : num_bytes_(num_bytes),
        tile_(call.tile_bytes),
        parts_(split ? uint64_t(call.world_size) : 1),
        row_(tile_ * parts_ * num_blocks()) {}

  FASTCOLL_DEVICE uint32_t num_segments() const {
    return num_bytes_ <= row_ ? 1 : uint32_t((num_bytes_ + row_ - 1) / row_);
  }
  FASTCOLL_DEVICE Span tile(uint32_t segment_idx, int part = 0) const {
    const uint64_t start =
        segment_idx * row_ + (block_idx() * parts_ + uint64_t(part)) * uint64_t{tile_};
    if (start >= num_bytes_) return {num_bytes_, 0};
    return {start, num_bytes_ - start < tile_ ? num_bytes_ - start : tile_};
  }

 private:
  uint64_t num_bytes_, tile_, parts_, row_;
};

}  // namespace fastcoll
