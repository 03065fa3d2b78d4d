// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process, and the programs that run them as shipped or with a bug.
// Such programs have the standard headers below from here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "planted.h"
#include "require.h"
#include "words.h"

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;

inline Memory zeroed_pages(size_t num_bytes) {
  void* memory = std::aligned_alloc(4096, num_bytes);
  return Memory(static_cast<std::byte*>(std::memset(memory, 0, num_bytes)));
}

// By rank, where all regions lie in one block: see word_of().
inline std::vector<std::byte*> regions_in(const Memory& memory, int world_size,
                                          size_t region_bytes) {
  std::vector<std::byte*> regions;
  for (size_t rank = 0; rank < size_t(world_size); ++rank)
    regions.push_back(memory.get() + rank * region_bytes);
  return regions;
}

// Pieces of memory, each by itself, so that AddressSanitizer sees an access behind one.
class Pieces {
 public:
  Pieces(int count, size_t num_bytes) {
    for (int i = 0; i < count; ++i)
      bases.push_back(memory_.emplace_back(zeroed_pages(num_bytes)).get());
  }
  std::vector<std::byte*> bases;

 private:
  std::vector<Memory> memory_;
};

inline fastcoll::GroupOptions options_of(int rank, const std::vector<std::byte*>& regions,
                                         double timeout_s) {
  fastcoll::GroupOptions options;
  options.rank = rank;
  options.world_size = int(regions.size());
  options.name = "threads";
  options.timeout_s = timeout_s;
  std::copy(regions.begin(), regions.end(), options.regions.begin());
  return options;
}

inline fastcoll::Arena arena_of(const std::vector<std::byte*>& bases, size_t num_bytes) {
  fastcoll::Arena arena;
  arena.num_bytes = num_bytes;
  std::copy(bases.begin(), bases.end(), arena.bases.begin());
  return arena;
}

inline void run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(body, rank);
}

// Calls `run` with the policy as shipped, or with the one that has the bug of this name.
template <class Run>
int run_variant(const std::string& name, const Run& run) {
  if (name == "correct") return run(fastcoll::StdAtomics{});
  if (planted::plant(name)) return run(planted::Atomics{});
  std::fprintf(stderr, "unknown variant %s\n", name.c_str());
  return 2;
}

// VARIANT [num_seeds [timeout_s [first]]]
template <class Run>
int run_stress(int argc, char** argv, const Run& run) {
  const uint64_t num_seeds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20;
  const double timeout_s = argc > 3 ? std::strtod(argv[3], nullptr) : 60;
  const uint64_t first = argc > 4 ? std::strtoull(argv[4], nullptr, 0) : 0;
  return run_variant(argc > 1 ? argv[1] : "correct",
                     [&](auto policy) { return run(policy, num_seeds, timeout_s, first); });
}
