// SPDX-License-Identifier: Apache-2.0
// The random calls of test_protocol, and the elements that each rank gives in them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "layout.h"
#include "plan.h"
#include "stamp.h"

namespace steps {

using namespace fastcoll;

struct Step {
  Plan plan;
  uint64_t salt;
  std::vector<uint64_t> numels = {};  // of each rank's part, where they differ and all know them
};

inline size_t num_input_parts(Verb verb, int world_size) {
  const bool many =
      verb == Verb::reduce_scatter || verb == Verb::scatter || verb == Verb::all_to_all;
  return many ? size_t(world_size) : 1;
}
inline size_t num_output_parts(Verb verb, int world_size) {
  const bool many = verb == Verb::all_gather || verb == Verb::gather || verb == Verb::all_to_all;
  return many ? size_t(world_size) : 1;
}

// The message, cut into tensors: the same on every rank.
inline std::vector<TensorSize> sizes_of_list(uint64_t salt, uint64_t numel) {
  std::vector<TensorSize> sizes;
  for (uint64_t at = 0; at < numel; at += sizes.back().numel)
    sizes.push_back({DType::int32, std::min(numel - at, 1 + mix64(salt + at) % (numel / 3 + 1))});
  return sizes;
}

inline Step draw_step(std::mt19937_64& random, int world_size) {
  const auto pick = [&](uint64_t n) { return random() % n; };
  Plan plan;
  // Verbs in which some rank does not wait are the ones after which reuse goes wrong.
  constexpr Verb kSomeWait[] = {Verb::broadcast, Verb::gather, Verb::scatter, Verb::reduce};
  plan.verb = pick(3) == 0 ? kSomeWait[pick(4)] : Verb(pick(kNumVerbs));
  plan.dtype = DType::int32;
  plan.op = Op::sum;
  plan.segment_bytes = uint32_t(pick(4) ? kLeastSegmentBytes : kSlotBytes);
  plan.root = verb_has_root(plan.verb) ? int(pick(uint64_t(world_size))) : 0;
  constexpr uint64_t kMost[] = {4, 100, 2000, 20000, 100000};
  plan.numel = plan.verb == Verb::barrier ? 0 : pick(kMost[pick(5)]);
  const bool reduces = verb_reduces(plan.verb);
  const size_t num_parts = num_input_parts(plan.verb, world_size);
  plan.numel /= num_parts;
  const size_t staged_bytes = plan.numel * 4 * num_parts;
  plan.algorithm = reduces ? Algorithm(pick(plan.verb == Verb::reduce ? 2 : 4)) : Algorithm::direct;
  plan.inlined = staged_bytes <= kInlineMaxBytes && pick(3) != 0 &&
                 (!reduces || plan.algorithm == Algorithm::one_shot);
  if (plan.verb == Verb::barrier) plan.inlined = true;
  if (!reduces && !plan.inlined && pick(2)) plan.algorithm = Algorithm::single_copy;
  if (plan.verb == Verb::all_to_all && !plan.inlined && pick(2)) {  // numel: the most of a part
    plan.splits = kCountedSplits;
    plan.inlined = false;
  }
  const uint64_t salt = random();
  const bool takes_lists = plan.verb == Verb::all_gather || plan.verb == Verb::all_reduce ||
                           plan.verb == Verb::reduce_scatter;
  if (takes_lists && plan.algorithm != Algorithm::ring && plan.algorithm != Algorithm::chain &&
      plan.numel != 0 && pick(2))
    plan.splits = list_splits(sizes_of_list(salt, plan.numel), plan.dtype);
  std::vector<uint64_t> numels;
  if (plan.verb == Verb::all_gather && !plan.inlined && plan.splits == 0 && pick(2)) {
    const uint64_t most = plan.numel / uint64_t(world_size) + 1;
    for (int rank = 0; rank < world_size; ++rank) numels.push_back(pick(most));
    plan.numel = std::accumulate(numels.begin(), numels.end(), uint64_t{0});
    plan.splits = uneven_splits(numels);
  }
  const bool may_be_scheduled = plan.verb == Verb::all_reduce || verb_has_root(plan.verb);
  if (may_be_scheduled && !plan.inlined && plan.splits == 0 && pick(3) == 0)
    plan.algorithm = Algorithm::schedule;
  if (reduces && plan.splits == 0 && pick(3) == 0) {
    plan.op = pick(2) ? Op::avg : Op::max;
    if (plan.op == Op::avg) plan.dtype = DType::float32;
  }
  return {make_plan(plan), salt, numels};
}

// Elements that one rank gives another in an all_to_all, or in an all_gather of unequal parts.
inline size_t part_numel(const Step& step, int from, int to) {
  if (!step.numels.empty()) return step.numels[size_t(from)];
  if (step.plan.splits != kCountedSplits) return step.plan.numel;
  return mix64(step.salt + uint64_t(from) * 64 + uint64_t(to)) % (step.plan.numel + 1);
}

inline int32_t value_of(uint64_t salt, int rank, size_t i) {
  return int32_t(mix64(salt + uint64_t(rank) * 1000003 + i));
}

// Of an average: its values are small enough that every sum of them is exact.
inline float float_of(uint64_t salt, int rank, size_t i) {
  return float(value_of(salt, rank, i) & 0xfff);
}
inline bool is_average(const Step& step) { return step.plan.op == Op::avg; }

}  // namespace steps
