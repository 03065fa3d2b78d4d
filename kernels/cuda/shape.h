// SPDX-License-Identifier: Apache-2.0
// The blocks, threads and tiles of a call: pure functions of facts that are equal on all ranks. The
// constants are first guesses; bench/gpu measures them.
#pragma once

#include "cuda/call.h"
#include "stamp.h"

namespace fastcoll {

struct LaunchShape {
  int blocks;           // channels; 1 to kMaxChannels
  int threads;          // of a block
  uint32_t tile_bytes;  // of one rank's part, in one segment and one channel: whole packs
};

// A slot of scratch is filled again kSlots iterations later, when its readers are at most two steps
// of kLag iterations from done (see cuda/pipeline.cuh).
inline constexpr uint32_t kLag = 2;
inline constexpr uint32_t kSlots = 3 * kLag;

// Whether a message is cut into a part for each rank, rather than read as a whole by all ranks.
constexpr bool splits_message(Algorithm algorithm, Verb verb) {
  return verb == Verb::reduce_scatter || verb == Verb::all_to_all || verb == Verb::scatter ||
         (verb == Verb::all_reduce &&
          (algorithm == Algorithm::two_shot || algorithm == Algorithm::ring ||
           algorithm == Algorithm::multimem));
}

// Scratch that one segment takes in a channel, in tiles. The accumulators of a tile take
// partial_tiles (2 for half floats).
constexpr uint32_t slot_tiles(Algorithm algorithm, Verb verb, uint32_t partial_tiles,
                              int world_size) {
  const uint32_t steps = uint32_t(world_size) - 1;
  if (algorithm == Algorithm::chain) return partial_tiles + 1;
  if (algorithm == Algorithm::ring)
    return steps * (partial_tiles + (verb == Verb::all_reduce ? 1 : 0));
  const bool pushes_all = algorithm == Algorithm::multimem && verb == Verb::all_gather;
  return pushes_all || splits_message(algorithm, verb) ? uint32_t(world_size) : 1;
}

// The largest message that LL packs may carry: num_bytes goes from one rank to another.
constexpr uint64_t max_ll_bytes(int max_blocks) {
  return uint64_t(max_blocks < kMaxLlChannels ? max_blocks : kMaxLlChannels) * kLlPacks * kLlBytes;
}

namespace detail {
constexpr uint64_t div_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint64_t clamp(uint64_t value, uint64_t least, uint64_t most) {
  return value < least ? least : value > most ? most : value;
}
}  // namespace detail

// Parts of part_bytes that a rank loads in one step: all ranks', or all of its own message.
constexpr uint64_t parts_loaded(Algorithm algorithm, Verb verb, int world_size) {
  const bool alone = verb == Verb::broadcast || verb == Verb::send || verb == Verb::recv ||
                     (algorithm == Algorithm::chain && verb != Verb::reduce_scatter);
  return alone ? 1 : uint64_t(world_size);
}

// part_bytes: the bytes of one rank's part where the message is split, else of the whole. For LL
// they are the bytes from one rank to another. All ranks have agreed on max_blocks, the most that
// may be resident, and regions are laid out for so many. The blocks of a send or recv are its
// pair_channels.
constexpr LaunchShape shape_for(Algorithm algorithm, Verb verb, DType dtype, bool ll,
                                uint64_t part_bytes, int world_size, int max_blocks) {
  using detail::clamp, detail::div_up;
  constexpr uint64_t kPacksPerLlBlock = 128;     // one pack a thread: latency is all that counts
  constexpr uint64_t kBytesPerBlock = 8 << 10;   // one pack a thread
  constexpr uint64_t kMostTileBytes = 32 << 10;  // more does not hide more latency
  const bool pair = verb == Verb::send || verb == Verb::recv;
  const uint64_t most_blocks = clamp(uint64_t(max_blocks), 1, pair ? kPairChannels : kMaxChannels);
  const uint64_t half_bytes = pair ? kPairHalfBytes : channel_half_bytes(int(most_blocks));
  if (ll) {
    static_assert(kLlPacks <= kMaxBlockThreads, "a thread has one pack, which it loads ahead");
    const uint64_t packs = div_up(part_bytes, kLlBytes);
    const uint64_t most = most_blocks < kMaxLlChannels ? most_blocks : kMaxLlChannels;
    const uint64_t blocks = clamp(div_up(packs, kPacksPerLlBlock), 1, most);
    const uint64_t threads = clamp(div_up(div_up(packs, blocks), 32) * 32, 32, kMaxBlockThreads);
    return {int(blocks), int(threads), kPackBytes};
  }
  const uint32_t partial_tiles = uint32_t(accumulator_size(dtype) / dtype_size(dtype));
  const uint64_t tiles = slot_tiles(algorithm, verb, partial_tiles, world_size);
  const uint64_t room = half_bytes / kSlots / (tiles > 0 ? tiles : 1) / kPackBytes * kPackBytes;
  const uint64_t most_tile = room < kMostTileBytes ? room : kMostTileBytes;
  // Of each part: a block loads kBytesPerBlock of all parts.
  const uint64_t share = div_up(kBytesPerBlock, parts_loaded(algorithm, verb, world_size));
  const uint64_t blocks = clamp(div_up(part_bytes, share), 1, most_blocks);
  const uint64_t segments = clamp(div_up(part_bytes, blocks * most_tile), 1, ~uint64_t{0});
  // Equal segments rather than full ones and a small rest.
  const uint64_t tile = div_up(div_up(part_bytes, blocks * segments), kPackBytes) * kPackBytes;
  return {int(blocks), kMaxBlockThreads, uint32_t(clamp(tile, kPackBytes, most_tile))};
}

// Whether a call of such a shape has room in the memory of its channels. For shapes other than
// shape_for's, which always have. The part_bytes are as for shape_for.
constexpr bool shape_fits(const LaunchShape& shape, Algorithm algorithm, Verb verb, DType dtype,
                          bool ll, uint64_t part_bytes, int world_size, int max_blocks) {
  using detail::div_up;
  const bool pair = verb == Verb::send || verb == Verb::recv;
  const int most_blocks = pair ? kPairChannels : ll ? kMaxLlChannels : max_blocks;
  if (shape.blocks < 1 || shape.blocks > most_blocks) return false;
  if (shape.threads < 32 || shape.threads > kMaxBlockThreads) return false;
  const auto blocks = uint64_t(shape.blocks);
  if (ll) return div_up(div_up(part_bytes, kLlBytes), blocks) <= uint64_t{kLlPacks};
  if (shape.tile_bytes < kPackBytes || shape.tile_bytes % kPackBytes != 0) return false;
  const uint32_t partial_tiles = uint32_t(accumulator_size(dtype) / dtype_size(dtype));
  const uint64_t slot_bytes =
      uint64_t{slot_tiles(algorithm, verb, partial_tiles, world_size)} * shape.tile_bytes;
  // Steps have 32 bits in a progress word, of which the highest says that all are done.
  const uint64_t steps = part_bytes / (blocks * shape.tile_bytes) + uint64_t(2 * world_size) * kLag;
  return kSlots * slot_bytes <= (pair ? kPairHalfBytes : channel_half_bytes(max_blocks)) &&
         steps < (uint64_t{1} << 31);
}

// The hash of a plan that is launched in such a shape: ranks with different shapes get different
// stamps.
constexpr uint32_t shaped_hash(uint32_t plan_hash, const LaunchShape& shape) {
  const uint64_t grid = uint64_t(shape.blocks) << 32 | uint64_t(shape.threads);
  return uint32_t(mix64(mix64(uint64_t{plan_hash} << 32 | shape.tile_bytes) + grid));
}

}  // namespace fastcoll
