// SPDX-License-Identifier: Apache-2.0
// A floating-point environment that an application may have set, and that kernels must restore.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fastcoll {

// Flush-to-zero, denormals-are-zero and rounding upwards.
class HostileFloatEnv {
 public:
  explicit HostileFloatEnv(bool is_hostile)
      : saved_(read()), expected_(is_hostile ? kHostile : saved_) {
    if (is_hostile) write(kHostile);
  }
  ~HostileFloatEnv() { write(saved_); }
  HostileFloatEnv(const HostileFloatEnv&) = delete;
  HostileFloatEnv& operator=(const HostileFloatEnv&) = delete;
  bool is_kept() const { return read() == expected_; }

 private:
#if defined(__x86_64__)
  static std::uint64_t read() { return _mm_getcsr() & 0xffc0u; }
  static void write(std::uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
  static constexpr std::uint64_t kHostile = 0x1f80 | 0x8040 | 0x4000;
#else
  static std::uint64_t read() {
    std::uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(std::uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
  static constexpr std::uint64_t kHostile = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 22);
#endif
  std::uint64_t saved_, expected_;
};

}  // namespace fastcoll
