// SPDX-License-Identifier: Apache-2.0
// Inputs and memory for test_reduce.cpp: numbers where arithmetic goes wrong (NaN, infinities,
// zeros, subnormals, ties), at every alignment, between canaries.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "reduce_reference.h"

namespace fastcoll::reference {

using Bytes = std::vector<unsigned char>;

inline constexpr unsigned char kCanary = 0xa5;
inline constexpr std::size_t kMargin = 64;

inline std::size_t code_bytes(DType dtype) {  // of a number: a complex element is two
  return dtype_size(dtype) / (dtype_kind(dtype) == Kind::complex ? 2 : 1);
}

inline std::uint64_t random_code(DType dtype, std::mt19937_64& random) {
  const FloatFormat* format = float_format(dtype);
  const auto kind = random() % 8;
  if (format == nullptr) {
    if (dtype == DType::boolean) return kind < 4 ? 0 : kind < 6 ? 1 : random() & 0xff;
    return random() >> (64 - 8 * dtype_size(dtype));
  }
  const std::uint64_t sign = (random() & 1) ? format->sign_bit() : 0;
  if (kind == 0) return sign | format->nan_code;
  if (kind == 1) return sign | (format->max_finite() + random() % 2);
  if (kind == 2) return sign | (random() % 4);                   // 0, subnormals
  if (kind < 5) return random() & (2 * format->sign_bit() - 1);  // anything
  const auto one = static_cast<std::uint64_t>((1 << (format->exponent_bits - 1)) - 1);
  const std::uint64_t exponent = one - 1 + random() % 3;
  return sign | (exponent << format->mantissa_bits) |
         (random() & ((1ull << format->mantissa_bits) - 1));
}

inline Codes random_codes(DType dtype, std::size_t count, std::mt19937_64& random) {
  Codes codes(count);
  for (auto& code : codes) code = random_code(dtype, random);
  return codes;
}

// Bytes at an offset, between canaries.
class Array {
 public:
  Array(std::size_t num_bytes, std::size_t offset)
      : offset_(kMargin + offset),
        num_bytes_(num_bytes),
        bytes_(num_bytes + 2 * kMargin + 8, kCanary) {}
  unsigned char* data() { return bytes_.data() + offset_; }
  void put(const Codes& codes, std::size_t num_bytes) {
    for (std::size_t i = 0; i < codes.size(); ++i) {
      std::memcpy(data() + i * num_bytes, &codes[i], num_bytes);  // little endian
    }
  }
  bool margins_intact() const {
    const auto is_canary = [](unsigned char byte) { return byte == kCanary; };
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<long>(offset_), is_canary) &&
           std::all_of(bytes_.begin() + static_cast<long>(offset_ + num_bytes_), bytes_.end(),
                       is_canary);
  }

 private:
  std::size_t offset_, num_bytes_;
  Bytes bytes_;
};

}  // namespace fastcoll::reference
