// SPDX-License-Identifier: Apache-2.0
// The kernels of rows at every SIMD level of this machine against the cases of a file, which
// row_cases.py has written by the oracle. Every case runs with its tensors apart and in place, at
// two alignments, and in a floating-point environment that an application has changed.
// Build: c++ -std=c++20 -O3 -ffp-contract=off -Icsrc -Ikernels test_rows.cpp csrc/cpu/reduce*.cpp
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cpu/reduce.h"
#include "cpu/rows.h"
#include "float_env.h"

using namespace fastcoll;

namespace {

using Bytes = std::vector<unsigned char>;
constexpr std::size_t kGuardBytes = 64;
constexpr unsigned char kGuard = 0xa5;

// One case, in the order of the file.
struct Header {
  std::uint32_t dtype, weight_dtype, out_dtype, has_residual, has_weight, rounds_first, wide_sum;
  std::uint32_t num_rows, columns;
  float epsilon, offset;
};

struct Case {
  Header header;
  Bytes plain, residual, weight, summed, out, scales;  // the last three are expected
};

// Bytes behind a guard and before one, at an alignment.
class Memory {
 public:
  Memory(const Bytes& bytes, std::size_t shift)
      : shift_(kGuardBytes + shift), all_(shift_ + bytes.size() + kGuardBytes, kGuard) {
    std::copy(bytes.begin(), bytes.end(), all_.begin() + std::ptrdiff_t(shift_));
  }
  void* ptr() { return all_.data() + shift_; }
  bool holds(const Bytes& expected) const {
    for (std::size_t i = 0; i < kGuardBytes; ++i)
      if (all_[i] != kGuard || all_[all_.size() - 1 - i] != kGuard) return false;
    return std::equal(expected.begin(), expected.end(), all_.begin() + std::ptrdiff_t(shift_));
  }

 private:
  std::size_t shift_;
  Bytes all_;
};

int g_failures = 0;
long g_checks = 0;

void check(bool ok, const Case& one, const char* what, const char* variant) {
  ++g_checks;
  if (ok) return;
  const Header& h = one.header;
  std::printf(
      "FAIL (%s): %s of [%u, %u] %s, weight %s, out %s, residual %u, rounds_first %u, "
      "wide_sum %u, %s\n",
      simd_level_name(simd_level()), what, h.num_rows, h.columns, dtype_name(DType(h.dtype)),
      h.has_weight ? dtype_name(DType(h.weight_dtype)) : "none", dtype_name(DType(h.out_dtype)),
      h.has_residual, h.rounds_first, h.wide_sum, variant);
  if (++g_failures == 20) std::exit(1);
}

RowCall call_of(const Case& one) {
  const Header& h = one.header;
  RowCall call{};
  call.num_rows = h.num_rows;
  call.columns = h.columns;
  call.epsilon = h.epsilon;
  call.offset = h.offset;
  call.dtype = DType(h.dtype);
  call.weight_dtype = DType(h.weight_dtype);
  call.out_dtype = DType(h.out_dtype);
  call.rounds_first = h.rounds_first != 0;
  call.wide_sum = h.wide_sum != 0;
  return call;
}

// Where the results go: apart from everything; the sums over the residual or the plain result; the
// rows over the plain result.
enum class Place { apart, over_residual, over_plain };

void run(const Case& one, Place place, std::size_t shift, bool is_hostile) {
  const Header& h = one.header;
  const bool is_coded = is_code_dtype(DType(h.out_dtype)), is_apart = place == Place::apart;
  if (place == Place::over_residual && !h.has_residual) return;
  Memory plain(one.plain, shift), residual(one.residual, shift), weight(one.weight, shift);
  Memory summed(Bytes(one.summed.size()), shift), out(Bytes(one.out.size()), shift),
      scales(Bytes(one.scales.size()), shift);
  RowCall call = call_of(one);
  call.plain = plain.ptr();
  if (h.has_residual) call.residual = residual.ptr();
  if (h.has_weight) call.weight = weight.ptr();
  call.out = is_apart || is_coded ? out.ptr() : plain.ptr();
  Memory& sums = place == Place::over_residual ? residual : is_coded && !is_apart ? plain : summed;
  if (h.has_residual || is_apart || is_coded) call.summed = sums.ptr();
  if (is_coded) call.scales = static_cast<float*>(scales.ptr());
  {
    const HostileFloatEnv env(is_hostile);
    row_fn(call.dtype)(call);
    check(env.is_kept(), one, "the floating-point environment", "");
  }
  const char* const variant = is_apart ? "apart" : "in place";
  if (call.summed) check(sums.holds(one.summed), one, "the sum", variant);
  check((call.out == out.ptr() ? out : plain).holds(one.out), one, "the row", variant);
  if (is_coded) check(scales.holds(one.scales), one, "the scale", variant);
  check(weight.holds(one.weight), one, "the weight", variant);
}

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  bool is_at_end() const { return at_ == bytes_.size(); }
  Bytes take(std::size_t num_bytes) {
    if (num_bytes > bytes_.size() - at_) {
      std::printf("FAIL: the file of cases ends early\n");
      std::exit(1);
    }
    const auto begin = bytes_.begin() + std::ptrdiff_t(at_);
    at_ += num_bytes;
    return {begin, begin + std::ptrdiff_t(num_bytes)};
  }
  Case next() {
    Case one;
    const Bytes head = take(sizeof(Header));
    std::memcpy(&one.header, head.data(), sizeof(Header));
    const Header& h = one.header;
    const std::size_t numel = std::size_t{h.num_rows} * h.columns;
    const std::size_t row_bytes = numel * dtype_size(DType(h.dtype));
    one.plain = take(row_bytes);
    one.residual = take(h.has_residual ? row_bytes : 0);
    one.weight = take(h.has_weight ? h.columns * dtype_size(DType(h.weight_dtype)) : 0);
    one.summed = take(row_bytes);
    one.out = take(numel * dtype_size(DType(h.out_dtype)));
    one.scales = take(is_code_dtype(DType(h.out_dtype)) ? h.num_rows * sizeof(float) : 0);
    return one;
  }

 private:
  Bytes bytes_;
  std::size_t at_ = 0;
};

}  // namespace

int main(int num_args, char** args) {
  if (num_args != 2) {
    std::printf("usage: test_rows FILE\n");
    return 2;
  }
  Reader reader(args[1]);
  long num_cases = 0;
  while (!reader.is_at_end()) {
    const Case one = reader.next();
    ++num_cases;
    for (int level = 0; level <= int(best_simd_level()); ++level) {
      set_simd_level(SimdLevel(level));
      for (const Place place : {Place::apart, Place::over_residual, Place::over_plain})
        run(one, place, level == 1 ? 1 : 0, num_cases % 2 == 0);
    }
  }
  std::printf("%ld cases, %ld checks, %d failures\n", num_cases, g_checks, g_failures);
  return g_failures != 0 || num_cases == 0;
}
