// SPDX-License-Identifier: Apache-2.0
// The coding for the way between nodes, at every SIMD level of this machine, against a slow one.
// Build: c++ -std=c++20 -O3 -ffp-contract=off -Icsrc test_wire.cpp csrc/cpu/reduce*.cpp
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/reduce.h"
#include "cpu/wire.h"
#include "float_env.h"
#include "reduce_data.h"
#include "reduce_reference.h"

using namespace fastcoll;
using namespace fastcoll::reference;

namespace {

constexpr std::size_t kSizes[] = {0, 1, 7, 127, 128, 129, 300, 2048, 5000};
constexpr Wire kWires[] = {Wire::bf16, Wire::int8, Wire::fp8};

int g_failures = 0;
long g_checks = 0;

void check(bool ok, Wire wire, std::size_t numel, const char* what) {
  ++g_checks;
  if (ok || ++g_failures > 20) return;
  std::printf("FAIL (%s): %s of %zu elements: %s\n", simd_level_name(simd_level()), wire_name(wire),
              numel, what);
}

using Floats = std::vector<float>;

// ---- the definition, one element at a time

float code_of(Wire wire, float quotient) {  // the number that the code stands for
  if (wire == Wire::int8) return static_cast<float>(static_cast<int>(std::nearbyint(quotient)));
  const FloatFormat& format = *float_format(DType::float8_e4m3fn);
  return static_cast<float>(decode(format, encode(format, quotient)));
}

Floats through(Wire wire, const Floats& values) {
  Floats result;
  if (wire == Wire::bf16) {
    const FloatFormat& format = *float_format(DType::bfloat16);
    for (const float x : values)
      result.push_back(static_cast<float>(decode(format, encode(format, x))));
    return result;
  }
  for (std::size_t first = 0; first < values.size(); first += kWireBlock) {
    const std::size_t end = std::min(first + kWireBlock, values.size());
    float largest = 0;
    bool finite = true;
    for (std::size_t i = first; i < end; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::fabs(values[i]));
    }
    const float scale = std::max(largest / (wire == Wire::int8 ? 127.0f : 448.0f), 0x1p-126f);
    const float inverse = 1.0f / scale;
    for (std::size_t i = first; i < end; ++i)
      result.push_back(finite ? code_of(wire, values[i] * inverse) * scale
                              : std::numeric_limits<float>::quiet_NaN());
  }
  return result;
}

Floats sum_of(const std::vector<Floats>& rows) {
  Floats total = rows[0];
  for (std::size_t r = 1; r < rows.size(); ++r)
    for (std::size_t i = 0; i < total.size(); ++i) total[i] = total[i] + rows[r][i];
  return total;
}

// ---- data

Floats numbers(std::size_t numel, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Floats values(numel);
  const auto kind = [&](std::size_t i) { return (i / kWireBlock + numel) % 7; };
  for (std::size_t i = 0; i < numel; ++i) {
    const float x = normal(random);
    if (kind(i) == 0) values[i] = std::ldexp(x, -140);  // subnormals
    else if (kind(i) == 1) values[i] = std::ldexp(x, 120);
    else if (kind(i) == 2) values[i] = i % kWireBlock == 17 ? 3.7f : 0.0f;
    else if (kind(i) == 3) values[i] = i % 2 ? -0.3f : 0.3f;
    else if (kind(i) == 4) values[i] = std::ldexp(x, -static_cast<int>(random() % 30));
    else values[i] = x;
  }
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                       -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max(),
                       254.0f};
  if (numel > 0 && random() % 2) values[random() % numel] = odd[random() % 4];
  return values;
}

bool same(const Floats& want, const void* found) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, static_cast<const unsigned char*>(found) + 4 * i, 4);
    const auto wanted = __builtin_bit_cast(std::uint32_t, want[i]);
    if (std::isnan(want[i]) ? (bits & 0x7fffffffu) <= 0x7f800000u : bits != wanted) return false;
  }
  return true;
}

// fp32 or bytes at an offset, between canaries.
Array array_of(const Floats& values, std::size_t offset) {
  Array array(4 * values.size(), offset);
  if (!values.empty()) std::memcpy(array.data(), values.data(), 4 * values.size());
  return array;
}

// ---- tests

