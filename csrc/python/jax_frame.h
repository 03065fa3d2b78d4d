// SPDX-License-Identifier: Apache-2.0
// Reads a call of XLA's: its arrays, and the facts that fastcoll.jax gave it. Part of
// jax_calls.cpp.
#pragma once

#include <cstring>
#include <optional>
#include <string>

#include "check.h"
#include "python/tensor_view.h"
#include "python/xla_ffi.h"

namespace fastcoll {

// Beyond those of Verb, whose codes have the same numbers. fastcoll.integrations.jax_calls has
// them, too.
inline constexpr int64_t kSend = 9, kRecv = 10, kSendRecv = 11;

// The one attribute of a call: an array of these.
struct Facts {
  int64_t group, verb, op, root, dest, source, tag;
  int64_t gets;  // whether its result is more than a sign that it is over
};

struct Operand {
  TensorView view;
  bool is_given;
};

struct JaxCall {
  Facts facts;
  Operand input, output;
  Verb verb() const { return Verb(facts.verb); }
  const TensorView& either() const { return input.is_given ? input.view : output.view; }
};

inline std::optional<DType> dtype_of_xla(int xla_dtype) {
  switch (xla_dtype) {
    case 1:
      return DType::boolean;
    case 2:
      return DType::int8;
    case 3:
      return DType::int16;
    case 4:
      return DType::int32;
    case 5:
      return DType::int64;
    case 6:
      return DType::uint8;
    case 7:
      return DType::uint16;
    case 8:
      return DType::uint32;
    case 9:
      return DType::uint64;
    case 10:
      return DType::float16;
    case 11:
      return DType::float32;
    case 12:
      return DType::float64;
    case 15:
      return DType::complex64;
    case 16:
      return DType::bfloat16;
    case 18:
      return DType::complex128;
    case 19:
      return DType::float8_e5m2;
    case 20:
      return DType::float8_e4m3fn;
    default:
      return std::nullopt;
  }
}

// The one array among arguments or results; the others are tokens.
inline Operand operand_of(const xla::Buffers& buffers) {
  for (int64_t i = 0; i < buffers.size; ++i) {
    const auto* buffer = static_cast<const xla::Buffer*>(buffers.items[i]);
    if (buffers.types[i] != xla::kIsBuffer || buffer->dtype == xla::kToken) continue;
    const std::optional<DType> dtype = dtype_of_xla(buffer->dtype);
    if (!dtype)
      throw Failure(ErrorKind::unsupported,
                    "XLA's element type " + std::to_string(buffer->dtype) + " is not supported");
    uint64_t numel = 1;
    for (int64_t dim = 0; dim < buffer->rank; ++dim) numel *= uint64_t(buffer->dims[dim]);
    return {
        {static_cast<std::byte*>(buffer->data), numel, *dtype, int32_t(buffer->rank), buffer->dims},
        true};
  }
  return {{}, false};
}

inline JaxCall call_of(const xla::CallFrame& frame) {
  const xla::Attributes& attributes = frame.attributes;
  JaxCall call{};
  const auto* facts = attributes.size == 1 && attributes.types[0] == xla::kIsArray
                          ? static_cast<const xla::Array*>(attributes.items[0])
                          : nullptr;
  if (!facts || facts->dtype != xla::kInt64 || facts->size * sizeof(int64_t) != sizeof call.facts)
    throw Failure(ErrorKind::usage, "fastcoll.jax and fastcoll._C are of different versions");
  std::memcpy(&call.facts, facts->data, sizeof call.facts);
  call.input = operand_of(frame.arguments);
  if (call.facts.gets) call.output = operand_of(frame.results);
  return call;
}

}  // namespace fastcoll
