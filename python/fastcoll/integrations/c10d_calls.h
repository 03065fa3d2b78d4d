// SPDX-License-Identifier: Apache-2.0
// The calls that c10d_backend.cpp carries out itself, and the plans that are known for them: part
// of that one source, compiled with it.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "c10d_threads.h"
#include "core_api.h"
#include "gil.h"

namespace {

std::optional<FastcollDType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kFastcollFloat32;
    case at::kDouble:
      return kFastcollFloat64;
    case at::kHalf:
      return kFastcollFloat16;
    case at::kBFloat16:
      return kFastcollBfloat16;
    case at::kChar:
      return kFastcollInt8;
    case at::kByte:
      return kFastcollUint8;
    case at::kInt:
      return kFastcollInt32;
    case at::kLong:
      return kFastcollInt64;
    case at::kBool:
      return kFastcollBool;
    case at::kComplexFloat:
      return kFastcollComplex64;
    case at::kComplexDouble:
      return kFastcollComplex128;
    default:
      return std::nullopt;
  }
}

struct HashOfKind {
  size_t operator()(const FastcollKind& kind) const {
    return (kind.numel + kind.splits) * 0x9e3779b97f4a7c15ULL ^
           size_t(kind.verb | kind.dtype << 8 | kind.op << 16 | kind.root << 24);
  }
};

struct SameKind {
  bool operator()(const FastcollKind& a, const FastcollKind& b) const {
    return a.verb == b.verb && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
           a.numel == b.numel && a.splits == b.splits && a.in_parts == b.in_parts;
  }
};

// A call that may run here.
struct Native {
  FastcollKind kind;
  FastcollOperands operands{};
  std::unique_ptr<FastcollParts> parts = {};
};

// The plans of a group's calls, as far as C++ has met them.
class KnownPlans {
 public:
  explicit KnownPlans(FastcollGroup* core_group) : group_(core_group) {}

  std::optional<FastcollPlan> find(const FastcollKind& kind) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = plans_.find(kind);
      if (found != plans_.end()) return found->second;
    }
    constexpr size_t kMost = size_t{1} << 16;  // a program of ever new sizes must not grow for ever
    FastcollPlan plan;
    const fastcoll::GilHeld gil;
    if (!core->find_plan(group_, &kind, &plan)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (plans_.size() >= kMost) plans_.clear();
    return plans_[kind] = plan;
  }

 private:
  FastcollGroup* const group_;
  std::mutex mutex_;
  std::unordered_map<FastcollKind, FastcollPlan, HashOfKind, SameKind> plans_;
};

}  // namespace
