// SPDX-License-Identifier: Apache-2.0
// The competitor's kernels of bench/gpu, which must add right before they are timed beside ours.
#pragma once

#include <cstdio>

#include "draw.h"
#include "published.cuh"

namespace fastcoll::sim {

// Ranks with registered inputs, which make several calls one after another.
class Published {
 public:
  static constexpr int kCalls = 3;
  static constexpr uint64_t kMostPacks = 40;

  explicit Published(Random& random)
      : random_(random),
        world_(1 + int(pick(random, 8))),
        blocks_(1 + int(pick(random, 3))),
        threads_(world_ + int(pick(random, 5))),
        inputs_(size_t(world_), Packs(kMostPacks)),
        sums_(inputs_),
        outputs_(inputs_),
        flags_(size_t(world_), std::vector<uint64_t>(PublishedCall::num_flags(blocks_))),
        epochs_(size_t(world_), std::vector<uint64_t>(size_t(blocks_))) {}

  // Whether every rank has the sums in the order of ranks, of every call.
  bool go(void (*kernel)(const PublishedCall&)) {
    Simulator simulator(world_, Schedule::uniform, random_());
    bool is_right = true;
    for (int number = 0; number < kCalls; ++number) {
      const uint64_t num_packs = 1 + pick(random_, kMostPacks);
      const uint64_t seed = random_();
      for (int rank = 0; rank < world_; ++rank) {
        const PublishedCall call = call_of(rank, num_packs);
        simulator.enqueue(rank, {1, 1, [=, this] { fill(rank, seed, num_packs); }});
        simulator.enqueue(rank, {blocks_, threads_, [=] { kernel(call); }});
        simulator.enqueue(rank, {1, 1, [=, this, &is_right] {
                                   if (!has_sums(rank, seed, num_packs)) is_right = false;
                                 }});
      }
    }
    return simulator.run() && is_right;
  }

 private:
  using Packs = std::vector<Pack>;
  static std::byte* bytes(Packs& packs) { return reinterpret_cast<std::byte*>(packs.data()); }

  PublishedCall call_of(int rank, uint64_t num_packs) {
    PublishedCall call{};
    for (int peer = 0; peer < world_; ++peer) {
      call.inputs[peer] = bytes(inputs_[size_t(peer)]);
      call.sums[peer] = bytes(sums_[size_t(peer)]);
      call.flags[peer] = flags_[size_t(peer)].data();
    }
    call.epochs = epochs_[size_t(rank)].data();
    call.output = bytes(outputs_[size_t(rank)]);
    call.num_packs = num_packs;
    call.rank = rank;
    call.world_size = world_;
    return call;
  }

  // Numbers whose sums depend on the order.
  static float value(int rank, uint64_t seed, uint64_t i) {
    return float(mix64(seed + i * kMaxGpuWorld + uint64_t(rank)) >> 40) / 3.0f;
  }
  void fill(int rank, uint64_t seed, uint64_t num_packs) {
    for (uint64_t i = 0; i < 4 * num_packs; ++i)
      store_data(bytes(inputs_[size_t(rank)]) + 4 * i, value(rank, seed, i));
    for (uint64_t i = 0; i < 4 * num_packs; ++i)
      store_data(bytes(outputs_[size_t(rank)]) + 4 * i, -1.0f);
  }
  bool has_sums(int rank, uint64_t seed, uint64_t num_packs) {
    for (uint64_t i = 0; i < 4 * num_packs; ++i) {
      float sum = value(0, seed, i);
      for (int peer = 1; peer < world_; ++peer) sum += value(peer, seed, i);
      if (load_data<float>(bytes(outputs_[size_t(rank)]) + 4 * i) != sum) return false;
    }
    return true;
  }

  Random& random_;
  const int world_, blocks_, threads_;
  std::vector<Packs> inputs_, sums_, outputs_;
  std::vector<std::vector<uint64_t>> flags_, epochs_;
};

inline int run_published(uint64_t num_seeds, bool meets) {
  const auto two_stage = meets ? published_two_stage<true> : published_two_stage<false>;
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    Published published(random);
    return published.go(published_one_stage) && published.go(two_stage);
  });
}

}  // namespace fastcoll::sim
