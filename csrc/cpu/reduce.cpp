// SPDX-License-Identifier: Apache-2.0
// Chooses among the kernels compiled for each SIMD level. Knows nothing of their arithmetic.
#include "cpu/reduce.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/reduce_kernels.h"

namespace fastcoll {
namespace {

const KernelTable& table_of(SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::avx512) return avx512::kTable;
  if (level == SimdLevel::avx2) return avx2::kTable;
#endif
  static_cast<void>(level);
  return baseline::kTable;
}

std::atomic<SimdLevel> current_level{best_simd_level()};
std::atomic<const KernelTable*> current_table{&table_of(best_simd_level())};

const Kernels& kernels_of(DType dtype, Op op) {
  const KernelTable* table = current_table.load(std::memory_order_relaxed);
  return table->entries[static_cast<int>(dtype)][static_cast<int>(op)];
}

}  // namespace

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) return SimdLevel::avx512;
  if (avx2) return SimdLevel::avx2;
#endif
  return SimdLevel::baseline;
}

SimdLevel simd_level() { return current_level.load(std::memory_order_relaxed); }

void set_simd_level(SimdLevel level) {
  if (level > best_simd_level()) {
    throw std::invalid_argument(std::string("this machine lacks SIMD level ") +
                                simd_level_name(level));
  }
  current_level.store(level, std::memory_order_relaxed);
  current_table.store(&table_of(level), std::memory_order_relaxed);
}

const char* simd_level_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::baseline:
      return "baseline";
    case SimdLevel::avx2:
      return "avx2";
    case SimdLevel::avx512:
      return "avx512";
  }
  return "unknown";
}

ReduceFn reduce_fn(DType dtype, Op op) { return kernels_of(dtype, op).reduce; }

const PartialFns* partial_fns(DType dtype, Op op) {
  const Kernels& kernels = kernels_of(dtype, op);
  return kernels.reduce == nullptr ? nullptr : &kernels.partial;
}

RowFn row_fn(DType dtype) {
  return current_table.load(std::memory_order_relaxed)->rows[static_cast<int>(dtype)];
}

const WireFns* wire_fns(Wire wire) {
  if (wire == Wire::none) return nullptr;
  return &current_table.load(std::memory_order_relaxed)->wires[static_cast<int>(wire)];
}

}  // namespace fastcoll
