// SPDX-License-Identifier: Apache-2.0
// The codes of element types, operations, verbs, algorithms and wire formats, with their meanings.
// The same codes stand in python/fastcoll/types.py; a test pins the two against each other. This
// file knows no memory, no rank and no machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class DType : std::uint8_t {
  float32 = 0,
  float64 = 1,
  float16 = 2,
  bfloat16 = 3,
  float8_e4m3fn = 4,
  float8_e5m2 = 5,
  int8 = 6,
  uint8 = 7,
  int16 = 8,
  int32 = 9,
  int64 = 10,
  boolean = 11,
  complex64 = 12,
  complex128 = 13,
  uint16 = 14,
  uint32 = 15,
  uint64 = 16,
};
inline constexpr int kNumDTypes = 17;

// The order of torch.distributed.ReduceOp.RedOpType.
enum class Op : std::uint8_t {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
};
inline constexpr int kNumOps = 8;

// The format in which elements cross between nodes; none: as they are.
enum class Wire : std::uint8_t { none = 0, bf16 = 1, int8 = 2, fp8 = 3 };
inline constexpr int kNumWires = 4;

enum class Verb : std::uint8_t {
  all_reduce = 0,
  reduce_scatter = 1,
  all_gather = 2,
  broadcast = 3,
  barrier = 4,
  all_to_all = 5,
  gather = 6,
  scatter = 7,
  reduce = 8,
  // On GPUs only, so far.
  send = 9,
  recv = 10,
};
inline constexpr int kNumVerbs = 9;  // those that the host's tables know
inline constexpr int kNumGpuVerbs = 11;

enum class Algorithm : std::uint8_t {
  one_shot = 0,
  two_shot = 1,
  ring = 2,
  chain = 3,
  direct = 4,
  schedule = 5,     // on CPUs only: a schedule of the model
  single_copy = 6,  // on CPUs only
  multimem = 7,     // on GPUs only
  nccl = 8,         // on GPUs only: NCCL carries, fastcoll adds where its own order is wanted
  copy_engine = 9,  // on GPUs only: DMA moves the bytes, the kernel only meets the peers'
};
inline constexpr int kNumAlgorithms = 7;  // those that the host's tables know
inline constexpr int kNumGpuAlgorithms = 10;

// The kinds of element types; op_has_meaning decides by them.
enum class Kind : std::uint8_t { floating, integer, boolean, complex };

namespace detail {

struct DTypeInfo {
  const char* name;
  std::uint8_t num_bytes;
  std::uint8_t accumulator_bytes;
  Kind kind;
};

inline constexpr DTypeInfo kDTypes[kNumDTypes] = {
    {"float32", 4, 4, Kind::floating},       {"float64", 8, 8, Kind::floating},
    {"float16", 2, 4, Kind::floating},       {"bfloat16", 2, 4, Kind::floating},
    {"float8_e4m3fn", 1, 4, Kind::floating}, {"float8_e5m2", 1, 4, Kind::floating},
    {"int8", 1, 1, Kind::integer},           {"uint8", 1, 1, Kind::integer},
    {"int16", 2, 2, Kind::integer},          {"int32", 4, 4, Kind::integer},
    {"int64", 8, 8, Kind::integer},          {"bool", 1, 1, Kind::boolean},
    {"complex64", 8, 8, Kind::complex},      {"complex128", 16, 16, Kind::complex},
    {"uint16", 2, 2, Kind::integer},         {"uint32", 4, 4, Kind::integer},
    {"uint64", 8, 8, Kind::integer},
};

inline constexpr const char* kOpNames[kNumOps] = {"SUM", "AVG",  "PRODUCT", "MIN",
                                                  "MAX", "BAND", "BOR",     "BXOR"};
inline constexpr const char* kWireNames[kNumWires] = {"none", "bf16", "int8", "fp8"};
inline constexpr const char* kVerbNames[kNumGpuVerbs] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "all_to_all",
    "gather",     "scatter",        "reduce",     "send",      "recv"};
inline constexpr const char* kAlgorithmNames[kNumGpuAlgorithms] = {
    "one_shot", "two_shot",    "ring",     "chain", "direct",
    "schedule", "single_copy", "multimem", "nccl",  "copy_engine"};

}  // namespace detail

constexpr const char* dtype_name(DType dtype) {
  return detail::kDTypes[static_cast<int>(dtype)].name;
}

constexpr const char* op_name(Op op) { return detail::kOpNames[static_cast<int>(op)]; }

constexpr const char* wire_name(Wire wire) { return detail::kWireNames[static_cast<int>(wire)]; }

constexpr const char* verb_name(Verb verb) { return detail::kVerbNames[static_cast<int>(verb)]; }

constexpr bool verb_reduces(Verb verb) {
  return verb == Verb::all_reduce || verb == Verb::reduce_scatter || verb == Verb::reduce;
}

// One rank's part differs from the others': `root` is that rank.
constexpr bool verb_has_root(Verb verb) {
  return verb == Verb::broadcast || verb == Verb::gather || verb == Verb::scatter ||
         verb == Verb::reduce;
}

// Every rank gives a part to each rank, or the root alone does. verb_gets_parts is the same for the
// results.
constexpr bool verb_gives_parts(Verb verb) {
  return verb == Verb::reduce_scatter || verb == Verb::all_to_all || verb == Verb::scatter;
}
constexpr bool verb_gets_parts(Verb verb) {
  return verb == Verb::all_gather || verb == Verb::all_to_all || verb == Verb::gather;
}

constexpr const char* algorithm_name(Algorithm algorithm) {
  return detail::kAlgorithmNames[static_cast<int>(algorithm)];
}

/// Bytes of one element.
constexpr std::size_t dtype_size(DType dtype) {
  return detail::kDTypes[static_cast<int>(dtype)].num_bytes;
}

/// Bytes of one element's accumulator: fp16, bf16 and fp8 accumulate in fp32, all others in
/// their own type.
constexpr std::size_t accumulator_size(DType dtype) {
  return detail::kDTypes[static_cast<int>(dtype)].accumulator_bytes;
}

constexpr Kind dtype_kind(DType dtype) { return detail::kDTypes[static_cast<int>(dtype)].kind; }

/// False where the pair has no meaning: AVG of booleans, bitwise on floats, an order (MIN, MAX) or
/// PRODUCT on complex numbers.
constexpr bool op_has_meaning(DType dtype, Op op) {
  const bool bitwise = op == Op::band || op == Op::bor || op == Op::bxor;
  switch (dtype_kind(dtype)) {
    case Kind::floating:
      return !bitwise;
    case Kind::complex:
      return op == Op::sum || op == Op::avg;
    case Kind::integer:
      return true;
    case Kind::boolean:
      return op != Op::avg;
  }
  return false;
}

}  // namespace fastcoll
