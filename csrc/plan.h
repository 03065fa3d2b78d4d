// SPDX-License-Identifier: Apache-2.0
// A plan: everything about one call that must be equal on all ranks. Chosen in Python (choose/),
// carried out here; csrc never chooses.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "dtypes.h"
#include "layout.h"
#include "stamp.h"

namespace fastcoll {

// Plan::splits where each rank knows its own parts only; the ranks then show each other the sizes.
inline constexpr uint64_t kCountedSplits = 1;

// Plan::splits of a list of tensors: how many of the plan's dtype there are, and a hash of the
// dtypes and sizes of all. No other kind of splits reaches these bits.
inline constexpr int kListHashBits = 40;
struct TensorSize {
  DType dtype;
  uint64_t numel;  // of one part, where a side has a part for each rank
};
inline uint64_t list_splits(const std::vector<TensorSize>& tensors, DType dtype) {
  uint64_t num_tensors = 0, hash = 0;
  for (const TensorSize& tensor : tensors) {
    num_tensors += tensor.dtype == dtype;
    hash = mix64(hash + (tensor.numel << 8 | uint64_t(tensor.dtype)));
  }
  return num_tensors << kListHashBits | hash >> (64 - kListHashBits);
}
// Plan::splits of parts of unequal size, which all ranks know: a hash of their numels.
inline uint64_t uneven_splits(std::span<const uint64_t> numels) {
  uint64_t hash = 0;
  for (const uint64_t numel : numels) hash = mix64(hash + numel);
  return kCountedSplits + 1 + (hash >> (65 - kListHashBits));
}
constexpr uint64_t num_tensors(uint64_t splits) { return splits >> kListHashBits; }

// In the order of its words (below), so that a compiler makes each of one load.
struct Plan {
  Verb verb = Verb::barrier;
  DType dtype = DType::uint8;
  Op op = Op::sum;
  Algorithm algorithm = Algorithm::direct;
  bool fast_numerics = false;
  bool inlined = false;  // flag-in-line packs: the message travels in the arrival lines
  uint8_t channels = 0;  // thread blocks of a rank's kernel; 0 on CPUs
  uint8_t reserved = 0;
  uint64_t numel = 0;  // see Plan in _C.pyi for its meaning by verb
  int32_t root = 0;
  uint32_t segment_bytes = 0;  // staged bytes per segment, at most kSlotBytes
  // Of lists and parts of unequal size: the facts that all ranks know; 0: neither. For a schedule:
  // a hash of all ranks' programs.
  uint64_t splits = 0;
  uint32_t hash = 0;  // of all the above

