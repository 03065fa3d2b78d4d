// SPDX-License-Identifier: Apache-2.0
// What a rank's pad tells of its last calls: read by its peers, and from outside the group.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/atomics.h"
#include "plan.h"

namespace fastcoll {

// One entry of a status ring.
struct Operation {
  uint64_t call = 0;
  Plan plan;
  uint32_t stamp = 0;
  uint32_t end_segment = 0;    // low half of the `done` of a rank that is through with the call
  uint64_t wait_began_us = 0;  // CLOCK_MONOTONIC; both 0 if it did not wait long
  uint64_t wait_ended_us = 0;  // 0 while it waits
};

// Whoever reads a peer's words looks these up in tables.
inline bool has_names(const Plan& plan) {
  return int(plan.verb) < kNumGpuVerbs && int(plan.dtype) < kNumDTypes && int(plan.op) < kNumOps &&
         int(plan.algorithm) < kNumGpuAlgorithms;
}

// The entry if it holds this call, whole and readable.
template <class P>
std::optional<Operation> read_operation(const Descriptor& entry, uint64_t call) {
  if (P::load_acquire(entry.sequence) != 2 * call) return std::nullopt;
  PlanWords words;
  words.kinds = P::load_acquire(entry.words[0]);
  words.numel = P::load_acquire(entry.words[1]);
  words.root_and_segment = P::load_acquire(entry.words[2]);
  const uint64_t stamp_and_end = P::load_acquire(entry.words[3]);
  words.splits = P::load_acquire(entry.words[4]);
  Operation operation;
  operation.call = call;
  operation.plan = plan_from_words(words);
  if (!has_names(operation.plan)) return std::nullopt;
  operation.stamp = uint32_t(stamp_and_end >> 32);
  operation.end_segment = uint32_t(stamp_and_end);
  if (P::load_acquire(entry.timed_call) == call) {
    operation.wait_began_us = P::load_acquire(entry.wait_began_us);
    operation.wait_ended_us = P::load_acquire(entry.wait_ended_us);
  }
  if (P::load_acquire(entry.sequence) != 2 * call) return std::nullopt;  // it changed meanwhile
  return operation;
}

// All whole entries, oldest first.
template <class P>
std::vector<Operation> read_operations(const Pad& pad) {
  std::vector<Operation> all;
  for (const Descriptor& entry : pad.ring) {
    const uint64_t sequence = P::load_acquire(entry.sequence);
    if (sequence == 0 || sequence % 2 != 0) continue;
    if (const auto operation = read_operation<P>(entry, sequence / 2)) all.push_back(*operation);
  }
  std::sort(all.begin(), all.end(),
            [](const Operation& a, const Operation& b) { return a.call < b.call; });
  return all;
}

}  // namespace fastcoll
