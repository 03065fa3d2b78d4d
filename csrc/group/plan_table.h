// SPDX-License-Identifier: Apache-2.0
// The known plans of a group's calls, by the facts of a call. Guarded by the GIL.
//
// Choosing is in Python, where it can be read and tested; it happens once per kind of call. The
// plan then sits here, so the path that is taken a million times a second is C++ throughout.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <optional>

#include "plan.h"

namespace fastcoll {

// The program's choices for one call; 0: left to the group.
struct CallOptions {
  uint8_t algorithm = 0;  // 1 + Algorithm
  uint8_t numerics = 0;   // 1: same_bits, 2: fast
  auto operator<=>(const CallOptions&) const = default;
};

// The choices of calls that have this plan; `fast`: the numerics, if they ask for some.
inline CallOptions call_options(const Plan& plan, bool asks_algorithm, std::optional<bool> fast) {
  return {uint8_t(asks_algorithm ? 1 + int(plan.algorithm) : 0),
          uint8_t(fast ? 1 + int(*fast) : 0)};
}

class PlanTable {
 public:
  struct Key {
    Verb verb;
    DType dtype;
    Op op;
    int root;
    CallOptions options;
    uint64_t splits;
    uint64_t numel;
    auto operator<=>(const Key&) const = default;
  };

  // Null if it is not known; lives until the next one is looked for.
  const Plan* find(const Key& key) {
    const uint64_t kinds = kinds_of(key);
    Recent& recent = recent_[place(key, kinds)];
    if (recent.kinds == kinds && recent.plan.numel == key.numel && recent.plan.splits == key.splits)
        [[likely]]
      return &recent.plan;
    return find_slowly(key, recent);
  }

  // The plan of calls of `least` to `most` elements, in parts of any sizes: these plans differ in
  // nothing else.
  void add(const Plan& plan, CallOptions options, uint64_t least, uint64_t most) {
    constexpr size_t kMost = size_t{1} << 16;  // a program of ever new sizes must not grow for ever
    if (plans_.size() >= kMost) plans_.clear();
    plans_[{plan.verb, plan.dtype, plan.op, plan.root, options, kind_of(plan.splits), most}] = {
        least, plan};
  }

 private:
  // A direct-mapped cache in front of the map.
  static constexpr int kRecentBits = 8;
  struct Recent {
    Plan plan;
    uint64_t kinds = kNone;
  };
  struct Known {
    uint64_t least;
    Plan plan;
  };
  // Calls are planned alike if their splits are of one kind.
  static uint64_t kind_of(uint64_t splits) {
    constexpr uint64_t kUneven = kCountedSplits + 1, kList = kUneven + 1;
    return splits <= kCountedSplits ? splits : num_tensors(splits) == 0 ? kUneven : kList;
  }
  // All of a key but its sizes, in one word.
  static constexpr uint64_t kNone = ~uint64_t{0};
  static uint64_t kinds_of(const Key& key) {
    return uint64_t(key.verb) | uint64_t(key.dtype) << 8 | uint64_t(key.op) << 16 |
           uint64_t(key.root) << 24 | uint64_t(key.options.algorithm) << 48 |
           uint64_t(key.options.numerics) << 56;
  }
  [[gnu::noinline]] const Plan* find_slowly(const Key& key, Recent& recent) {
    Key kind = key;
    kind.splits = kind_of(key.splits);
    const auto known = plans_.lower_bound(kind);  // keys that differ in numel alone are neighbours
    if (known == plans_.end() || key.numel < known->second.least) return nullptr;
    kind.numel = known->first.numel;
    if (kind != known->first) return nullptr;
    Plan plan = known->second.plan;
    plan.numel = key.numel;
    plan.splits = key.splits;
    recent = {make_plan(plan), kinds_of(key)};
    return &recent.plan;
  }
  // The upper bits of a product depend on all of its factor.
  static size_t place(const Key& key, uint64_t kinds) {
    return (((key.numel + key.splits) * 0x9e3779b97f4a7c15ULL + kinds) * 0xbf58476d1ce4e5b9ULL) >>
           (64 - kRecentBits);
  }

  std::array<Recent, size_t{1} << kRecentBits> recent_{};
  std::map<Key, Known> plans_;  // by the most elements that a plan is for
};

}  // namespace fastcoll
