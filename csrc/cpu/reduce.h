// SPDX-License-Identifier: Apache-2.0
// Arithmetic of the reductions on the CPU: one result per element, in rank order, rounded once,
// with the same bits at every SIMD level. This file knows arrays only: no ranks, no shared memory,
// no algorithm. The arithmetic's rules are written in cpu/reduce_ops.inc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtypes.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fastcoll {

/// One reduction. Pointers may have any byte alignment. A destination may equal a source exactly
/// (in place) but never overlap it in part. The destinations differ from each other. There is at
/// least one of each.
struct ReduceArgs {
  void* const* dsts;  ///< every one receives the same result
  int num_dsts;
  const void* const* srcs;  ///< reduced in this order, which is the order of ranks
  int num_srcs;
  std::size_t numel;
  int avg_world;  ///< divisor of Op::avg (the number of ranks), else ignored
};

using ReduceFn = void (*)(const ReduceArgs&);

/// The kernel of the current SIMD level, or nullptr where the operation has no meaning. It sets
/// the floating-point environment it needs by itself.
ReduceFn reduce_fn(DType dtype, Op op);

/// A reduction in pieces, for ring and chain. Accumulators of accumulator_size() bytes, at any
/// alignment, travel between ranks. The sequence load, accumulate..., finish gives the bits of
/// reduce_fn.
struct PartialFns {
  /// acc = widen(src)
  void (*load)(void* acc, const void* src, std::size_t numel);
  /// acc_out = op(acc_in, widen(src)); acc_out may equal acc_in.
  void (*accumulate)(void* acc_out, const void* acc_in, const void* src, std::size_t numel);
  /// dst = round(acc), divided by avg_world before for Op::avg; NaN becomes the canonical one.
  /// dst may equal acc where the sizes are equal.
  void (*finish)(void* dst, const void* acc, std::size_t numel, int avg_world);
};

/// As reduce_fn; the object lives for ever.
const PartialFns* partial_fns(DType dtype, Op op);

/// Instruction sets with kernels of their own. A machine has every level up to its best.
enum class SimdLevel : int { baseline = 0, avx2 = 1, avx512 = 2 };

SimdLevel best_simd_level();
SimdLevel simd_level();
/// Choose the level of later reduce_fn and partial_fns calls. Raises std::invalid_argument if this
/// machine lacks it.
void set_simd_level(SimdLevel level);
const char* simd_level_name(SimdLevel level);

/// Holds the thread in the default floating-point environment: round to nearest even, subnormals
/// kept, no traps. Flush-to-zero is a setting of each thread which applications do change
/// (torch.set_flush_denormal), and it would change bits. Nothing is written when the environment
/// is already right, as writing it stalls the pipeline.
class FloatEnvGuard {
 public:
#if defined(__x86_64__)
  FloatEnvGuard() : saved_(_mm_getcsr()), changed_((saved_ & kControlBits) != kDefault) {
    if (changed_) _mm_setcsr(kDefault);
  }
  ~FloatEnvGuard() {
    if (changed_) _mm_setcsr(static_cast<std::uint32_t>(saved_));
  }
#elif defined(__aarch64__)
  FloatEnvGuard() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_)::"memory");
    changed_ = saved_ != kDefault;
    if (changed_) asm volatile("msr fpcr, %0" ::"r"(kDefault) : "memory");
  }
  ~FloatEnvGuard() {
    if (changed_) asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory");
  }
#endif
  FloatEnvGuard(const FloatEnvGuard&) = delete;
  FloatEnvGuard& operator=(const FloatEnvGuard&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr std::uint32_t kDefault = 0x1f80;      // all exceptions masked
  static constexpr std::uint32_t kControlBits = 0xffc0;  // the rest are sticky flags
  std::uint32_t saved_;
  bool changed_;
#elif defined(__aarch64__)
 private:
  static constexpr std::uint64_t kDefault = 0;  // FZ, FZ16, DN, AHP, RMode and traps all off
  std::uint64_t saved_ = 0;
  bool changed_ = false;
#else
  FloatEnvGuard() {}
  ~FloatEnvGuard() {}
#endif
};

}  // namespace fastcoll