  size_t elem_bytes() const { return dtype_size(dtype); }
  bool operator==(const Plan&) const = default;
};

// The words of a Descriptor that hold the plan; another one holds the stamp and the end segment.
struct PlanWords {
  uint64_t kinds;
  uint64_t numel;
  uint64_t root_and_segment;
  uint64_t splits;
};

inline PlanWords plan_words(const Plan& plan) {
  return {uint64_t(plan.verb) | uint64_t(plan.dtype) << 8 | uint64_t(plan.op) << 16 |
              uint64_t(plan.algorithm) << 24 | uint64_t(plan.fast_numerics) << 32 |
              uint64_t(plan.inlined) << 40 | uint64_t(plan.channels) << 48 |
              uint64_t(plan.reserved) << 56,
          plan.numel, uint64_t(uint32_t(plan.root)) | uint64_t(plan.segment_bytes) << 32,
          plan.splits};
}

inline Plan plan_from_words(const PlanWords& words) {
  Plan plan;
  plan.verb = Verb(words.kinds & 0xff);
  plan.dtype = DType(words.kinds >> 8 & 0xff);
  plan.op = Op(words.kinds >> 16 & 0xff);
  plan.algorithm = Algorithm(words.kinds >> 24 & 0xff);
  plan.fast_numerics = (words.kinds >> 32 & 0xff) != 0;
  plan.inlined = (words.kinds >> 40 & 0xff) != 0;
  plan.channels = uint8_t(words.kinds >> 48 & 0xff);
  plan.numel = words.numel;
  plan.root = int32_t(words.root_and_segment & 0xffffffff);
  plan.segment_bytes = uint32_t(words.root_and_segment >> 32);
  plan.splits = words.splits;
  return plan;
}

// Least segment: a line of every rank's elements and of their accumulators (ring, fp8: 1 + 4 bytes
// an element) fits.
inline constexpr size_t kLeastSegmentBytes = size_t{32} << 10;
static_assert(kLeastSegmentBytes >= kMaxWorld * kLineBytes * 5);

inline Plan make_plan(Plan plan) {
  if (plan.channels > kMaxChannels)
    throw Failure(ErrorKind::usage, "a plan has at most " + std::to_string(kMaxChannels) +
                                        " channels, not " + std::to_string(plan.channels));
  const bool on_cpu = plan.channels == 0;  // on a GPU the kernel's shape follows from the plan
  if (on_cpu &&
      (plan.segment_bytes > kSlotBytes || plan.segment_bytes % (kMaxWorld * kLineBytes) != 0 ||
       plan.segment_bytes < kLeastSegmentBytes))
    throw Failure(ErrorKind::usage, "segment_bytes must be a multiple of " +
                                        std::to_string(kMaxWorld * kLineBytes) + " from " +
                                        std::to_string(kLeastSegmentBytes) + " to " +
                                        std::to_string(kSlotBytes));
  if (plan.root < 0 || plan.root >= kMaxWorld)
    throw Failure(ErrorKind::usage, "root " + std::to_string(plan.root) + " is no rank");
  const PlanWords words = plan_words(plan);
  plan.hash = uint32_t(mix64(
      mix64(mix64(mix64(words.kinds) + words.numel) + words.root_and_segment) + words.splits));
  return plan;
}

constexpr const char* root_name(Verb verb) {
  return verb == Verb::broadcast || verb == Verb::scatter ? "src" : "dst";
}

// Of parts that are not equal: "3 tensors with sizes #815"; else "".
inline std::string describe_parts(const Plan& plan) {
  const std::string number = " #" + std::to_string(plan.splits % 100000);
  if (plan.splits == kCountedSplits) return "split sizes given";
  if (const uint64_t count = num_tensors(plan.splits))
    return std::to_string(count) + (count == 1 ? " tensor" : " tensors") + " with sizes" + number;
  return plan.splits != 0 && plan.algorithm != Algorithm::schedule ? "uneven parts" + number : "";
}

// "all_reduce(SUM, float32, numel=1000)".
inline std::string describe(const Plan& plan) {
  std::string text = verb_name(plan.verb);
  if (plan.verb == Verb::barrier) return text + "()";
  text += "(";
  if (verb_reduces(plan.verb)) text += std::string(op_name(plan.op)) + ", ";
  text += dtype_name(plan.dtype);
  if (plan.splits != kCountedSplits) text += ", numel=" + std::to_string(plan.numel);
  if (verb_has_root(plan.verb))
    text += std::string(", ") + root_name(plan.verb) + "=" + std::to_string(plan.root);
  if (const std::string parts = describe_parts(plan); !parts.empty()) text += ", " + parts;
  return text + ")";
}

// "one_shot inlined, numerics same_bits".
inline std::string describe_choice(const Plan& plan) {
  std::string text = algorithm_name(plan.algorithm);
  if (plan.algorithm == Algorithm::schedule) text += " #" + std::to_string(plan.splits % 100000);
  if (plan.inlined) text += " inlined";
  if (plan.channels != 0) text += " on " + std::to_string(plan.channels) + " channels";
  else if (!plan.inlined)
    text += " in segments of " + std::to_string(plan.segment_bytes) + " bytes";
  return text + ", numerics=" + (plan.fast_numerics ? "fast" : "same_bits");
}

// "numel differs: 3 on rank 0, 4 on rank 1": all fields in which the calls of two ranks differ. Of
// equal calls it compares the plans.
inline std::string difference(const Plan& one, int rank, const Plan& other, int peer) {
  std::string text;
  const auto compare = [&](const std::string& field, const std::string& mine,
                           const std::string& theirs) {
    if (mine == theirs) return;
    text += (text.empty() ? "" : "; ") + field + ": " + mine + " on rank " + std::to_string(rank) +
            ", " + theirs + " on rank " + std::to_string(peer);
  };
  if (one.verb != other.verb) {
    compare("verb differs", describe(one), describe(other));
    return text;
  }
  const std::string parts = describe_parts(one), other_parts = describe_parts(other);
  const bool counted = one.splits == kCountedSplits || other.splits == kCountedSplits;
  compare("op differs", op_name(one.op), op_name(other.op));
  compare("dtype differs", dtype_name(one.dtype), dtype_name(other.dtype));
  if (!counted) compare("numel differs", std::to_string(one.numel), std::to_string(other.numel));
  compare(std::string(root_name(one.verb)) + " differs", std::to_string(one.root),
          std::to_string(other.root));
  const bool lists = num_tensors(one.splits) != 0 || num_tensors(other.splits) != 0;
  const std::string none = lists ? "no list" : "equal";
  compare(lists ? "lists differ" : "sizes of parts differ", parts.empty() ? none : parts,
          other_parts.empty() ? none : other_parts);
  if (!text.empty()) return text;  // the plans of different calls differ anyway
  const auto numerics = [](const Plan& plan) { return plan.fast_numerics ? "fast" : "same_bits"; };
  compare("numerics differ", numerics(one), numerics(other));
  compare("algorithm differs", algorithm_name(one.algorithm), algorithm_name(other.algorithm));
  if (text.empty()) compare("plan differs", describe_choice(one), describe_choice(other));
  return text;
}

}  // namespace fastcoll
