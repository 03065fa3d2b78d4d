// SPDX-License-Identifier: Apache-2.0
// Copies of plain bytes: what they copy, and how. On x86 a trap after each instruction shows which
// stores go past the caches, and that a fence orders them. Needs no group.
//
//   test_copies
#include <signal.h>
#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "cpu/copy.h"
#include "require.h"

using namespace fastcoll;

namespace {

void check_bytes() {
  alignas(64) std::array<std::byte, 512> from, to;
  for (size_t i = 0; i < from.size(); ++i) from[i] = std::byte(1 + i % 250);
  for (const size_t offset : {0, 1, 15, 16, 48, 63, 64})
    for (size_t num_bytes = 0; num_bytes < 200; ++num_bytes) {
      to.fill(std::byte{0});
      copy_past_caches(to.data() + offset, from.data() + 3, num_bytes);
      require(std::memcmp(to.data() + offset, from.data() + 3, num_bytes) == 0, "a copy");
      for (size_t i = 0; i < to.size(); ++i)
        require(to[i] == std::byte{0} || (i >= offset && i < offset + num_bytes),
                "nothing but the copy");
    }
  copy_bytes(nullptr, nullptr, 0);
  for (const size_t least_bytes : {100, 200, 300}) {
    to.fill(std::byte{0});
    copy_some(to.data(), from.data(), 100, 200, least_bytes);
    require(std::memcmp(to.data(), from.data(), 100) == 0, "some bytes of a part");
    require(to[100] == std::byte{0}, "and no more");
  }
}

// Copies whose ends lie anywhere in a vector, from the size on at which vectors may be taken.
void check_long_copies() {
  constexpr size_t kMost = 2200, kOffset = 5;
  static std::array<std::byte, kMost + 128> from, to;
  for (size_t i = 0; i < from.size(); ++i) from[i] = std::byte(1 + i % 250);
  for (const size_t offset : {0, 1, 31, 64})
    for (size_t num_bytes = 2040; num_bytes <= kMost; ++num_bytes) {
      to.fill(std::byte{0});
      copy_bytes(to.data() + offset, from.data() + kOffset, num_bytes);
      require(std::memcmp(to.data() + offset, from.data() + kOffset, num_bytes) == 0,
              "a long copy");
      for (size_t i = 0; i < to.size(); ++i)
        require(to[i] == std::byte{0} || (i >= offset && i < offset + num_bytes),
                "nothing but the long copy");
    }
}

// Each way of copying, whichever this machine takes.
void check_copies() {
  check_bytes();
  check_long_copies();
  const CopyWays usual = copy_ways;
  copy_ways.by_vectors = copy_ways.by_string = CopyWays::kNever;
  check_long_copies();
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    copy_ways.by_vectors = kLeastByVectors;
    check_long_copies();
  }
  copy_ways.by_string = kLeastByVectors;
  check_long_copies();
#endif
  copy_ways = usual;
}

#if defined(__x86_64__)

// ---- instruction by instruction -----------------------------------------------------------------

constexpr unsigned long long kTrapFlag = 0x100;
int num_streamed = 0, num_unordered = 0;  // stores past the caches; those with no fence so far

// Looks at the instruction that comes next.
void look(int, siginfo_t*, void* context) {
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
  const bool has_rex = code[0] == 0x66 && (code[1] & 0xf0) == 0x40;
  const unsigned char* store = code + 1 + has_rex;
  if (code[0] == 0x66 && store[0] == 0x0f && store[1] == 0xe7) {  // movntdq
    ++num_streamed;
    ++num_unordered;
  }
  if (code[0] == 0x0f && code[1] == 0xae && code[2] == 0xf8) num_unordered = 0;  // sfence
}
// The stores past the caches of a copy.
template <class Copy>
[[gnu::noinline]] int count_streamed(const Copy& copy) {
  num_streamed = num_unordered = 0;
  __writeeflags(__readeflags() | kTrapFlag);
  copy();
  __writeeflags(__readeflags() & ~kTrapFlag);
  require_equal(num_unordered, 0, "stores past the caches that no fence orders");
  return num_streamed;
}

void check_stores() {
  struct sigaction action{};
  action.sa_sigaction = look;
  action.sa_flags = SA_SIGINFO;
  require(sigaction(SIGTRAP, &action, nullptr) == 0, "a handler");
  alignas(64) static std::array<std::byte, 512> from, to;
  constexpr int kOfLine = 64 / 16;
  const auto past_caches = [](size_t offset, size_t num_bytes) {
    return count_streamed([=] { copy_past_caches(to.data() + offset, from.data(), num_bytes); });
  };
  require_equal(past_caches(0, 63), 0, "stores of less than a line");
  require_equal(past_caches(0, 64), kOfLine, "stores of a line");
  require_equal(past_caches(0, 256), 4 * kOfLine, "stores of whole lines");
  require_equal(past_caches(1, 256), 3 * kOfLine, "stores of the lines between others");
  const auto some = [](size_t all_bytes) {
    return count_streamed([=] { copy_some(to.data(), from.data(), 64, all_bytes, 256); });
  };
  require_equal(some(255), 0, "stores of a small part");
  require_equal(some(256), kOfLine, "stores of a large part");
}

#else

void check_stores() {}  // the compiler makes no such stores

#endif

}  // namespace

int main() {
  check_copies();
  check_stores();
}
