// SPDX-License-Identifier: Apache-2.0
// Every shape that a call can get must fit the memory that its channels have; others are refused.
#pragma once

#include <cstdio>
#include <iterator>
#include <set>

#include "cuda/launch_table.h"

namespace fastcoll::sim {

inline bool fits(Algorithm algorithm, Verb verb, DType dtype, bool ll, uint64_t part_bytes,
                 int world_size, int max_blocks) {
  const LaunchShape shape =
      shape_for(algorithm, verb, dtype, ll, part_bytes, world_size, max_blocks);
  return shape.blocks <= max_blocks &&
         shape_fits(shape, algorithm, verb, dtype, ll, part_bytes, world_size,
                    max_blocks < kMaxChannels ? max_blocks : kMaxChannels);
}

// Shapes that shape_for never chooses: a block, a thread, a pack or a tile too many, or too few.
inline bool refuses_the_rest() {
  constexpr uint64_t kBytes = 1 << 20, kLlMost = kLlPacks * kLlBytes;
  const auto staged = [](LaunchShape shape) {
    return shape_fits(shape, Algorithm::two_shot, Verb::all_reduce, DType::float32, false, kBytes,
                      2, kMaxChannels);
  };
  const auto by_ll = [](LaunchShape shape) {
    return shape_fits(shape, Algorithm::one_shot, Verb::all_reduce, DType::float32, true, kLlMost,
                      2, kMaxChannels);
  };
  // Six slots of two tiles in a half.
  constexpr uint32_t kMostTile =
      uint32_t(channel_half_bytes(kMaxChannels) / 12 / kPackBytes * kPackBytes);
  const bool takes = staged({kMaxChannels, kMaxBlockThreads, kMostTile}) && staged({1, 32, 16}) &&
                     by_ll({1, 32, 16}) && by_ll({kMaxLlChannels, kMaxBlockThreads, 16});
  return takes && !staged({0, 32, 16}) && !staged({kMaxChannels + 1, 32, 16}) &&
         !staged({1, 0, 16}) && !staged({1, kMaxBlockThreads + 1, 16}) && !staged({1, 32, 0}) &&
         !staged({1, 32, 24}) && !staged({1, 32, kMostTile + 16}) &&
         !by_ll({kMaxLlChannels + 1, 32, 16}) && !by_ll({0, 32, 16}) &&
         !shape_fits({1, 32, 16}, Algorithm::one_shot, Verb::all_reduce, DType::float32, true,
                     kLlMost + 1, 2, kMaxChannels);
}

// Whether a grid follows the bytes that a rank loads, up to the blocks that it may have.
inline bool follows_bytes(const LaunchShape& shape, uint64_t loaded_bytes, int max_blocks) {
  const uint64_t blocks = detail::clamp(detail::div_up(loaded_bytes, 8 << 10), 1, max_blocks);
  return uint64_t(shape.blocks) == blocks && shape.threads == kMaxBlockThreads;
}

inline bool has_enough_blocks() {
  constexpr int kMost = 32, kRanks = 8;
  const auto shape = [](Algorithm algorithm, Verb verb, uint64_t part_bytes, int world) {
    return shape_for(algorithm, verb, DType::float32, false, part_bytes, world, kMost);
  };
  bool right = true;
  for (const uint64_t bytes : {1024ull, 64ull << 10, 128ull << 10, 200ull << 10, 64ull << 20}) {
    const uint64_t part = bytes / kRanks;
    const auto follows = [&](Algorithm algorithm, Verb verb, uint64_t part_bytes) {
      return follows_bytes(shape(algorithm, verb, part_bytes, kRanks), bytes, kMost);
    };
    right = right && follows(Algorithm::two_shot, Verb::all_reduce, part) &&
            follows(Algorithm::one_shot, Verb::all_reduce, part) &&
            follows(Algorithm::direct, Verb::all_gather, part) &&
            follows(Algorithm::direct, Verb::all_to_all, part) &&
            follows(Algorithm::direct, Verb::broadcast, bytes) &&
            follows(Algorithm::chain, Verb::all_reduce, bytes);
  }
  // The check sees a grid by parts.
  return right && !follows_bytes({2, kMaxBlockThreads, 8 << 10}, 128 << 10, kMost);
}

// Ranks that ask for different shapes must not meet.
inline bool tells_shapes_apart() {
  const LaunchShape shapes[] = {{1, 32, 16}, {2, 32, 16}, {1, 64, 16}, {1, 32, 32}};
  std::set<uint32_t> hashes = {7, 8};
  for (const LaunchShape& shape : shapes)
    for (const uint32_t plan_hash : {7u, 8u}) hashes.insert(shaped_hash(plan_hash, shape));
  return hashes.size() == 2 + 2 * std::size(shapes);
}

inline int check_shapes() {
  for (int algorithm = 0; algorithm < kNumGpuAlgorithms; ++algorithm)
    for (int verb = 0; verb < kNumGpuVerbs; ++verb)
      for (const DType dtype : {DType::float32, DType::float16, DType::float8_e5m2})
        for (int world = 1; world <= kMaxGpuWorld; ++world)
          for (const int max_blocks : {1, 3, 16, 18, 32, 132})
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
  if (!refuses_the_rest() || !tells_shapes_apart() || !has_enough_blocks()) {
    std::fprintf(stderr, "WRONG shape: not refused, or refused, taken for another one, or few\n");
    return 1;
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace fastcoll::sim
