// SPDX-License-Identifier: Apache-2.0
// A competitor that needs no second process: all_reduce of float32 as serving engines do it, by one
// stage and by two. The shape is the published one, of vLLM's custom_all_reduce and FlashInfer's
// vllm_ar. Inputs are registered with all ranks. A block meets the same block of every peer by one
// flag each. Then each thread adds packs of all ranks. These kernels have no limit, no error and no
// check of what the peers call.
#pragma once

#include "prim.cuh"

namespace fastcoll {

inline constexpr int kPublishedBlocks = 36, kPublishedThreads = 512;
inline constexpr int kPublishedMeetings = 2;  // of a call at most

struct PublishedCall {
  std::byte* inputs[kMaxGpuWorld];  // every rank's message, whole packs
  std::byte* sums[kMaxGpuWorld];    // two stages: every rank's sum of its own part
  uint64_t* flags[kMaxGpuWorld];    // every rank's words, zeroed: block, meeting, source
  uint64_t* epochs;                 // this rank's calls so far, by block: kept by the kernel
  std::byte* output;                // this rank's own
  uint64_t num_packs;
  int32_t rank, world_size;

  static constexpr size_t num_flags(int blocks) {
    return size_t(blocks) * kPublishedMeetings * kMaxGpuWorld;
  }
};

// The same block on every rank sees the earlier writes of this block's threads.
FASTCOLL_DEVICE void meet_published(const PublishedCall& call, int meeting, uint64_t epoch) {
  const auto word = [&](int owner, int source) {
    return call.flags[owner] +
           (size_t(block_idx()) * kPublishedMeetings + size_t(meeting)) * kMaxGpuWorld + source;
  };
  sync_block();
  if (const auto peer = int(thread_idx()); peer < call.world_size) {
    store_release(word(peer, call.rank), epoch);
    for (uint64_t seen; (seen = load_acquire(word(call.rank, peer))) < epoch;)
      spin(peer, Phase::arrival, epoch, seen);
  }
  sync_block();
}

FASTCOLL_DEVICE Pack add_published(const PublishedCall& call, uint64_t at_bytes) {
  Pack total = load_data<Pack>(call.inputs[0] + at_bytes);
  for (int rank = 1; rank < call.world_size; ++rank) {
    const Pack one = load_data<Pack>(call.inputs[rank] + at_bytes);
    for (int i = 0; i < 4; ++i) {
      const float sum =
          __builtin_bit_cast(float, total.words[i]) + __builtin_bit_cast(float, one.words[i]);
      total.words[i] = __builtin_bit_cast(uint32_t, sum);
    }
  }
  return total;
}

// Every rank adds all of the message.
FASTCOLL_DEVICE void published_one_stage(const PublishedCall& call) {
  const uint64_t epoch = call.epochs[block_idx()] + 1;
  const uint64_t stride = uint64_t{num_blocks()} * num_threads();
  meet_published(call, 0, epoch);
  for (uint64_t i = uint64_t{block_idx()} * num_threads() + thread_idx(); i < call.num_packs;
       i += stride)
    store_data(call.output + i * kPackBytes, add_published(call, i * kPackBytes));
  meet_published(call, 1, epoch);  // the inputs are their owners' again
  if (thread_idx() == 0) call.epochs[block_idx()] = epoch;
}

// Every rank adds its part, the last one the rest as well; then it copies all sums.
template <bool kMeets = true>
FASTCOLL_DEVICE void published_two_stage(const PublishedCall& call) {
  const uint64_t epoch = call.epochs[block_idx()] + 1;
  const uint64_t stride = uint64_t{num_blocks()} * num_threads();
  const uint64_t first = uint64_t{block_idx()} * num_threads() + thread_idx();
  const uint64_t part = call.num_packs / uint64_t(call.world_size);
  const auto length = [&](int rank) {
    return rank == call.world_size - 1 ? call.num_packs - part * uint64_t(rank) : part;
  };
  meet_published(call, 0, epoch);
  const uint64_t mine = part * uint64_t(call.rank);
  for (uint64_t i = first; i < length(call.rank); i += stride)
    store_data(call.sums[call.rank] + i * kPackBytes, add_published(call, (mine + i) * kPackBytes));
  if constexpr (kMeets) meet_published(call, 1, epoch);
  for (int rank = 0; rank < call.world_size; ++rank)
    for (uint64_t i = first; i < length(rank); i += stride)
      store_data(call.output + (part * uint64_t(rank) + i) * kPackBytes,
                 load_data<Pack>(call.sums[rank] + i * kPackBytes));
  if (thread_idx() == 0) call.epochs[block_idx()] = epoch;
}

}  // namespace fastcoll
