// SPDX-License-Identifier: Apache-2.0
// Every shape that a call can get must fit the memory that its channels have.
#pragma once

#include <cstdio>

#include "cuda/launch_table.h"

namespace fastcoll::sim {

inline bool fits(Algorithm algorithm, Verb verb, DType dtype, bool ll, uint64_t part_bytes,
                 int world_size, int max_blocks) {
  const LaunchShape shape =
      shape_for(algorithm, verb, dtype, ll, part_bytes, world_size, max_blocks);
  const auto blocks = uint64_t(shape.blocks);
  if (shape.blocks < 1 || shape.blocks > max_blocks || shape.blocks > kMaxChannels) return false;
  if (shape.threads < 32 || shape.threads > kMaxBlockThreads) return false;
  if (ll) {
    const uint64_t packs = (part_bytes + kLlBytes - 1) / kLlBytes;
    return shape.blocks <= kMaxLlChannels && (packs + blocks - 1) / blocks <= uint64_t{kLlPacks};
  }
  const uint32_t partial_tiles = uint32_t(accumulator_size(dtype) / dtype_size(dtype));
  const uint64_t slot_bytes =
      uint64_t{slot_tiles(algorithm, verb, partial_tiles, world_size)} * shape.tile_bytes;
  const uint64_t steps = part_bytes / (blocks * shape.tile_bytes) + uint64_t(2 * world_size) * kLag;
  const bool pair = verb == Verb::send || verb == Verb::recv;
  if (pair && shape.blocks > kPairChannels) return false;
  return shape.tile_bytes >= kPackBytes && shape.tile_bytes % kPackBytes == 0 &&
         kSlots * slot_bytes <= (pair ? kPairHalfBytes : kChannelHalfBytes) &&
         steps < (uint64_t{1} << 31);
}

inline int check_shapes() {
  for (int algorithm = 0; algorithm < kNumGpuAlgorithms; ++algorithm)
    for (int verb = 0; verb < kNumGpuVerbs; ++verb)
      for (const DType dtype : {DType::float32, DType::float16, DType::float8_e5m2})
        for (int world = 1; world <= kMaxGpuWorld; ++world)
          for (const int max_blocks : {1, 3, 16, 132})
            for (const uint64_t bytes : {0ull, 1ull, 8191ull, 64ull << 10, 33ull << 20, 8ull << 30})
              for (const bool ll : {false, true}) {
                if (ll && (bytes > max_ll_bytes(max_blocks) || verb > int(Verb::all_gather)))
                  continue;
                if (fits(Algorithm(algorithm), Verb(verb), dtype, ll, bytes, world, max_blocks))
                  continue;
                std::fprintf(stderr, "WRONG shape: %s %s %s, %d ranks, %d blocks, %llu bytes%s\n",
                             algorithm_name(Algorithm(algorithm)), verb_name(Verb(verb)),
                             dtype_name(dtype), world, max_blocks,
                             static_cast<unsigned long long>(bytes), ll ? ", ll" : "");
                return 1;
              }
  std::printf("ok\n");
  return 0;
}

}  // namespace fastcoll::sim
