// SPDX-License-Identifier: Apache-2.0
// The reduction kernels at every SIMD level of this machine against reduce_reference.h.
// Build: c++ -std=c++20 -O3 -ffp-contract=off -Icsrc test_reduce.cpp csrc/cpu/reduce*.cpp
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/reduce.h"
#include "float_env.h"
#include "reduce_data.h"
#include "reduce_reference.h"

using namespace fastcoll;
using namespace fastcoll::reference;

namespace {

// The sizes of small_sizes() in tests/support/draw.py that are one block of the kernels. The last
// size makes three blocks.
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 511, 513, 1000, 4099};

int g_failures = 0;
long g_checks = 0;

[[gnu::format(printf, 2, 3)]] void check(bool ok, const char* format, ...) {
  ++g_checks;
  if (ok) return;
  va_list args;
  va_start(args, format);
  std::printf("FAIL (%s): ", simd_level_name(simd_level()));
  std::vprintf(format, args);
  std::printf("\n");
  va_end(args);
  if (++g_failures == 20) {
    std::printf("too many failures, stopping\n");
    std::exit(1);
  }
}

// One that the kernels must have restored.
class CheckedFloatEnv : public HostileFloatEnv {
 public:
  using HostileFloatEnv::HostileFloatEnv;
  ~CheckedFloatEnv() { check(is_kept(), "the floating-point environment was not restored"); }
};

// ---- tests

struct Case {
  DType dtype;
  Op op;
  int num_srcs, world;
  std::size_t numel;
  std::vector<Codes> srcs;
  Codes expected;
  Bytes expected_bytes;
};

Case make_case(DType dtype, Op op, int num_srcs, std::size_t numel) {
  std::mt19937_64 random(static_cast<unsigned>(dtype) * 1000 + static_cast<unsigned>(op) * 100 +
                         static_cast<unsigned>(num_srcs) * 10 + numel);
  Case c{dtype, op, num_srcs, num_srcs == 1 ? 1 : num_srcs + static_cast<int>(random() % 3),
         numel, {}, {},       {}};
  const std::size_t count = numel * dtype_size(dtype) / code_bytes(dtype);
  for (int s = 0; s < num_srcs; ++s) c.srcs.push_back(random_codes(dtype, count, random));
  for (std::size_t i = 0; i < count; ++i) {
    Codes element;
    for (const Codes& src : c.srcs) element.push_back(src[i]);
    c.expected.push_back(reference::reference(dtype, op, element, c.world));
  }
  Array array(numel * dtype_size(dtype), 0);
  array.put(c.expected, code_bytes(dtype));
  c.expected_bytes.assign(array.data(), array.data() + numel * dtype_size(dtype));
  return c;
}

void check_result(const Case& c, Array& array, const char* what) {
  check(array.margins_intact(), "%s %s of %d x %zu, %s: wrote outside the result",
        dtype_name(c.dtype), op_name(c.op), c.num_srcs, c.numel, what);
  if (std::equal(c.expected_bytes.begin(), c.expected_bytes.end(), array.data())) {
    ++g_checks;
    return;
  }
  const std::size_t size = code_bytes(c.dtype);
  for (std::size_t i = 0; i < c.expected.size(); ++i) {
    std::uint64_t got = 0;
    std::memcpy(&got, array.data() + i * size, size);
    if (got == c.expected[i]) continue;
    std::string inputs;
    for (const Codes& src : c.srcs) {
      char text[24];
      std::snprintf(text, sizeof text, " %llx", static_cast<unsigned long long>(src[i]));
      inputs += text;
    }
    check(false, "%s %s of %d x %zu (world %d), %s: at %zu of%s got %llx, want %llx",
          dtype_name(c.dtype), op_name(c.op), c.num_srcs, c.numel, c.world, what, i, inputs.c_str(),
          static_cast<unsigned long long>(got), static_cast<unsigned long long>(c.expected[i]));
    return;
  }
}

