// SPDX-License-Identifier: Apache-2.0
// A call of every rank, drawn from a seed: the verb, the shape of its launch, and the places of its
// tensors. The expected output is by tests/protocol/native/reduce_reference.h. Knows no kernel.
#pragma once

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "../native/reduce_data.h"
#include "cuda/launch_table.h"
#include "stamp.h"

namespace fastcoll::sim {

using reference::Codes;
using Random = std::mt19937_64;

inline uint64_t pick(Random& random, uint64_t n) { return random() % n; }

// Makes a check with each seed, up to the first one that it fails with. Returns the exit code.
template <class Check>
int check_seeds(uint64_t num_seeds, const Check& check) {
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    Random random(seed);
    if (check(random, seed)) continue;
    std::fprintf(stderr, "WRONG: seed %d\n", int(seed));
    return 1;
  }
  std::printf("ok: %d seeds\n", int(num_seeds));
  return 0;
}

struct Placement {  // of one rank's tensors
  bool symmetric_input, symmetric_output;
  bool in_place;
  size_t input_shift_bytes, output_shift_bytes;  // from a pack
  bool input_apart, output_apart;  // parts that do not lie end to end; then nothing is symmetric
};

struct Step {
  Algorithm algorithm = Algorithm::one_shot;
  Verb verb = Verb::all_reduce;
  DType dtype = DType::float32;
  Op op = Op::sum;
  bool ll = false;
  uint64_t numel = 0;
  int root = 0;
  uint32_t tile_bytes = 16;
  int blocks = 1, threads = 8;
  std::vector<Placement> places;  // by rank
  std::vector<Codes> inputs;
  // all_to_all, all_gather: elements from one rank to another, unless all are numel.
  std::vector<std::vector<uint64_t>> splits;
  bool even = true;

  int world() const { return int(places.size()); }
  size_t elem_bytes() const { return dtype_size(dtype); }
  bool reduces() const {
    return verb == Verb::all_reduce || verb == Verb::reduce_scatter || verb == Verb::reduce;
  }
  // Of a verb that cuts this side.
  std::vector<uint64_t> part_numels(int rank, bool gives) const {
    std::vector<uint64_t> numels;
    for (size_t peer = 0; peer < places.size(); ++peer)
      numels.push_back(even    ? numel
                       : gives ? splits[size_t(rank)][peer]
                               : splits[peer][size_t(rank)]);
    return numels;
  }
  uint32_t plan_hash() const {
    uint64_t hash = mix64(uint64_t(algorithm) | uint64_t(verb) << 8 | uint64_t(dtype) << 16 |
                          uint64_t(op) << 24 | uint64_t(ll) << 32);
    for (const uint64_t field : {numel, uint64_t(root), uint64_t(tile_bytes), uint64_t(blocks)})
      hash = mix64(hash + field);
    return uint32_t(hash);
  }
  std::string name() const {
    return std::string(algorithm_name(algorithm)) + (ll ? " ll " : " ") + verb_name(verb) + "(" +
           op_name(op) + ", " + dtype_name(dtype) + ", numel=" + std::to_string(numel) +
           ", root=" + std::to_string(root) + "), " + std::to_string(world()) + " ranks, " +
           std::to_string(blocks) + " blocks of " + std::to_string(threads) + ", tiles of " +
           std::to_string(tile_bytes) + " bytes";
  }
};

// Of a rank that gives each rank as much, or gets as much from each.
inline std::vector<std::vector<uint64_t>> even_splits(const Step& step) {
  const auto world = size_t(step.world());
  return std::vector(world, std::vector<uint64_t>(world, step.numel));
}

// Elements that a rank puts in and gets out.
inline uint64_t input_numel(const Step& step, int rank) {
  switch (step.verb) {
    case Verb::reduce_scatter:
      return step.numel * uint64_t(step.world());
    case Verb::scatter:
      return rank == step.root ? step.numel * uint64_t(step.world()) : 0;
    case Verb::broadcast:
      return rank == step.root ? step.numel : 0;
    case Verb::barrier:
      return 0;
    case Verb::all_gather:
      return step.even ? step.numel : step.splits[size_t(rank)][0];
    case Verb::all_to_all: {
      uint64_t sum = 0;
      for (const uint64_t count : step.splits[size_t(rank)]) sum += count;
      return sum;
    }
    default:
      return step.numel;
  }
}

inline void draw_inputs(Random& random, Step& step) {
  step.inputs.clear();
  for (int rank = 0; rank < step.world(); ++rank)
    step.inputs.push_back(reference::random_codes(step.dtype, input_numel(step, rank), random));
}

inline uint64_t output_numel(const Step& step, int rank) {
  switch (step.verb) {
    case Verb::gather:
      return rank == step.root ? step.numel * uint64_t(step.world()) : 0;
    case Verb::reduce:
      return rank == step.root ? step.numel : 0;
    case Verb::barrier:
      return 0;
    case Verb::all_gather:
      if (step.even) return step.numel * uint64_t(step.world());
      [[fallthrough]];
    case Verb::all_to_all: {
      uint64_t sum = 0;
      for (const auto& row : step.splits) sum += row[size_t(rank)];
      return sum;
    }
    default:
      return step.numel;
  }
}

// Which rank reduces element i first, when the order depends on the chunk (ring).
inline int first_rank(const Step& step, uint64_t i) {
  if (step.algorithm != Algorithm::ring) return 0;
  const uint64_t world = uint64_t(step.world());
  const uint64_t chunk = step.verb == Verb::reduce_scatter
                             ? i / step.numel
                             : i * step.elem_bytes() / step.tile_bytes % world;
  return int((chunk + 1) % world);
}

inline uint64_t reduced(const Step& step, uint64_t i) {
  Codes codes;
  for (int s = 0; s < step.world(); ++s)
    codes.push_back(step.inputs[size_t((first_rank(step, i) + s) % step.world())][i]);
  return reference::reference(step.dtype, step.op, codes, step.world());
}

inline Codes expected_output(const Step& step, int rank) {
  Codes out;
  const uint64_t numel = output_numel(step, rank);
  const auto append = [&](int from, uint64_t start, uint64_t count) {
    const Codes& codes = step.inputs[size_t(from)];
    out.insert(out.end(), codes.begin() + long(start), codes.begin() + long(start + count));
  };
  switch (step.verb) {
    case Verb::all_reduce:
    case Verb::reduce:
      for (uint64_t i = 0; i < numel; ++i) out.push_back(reduced(step, i));
      break;
    case Verb::reduce_scatter:
      for (uint64_t i = 0; i < numel; ++i)
        out.push_back(reduced(step, uint64_t(rank) * step.numel + i));
      break;
    case Verb::all_gather:
    case Verb::gather:
      for (int from = 0; from < step.world() && numel > 0; ++from)
        append(from, 0, input_numel(step, from));
      break;
    case Verb::broadcast:
      append(step.root, 0, numel);
      break;
    case Verb::scatter:
      append(step.root, uint64_t(rank) * step.numel, step.numel);
      break;
    case Verb::all_to_all:
      for (int from = 0; from < step.world(); ++from) {
        uint64_t start = 0;
        for (int to = 0; to < rank; ++to) start += step.splits[size_t(from)][size_t(to)];
        append(from, start, step.splits[size_t(from)][size_t(rank)]);
      }
      break;
    default:
      break;
  }
  return out;
}

}  // namespace fastcoll::sim
