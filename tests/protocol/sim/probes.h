// SPDX-License-Identifier: Apache-2.0
// The kernels that try out mappings. They must accept right ones, and find a rank whose mapping of
// one region is other memory, by every kind of access.
#pragma once

#include <cstdio>

#include "cuda/probe.cuh"
#include "draw.h"

namespace fastcoll::sim {

// misled: the rank whose mapping of `astray`'s region is wrong, or -1. Returns by rank the answers
// of each kernel.
struct Seen {
  uint32_t got[kMaxGpuWorld], reduced[kMaxGpuWorld], stored[kMaxGpuWorld];
};
inline std::vector<Seen> probe_all(int world, int misled, int astray, uint64_t token) {
  // Regions as far as the probes go, and one that no rank owns.
  using Region = std::vector<Pack>;
  const size_t packs = probe_stored_offset(kMaxGpuWorld) / kPackBytes;
  std::vector<Region> regions(size_t(world) + 1, Region(packs));
  std::vector<Seen> seen(size_t(world), Seen{});
  Simulator simulator(world, Schedule::uniform, token);
  const auto step = [&](void (*kernel)(const ProbeCall&), uint32_t (Seen::*out)[kMaxGpuWorld]) {
    for (int rank = 0; rank < world; ++rank) {
      ProbeCall call{};
      for (int peer = 0; peer < world; ++peer)
        call.regions[peer] = reinterpret_cast<std::byte*>(
            regions[size_t(rank == misled && peer == astray ? world : peer)].data());
      call.token = token;
      call.rank = rank;
      call.world_size = world;
      call.seen = out == nullptr ? nullptr : seen[size_t(rank)].*out;
      simulator.enqueue(rank, {1, kMaxGpuWorld, [=] { kernel(call); }});
    }
    return simulator.run();  // the host waits, and all ranks meet
  };
  const bool ran = step(probe_put_kernel, nullptr) && step(probe_get_kernel, &Seen::got) &&
                   step(probe_operands_kernel, nullptr) &&
                   step(probe_reduce_kernel, &Seen::reduced) &&
                   step(probe_stored_kernel, &Seen::stored);
  if (!ran) std::exit(1);
  return seen;
}

inline int run_probes(uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    const int world = 2 + int(pick(random, kMaxGpuWorld - 1));
    const bool is_right = pick(random, 4) == 0;
    const int misled = is_right ? -1 : int(pick(random, uint64_t(world)));
    const int astray = (misled + 1 + int(pick(random, uint64_t(world) - 1))) % world;
    const std::vector<Seen> seen = probe_all(world, misled, astray, random());
    bool as_expected = true;
    for (int rank = 0; rank < world; ++rank) {
      const Seen& mine = seen[size_t(rank)];
      for (int type = 0; type < kProbeTypes; ++type) {
        const uint32_t all = type < 3 ? kProbeOfFloats : kProbeOfIntegers;
        as_expected = as_expected && (mine.reduced[type] == all) == (rank != misled);
      }
      for (int peer = 0; peer < world; ++peer) {
        // The misled rank reads elsewhere, and its writes do not arrive.
        const uint32_t pushed = rank == astray && peer == misled ? 0 : 1;
        const uint32_t pulled = rank == misled && peer == astray ? 0 : 2;
        as_expected =
            as_expected && mine.got[peer] == (pushed | pulled) && mine.stored[peer] == pushed;
      }
    }
    if (!as_expected)
      std::fprintf(stderr, "%d ranks, rank %d is misled about rank %d\n", world, misled, astray);
    return as_expected;
  });
}

}  // namespace fastcoll::sim