// dst_of[d] < num_srcs: destination d is that source itself; else an array of its own.
void run_reduce(const Case& c, std::size_t offset, const std::vector<int>& dst_of, bool hostile,
                const char* what) {
  const std::size_t num_bytes = c.numel * dtype_size(c.dtype);
  std::vector<Array> arrays;
  for (std::size_t a = 0; a < static_cast<std::size_t>(c.num_srcs) + dst_of.size(); ++a) {
    arrays.emplace_back(num_bytes, offset == 0 ? 0 : (offset + a) % 4);  // each its own alignment
    if (a < c.srcs.size()) arrays[a].put(c.srcs[a], code_bytes(c.dtype));
  }
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (int s = 0; s < c.num_srcs; ++s) srcs.push_back(arrays[static_cast<std::size_t>(s)].data());
  for (int d : dst_of) dsts.push_back(arrays[static_cast<std::size_t>(d)].data());
  {
    const CheckedFloatEnv env(hostile);
    reduce_fn(c.dtype, c.op)(
        {dsts.data(), static_cast<int>(dsts.size()), srcs.data(), c.num_srcs, c.numel, c.world});
  }
  for (int d : dst_of) check_result(c, arrays[static_cast<std::size_t>(d)], what);
}

void run_partial(const Case& c, std::size_t offset, bool hostile) {
  const std::size_t num_bytes = c.numel * dtype_size(c.dtype);
  const std::size_t acc_bytes = c.numel * accumulator_size(c.dtype);
  Array src(num_bytes, offset), dst(num_bytes, (offset + 1) % 4);
  Array even(acc_bytes, (offset + 2) % 4), odd(acc_bytes, (offset + 3) % 4);
  const PartialFns& fns = *partial_fns(c.dtype, c.op);
  unsigned char* acc = even.data();
  for (int s = 0; s < c.num_srcs; ++s) {
    src.put(c.srcs[static_cast<std::size_t>(s)], code_bytes(c.dtype));
    const CheckedFloatEnv env(hostile);
    if (s == 0) {
      fns.load(acc, src.data(), c.numel);
    } else {
      unsigned char* out = s % 2 == 0 ? acc : odd.data();  // in place, and not
      fns.accumulate(out, acc, src.data(), c.numel);
      acc = out;
    }
  }
  {
    const CheckedFloatEnv env(hostile);
    fns.finish(dst.data(), acc, c.numel, c.world);
  }
  check(even.margins_intact() && odd.margins_intact(), "partial wrote outside the accumulator");
  check_result(c, dst, "partial");
}

void test_case(const Case& c) {
  for (int level = 0; level <= static_cast<int>(best_simd_level()); ++level) {
    set_simd_level(static_cast<SimdLevel>(level));
    const int extra = c.num_srcs;
    for (std::size_t offset = 0; offset < 4; ++offset) {
      run_reduce(c, offset, {extra}, offset == 3, "one destination");
      run_partial(c, offset, offset == 2);
    }
    for (int s = 0; s < c.num_srcs; ++s) run_reduce(c, 1, {s}, false, "in place");
    if (const int last = c.num_srcs - 1; last > 0) {
      run_reduce(c, 1, {0, last}, true, "in place in the first and the last source");
      run_reduce(c, 1, {last, 0}, false, "in place in the last and the first source");
      run_reduce(c, 1, {extra, last}, false, "one of two destinations in place");
    }
    run_reduce(c, 1, {extra, extra + 1, extra + 2}, false, "three destinations");
    run_reduce(c, 1, {c.num_srcs - 1, extra + 1, 0}, true, "in place among destinations");
  }
}