void test_coding(Wire wire, std::size_t numel, std::size_t offset, bool hostile, int divisor,
                 bool feeds_back) {
  std::mt19937_64 random(numel * 8 + offset + static_cast<std::size_t>(divisor) * 100);
  const Floats values = numbers(numel, random), before = numbers(numel, random);
  Floats wanted = values;
  for (std::size_t i = 0; i < numel; ++i) {
    wanted[i] = wanted[i] / static_cast<float>(divisor);
    if (feeds_back) wanted[i] = wanted[i] + before[i];
  }
  const Floats given = through(wire, wanted);
  Floats error(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    error[i] = wanted[i] - given[i];
    if (!std::isfinite(error[i])) error[i] = 0;
  }
  Array source = array_of(values, offset), feedback = array_of(before, (offset + 1) % 4);
  Array coded(coded_bytes(wire, numel), (offset + 2) % 4), decoded(4 * numel, (offset + 3) % 4);
  const void* const row = coded.data();
  {
    const HostileFloatEnv env(hostile);
    void* const errors = feeds_back ? feedback.data() : nullptr;
    wire_fns(wire)->code({coded.data(), source.data(), errors, numel, divisor});
    wire_fns(wire)->add(decoded.data(), &row, 1, numel);
    check(env.is_kept(), wire, numel, "the floating-point environment was not restored");
  }
  check(same(given, decoded.data()), wire, numel, "coded and decoded");
  check(!feeds_back || same(error, feedback.data()), wire, numel, "the error");
  check(same(values, source.data()), wire, numel, "the source was changed");
  check(coded.margins_intact() && decoded.margins_intact() && feedback.margins_intact(), wire,
        numel, "wrote outside the result");
}

// Coded rows of more elements than are added, as a short part of a padded message is.
void test_sums(Wire wire, std::size_t numel, int num_rows, bool hostile) {
  const std::size_t whole = numel + numel % 3;
  std::mt19937_64 random(numel * 8 + static_cast<std::size_t>(num_rows));
  std::vector<Floats> values, given;
  std::vector<Array> coded;
  for (int r = 0; r < num_rows; ++r) {
    values.push_back(numbers(whole, random));
    given.push_back(through(wire, values.back()));
    given.back().resize(numel);
    coded.emplace_back(coded_bytes(wire, whole), static_cast<std::size_t>(r) % 4);
    Array source = array_of(values.back(), 1);
    wire_fns(wire)->code({coded.back().data(), source.data(), nullptr, whole, 1});
  }
  std::vector<const void*> rows;
  for (Array& one : coded) rows.push_back(one.data());
  const Floats total = sum_of(given);
  Array sum(4 * numel, 3), again(coded_bytes(wire, numel), 1), decoded(4 * numel, 0);
  const void* const row = again.data();
  {
    const HostileFloatEnv env(hostile);
    wire_fns(wire)->add(sum.data(), rows.data(), num_rows, numel);
    wire_fns(wire)->add_coded(again.data(), rows.data(), num_rows, numel);
    wire_fns(wire)->add(decoded.data(), &row, 1, numel);
    check(env.is_kept(), wire, numel, "the floating-point environment was not restored");
  }
  check(same(total, sum.data()), wire, numel, "the sum");
  check(same(through(wire, total), decoded.data()), wire, numel, "the sum, coded again");
  check(sum.margins_intact() && again.margins_intact() && decoded.margins_intact(), wire, numel,
        "wrote outside the sum");
  {
    Array& first = coded[0];
    wire_fns(wire)->add_coded(first.data(), rows.data(), num_rows, numel);
    check(std::memcmp(first.data(), again.data(), coded_bytes(wire, numel)) == 0, wire, numel,
          "in place of the first row");
  }
}

// A part that begins with a block is coded as it would be alone.
void test_parts(Wire wire) {
  std::mt19937_64 random(1);
  const Floats values = numbers(1000, random);
  std::vector<unsigned char> whole(coded_bytes(wire, 1000));
  wire_fns(wire)->code({whole.data(), values.data(), nullptr, values.size(), 1});
  for (std::size_t first = 0; first < values.size(); first += 3 * kWireBlock) {
    const std::size_t numel = std::min(3 * kWireBlock, values.size() - first);
    std::vector<unsigned char> part(coded_bytes(wire, numel));
    wire_fns(wire)->code({part.data(), values.data() + first, nullptr, numel, 1});
    check(std::equal(part.begin(), part.end(),
                     whole.begin() + static_cast<long>(coded_bytes(wire, first))),
          wire, numel, "a part differs from its place in the whole");
  }
}

}  // namespace

int main() {
  check(coded_bytes(Wire::none, 300) == 4 * 300, Wire::none, 300, "bytes that are not coded");
  for (int level = 0; level <= static_cast<int>(best_simd_level()); ++level) {
    set_simd_level(static_cast<SimdLevel>(level));
    for (const Wire wire : kWires) {
      test_parts(wire);
      for (const std::size_t numel : kSizes) {
        for (std::size_t offset = 0; offset < 4; ++offset)
          for (const int divisor : {1, 3})
            for (const bool feeds_back : {false, true})
              test_coding(wire, numel, offset, offset == 3, divisor, feeds_back);
        for (int num_rows = 1; num_rows <= 5; ++num_rows)
          test_sums(wire, numel, num_rows, num_rows == 4);
      }
    }
  }
  std::printf("%ld checks, %d failures, best level %s\n", g_checks, g_failures,
              simd_level_name(best_simd_level()));
  return g_failures == 0 ? 0 : 1;
}
