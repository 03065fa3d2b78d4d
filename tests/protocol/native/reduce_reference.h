// SPDX-License-Identifier: Apache-2.0
// The expected results of the reductions, written from the contract alone and slowly. Values are
// decoded by ldexp, rounding compares the distances to both neighbours, integers have 128 bits.
// Shares no code with the kernels but the enums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "dtypes.h"

namespace fastcoll::reference {

__extension__ typedef __int128 Wide;
using Codes = std::vector<std::uint64_t>;  // one number per code, for all types

// ---- the contract: number formats

struct FloatFormat {
  int exponent_bits, mantissa_bits;
  bool has_inf;  // else overflow saturates, and only the largest code is NaN
  std::uint64_t nan_code;
  int num_bits() const { return 1 + exponent_bits + mantissa_bits; }
  std::uint64_t sign_bit() const { return 1ull << (num_bits() - 1); }
  std::uint64_t inf_code() const { return ((1ull << exponent_bits) - 1) << mantissa_bits; }
  std::uint64_t max_finite() const { return has_inf ? inf_code() - 1 : sign_bit() - 2; }
};

inline const FloatFormat* float_format(DType dtype) {
  static const FloatFormat f32{8, 23, true, 0x7fc00000}, f64{11, 52, true, 0x7ff8000000000000};
  static const FloatFormat f16{5, 10, true, 0x7e00}, bf16{8, 7, true, 0x7fc0};
  static const FloatFormat e4m3{4, 3, false, 0x7f}, e5m2{5, 2, true, 0x7f};
  switch (dtype) {
    case DType::float32:
    case DType::complex64:
      return &f32;
    case DType::float64:
    case DType::complex128:
      return &f64;
    case DType::float16:
      return &f16;
    case DType::bfloat16:
      return &bf16;
    case DType::float8_e4m3fn:
      return &e4m3;
    case DType::float8_e5m2:
      return &e5m2;
    default:
      return nullptr;
  }
}

// The number that sign-less `code` stands for, as if the exponent had no top value. The code after
// the largest finite one is the number that decides overflow.
inline double finite_value(const FloatFormat& format, std::uint64_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(code >> format.mantissa_bits);
  const auto mantissa = static_cast<double>(code & ((1ull << format.mantissa_bits) - 1));
  const double hidden = exponent == 0 ? 0 : std::ldexp(1.0, format.mantissa_bits);
  return std::ldexp(hidden + mantissa, std::max(exponent, 1) - bias - format.mantissa_bits);
}

inline double decode(const FloatFormat& format, std::uint64_t code) {
  const std::uint64_t magnitude = code & (format.sign_bit() - 1);
  double value = finite_value(format, magnitude);
  if (magnitude > format.max_finite()) {
    const bool is_inf = format.has_inf && magnitude == format.inf_code();
    value = is_inf ? std::numeric_limits<double>::infinity() : std::nan("");
  }
  return (code & format.sign_bit()) ? -value : value;
}

// Round to nearest even by looking at both neighbours. Values are floats, so distances are exact.
inline std::uint64_t encode(const FloatFormat& format, double value) {
  if (std::isnan(value)) return format.nan_code;
  if (format.num_bits() == 64) return __builtin_bit_cast(std::uint64_t, value);
  const std::uint64_t sign = std::signbit(value) ? format.sign_bit() : 0;
  const double magnitude = std::fabs(value);
  std::uint64_t low = 0, high = format.max_finite() + 1;  // value(low) <= magnitude < value(high)
  if (magnitude >= finite_value(format, high)) {
    return sign | (format.has_inf ? high : format.max_finite());
  }
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (finite_value(format, middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - finite_value(format, low);
  const double above = finite_value(format, high) - magnitude;
  const bool up = above < below || (above == below && (low & 1) != 0);
  return sign | std::min(up ? high : low, format.has_inf ? high : format.max_finite());
}

// ---- the contract: operations

inline double reduce_two(Op op, double a, double b) {
  if (op == Op::sum || op == Op::avg) return a + b;
  if (op == Op::product) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  if (a == b) return (std::signbit(a) == (op == Op::min)) ? a : b;
  return (op == Op::min) == (a < b) ? a : b;
}

inline std::uint64_t float_reference(DType dtype, Op op, const Codes& codes, int world) {
  const FloatFormat& format = *float_format(dtype);
  // One operation on two floats in double, then rounded to float, is rounded as if done at once.
  const auto round = [&](double x) { return format.num_bits() == 64 ? x : static_cast<float>(x); };
  double acc = decode(format, codes[0]);
  for (std::size_t s = 1; s < codes.size(); ++s) {
    acc = round(reduce_two(op, acc, decode(format, codes[s])));
  }
  if (op == Op::avg) acc = round(acc / world);
  return encode(format, acc);
}

inline std::uint64_t integer_reference(DType dtype, Op op, const Codes& codes, int world) {
  const bool is_bool = dtype == DType::boolean;
  const int num_bits = 8 * static_cast<int>(dtype_size(dtype));
  const bool is_signed = dtype_name(dtype)[0] == 'i';
  const auto low_bits = [&](std::uint64_t x) { return x << (64 - num_bits) >> (64 - num_bits); };
  const auto value = [&](std::uint64_t code) -> Wide {
    if (is_bool) return code != 0;
    const bool negative = is_signed && (code >> (num_bits - 1)) != 0;
    return static_cast<Wide>(code) - (negative ? static_cast<Wide>(1) << num_bits : 0);
  };
  Wide acc = value(codes[0]);
  for (std::size_t s = 1; s < codes.size(); ++s) {
    const Wide x = value(codes[s]);
    const auto wide_acc = static_cast<std::uint64_t>(acc), wide_x = static_cast<std::uint64_t>(x);
    if (op == Op::sum || op == Op::avg) acc = value(low_bits(wide_acc + wide_x));
    if (op == Op::product) acc = value(low_bits(wide_acc * wide_x));
    if (op == Op::min) acc = std::min(acc, x);
    if (op == Op::max) acc = std::max(acc, x);
    if (op == Op::band) acc &= x;
    if (op == Op::bor) acc |= x;
    if (op == Op::bxor) acc ^= x;
  }
  if (op == Op::avg) acc /= world;
  return low_bits(static_cast<std::uint64_t>(acc));
}

inline std::uint64_t reference(DType dtype, Op op, const Codes& codes, int world) {
  return float_format(dtype) ? float_reference(dtype, op, codes, world)
                             : integer_reference(dtype, op, codes, world);
}

}  // namespace fastcoll::reference