void test_all_cases() {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<Op>(o);
      const Kind kind = dtype_kind(dtype);
      const bool meant = o < 2   ? (o == 0 || kind != Kind::boolean)
                         : o < 5 ? kind != Kind::complex
                                 : kind == Kind::integer || kind == Kind::boolean;
      check(op_has_meaning(dtype, op) == meant && (reduce_fn(dtype, op) != nullptr) == meant &&
                (partial_fns(dtype, op) != nullptr) == meant,
            "%s %s: wrong about having a meaning", dtype_name(dtype), op_name(op));
      if (!meant) continue;
      for (int num_srcs = 1; num_srcs <= 5; ++num_srcs) {
        for (std::size_t numel : kSizes) test_case(make_case(dtype, op, num_srcs, numel));
      }
    }
  }
}

// Every code widens to its value, and every value that may round wrongly narrows as the contract
// says. Such values are each code, its midpoints to the next, their neighbours, and random bits.
void test_conversions(DType dtype) {
  const FloatFormat& format = *float_format(dtype);
  const PartialFns& fns = *partial_fns(dtype, Op::sum);
  const std::size_t num_codes = std::size_t{1} << format.num_bits(), size = dtype_size(dtype);
  Codes codes(num_codes);
  for (std::size_t i = 0; i < num_codes; ++i) codes[i] = i;
  Array src(num_codes * size, 0);
  src.put(codes, size);
  std::vector<float> floats(num_codes);
  fns.load(floats.data(), src.data(), num_codes);
  for (std::size_t i = 0; i < num_codes; ++i) {
    const double want = decode(format, i);
    const bool same = std::isnan(want)
                          ? std::isnan(floats[i])
                          : want == floats[i] && std::signbit(want) == std::signbit(floats[i]);
    check(same, "%s %zx widens to %a, want %a", dtype_name(dtype), i, floats[i], want);
  }
  floats.clear();
  const float inf = std::numeric_limits<float>::infinity();
  for (std::uint64_t code = 0; code <= format.max_finite(); ++code) {
    const double low = finite_value(format, code), high = finite_value(format, code + 1);
    const auto middle = static_cast<float>(low / 2 + high / 2);
    for (float x : {static_cast<float>(low), middle, std::nextafterf(middle, 0),
                    std::nextafterf(middle, inf), std::nextafterf(static_cast<float>(low), inf)}) {
      floats.push_back(x);
      floats.push_back(-x);
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 300000; ++i)
    floats.push_back(__builtin_bit_cast(float, static_cast<std::uint32_t>(random())));
  for (std::uint32_t bits :
       {0u, 1u, 0x7fffffu, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu}) {
    floats.push_back(__builtin_bit_cast(float, bits));
    floats.push_back(__builtin_bit_cast(float, bits | 0x80000000u));
  }
  Array dst(floats.size() * size, 1);
  fns.finish(dst.data(), floats.data(), floats.size(), 1);
  for (std::size_t i = 0; i < floats.size(); ++i) {
    std::uint64_t got = 0;
    std::memcpy(&got, dst.data() + i * size, size);
    const std::uint64_t want = encode(format, floats[i]);
    check(got == want, "%s: %a narrows to %llx, want %llx", dtype_name(dtype), floats[i],
          static_cast<unsigned long long>(got), static_cast<unsigned long long>(want));
  }
}

void test_levels() {
  if (best_simd_level() == SimdLevel::avx512) return;
  bool raised = false;
  try {
    set_simd_level(SimdLevel::avx512);
  } catch (const std::invalid_argument&) {
    raised = true;
  }
  check(raised, "a SIMD level that this machine lacks was accepted");
}

}  // namespace

int main() {
  test_levels();
  test_all_cases();
  for (int level = 0; level <= static_cast<int>(best_simd_level()); ++level) {
    set_simd_level(static_cast<SimdLevel>(level));
    for (DType dtype :
         {DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2}) {
      test_conversions(dtype);
    }
  }
  std::printf("%ld checks, %d failures, best level %s\n", g_checks, g_failures,
              simd_level_name(best_simd_level()));
  return g_failures == 0 ? 0 : 1;
}
