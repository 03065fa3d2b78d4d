// SPDX-License-Identifier: Apache-2.0
// Steps of a rank on whole rows of its result: add a residual, normalise by the root mean square,
// scale, quantise. They run behind the plain call, so no algorithm, plan or peer knows of them.
//
// Each step reads the stored result of the step before, rounded to the dtype. Only `wide_sum`
// leaves out a rounding: of the sum that the norm reads. Squares are rounded to a grid on which
// every sum of a row is exact: no order, width or compiler can change it. The arithmetic is defined
// in docs/numerics.md and compiled once per SIMD level (cpu/rows.inc).
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace fastcoll {

/// Rows of a result. Pointers may have any byte alignment; the rows of each lie end to end.
struct RowCall {
  const void* plain;     ///< as the plain call stored it
  const void* residual;  ///< null: nothing is added
  void* summed;          ///< may be `residual` or `plain`; null only without a residual
  const void* weight;    ///< of each column; null: ones
  void* out;             ///< may be `plain`
  float* scales;         ///< of each row, if `out` is int8 or float8_e4m3fn
  std::size_t num_rows, columns;
  float epsilon, offset;
  DType dtype, weight_dtype, out_dtype;
  bool rounds_first;  ///< to the dtype, before the weight
  bool wide_sum;      ///< the norm reads the sum with the residual before it is rounded
};

using RowFn = void (*)(const RowCall&);

/// The kernel of the current SIMD level; null unless the dtype is float32, float16 or bfloat16. It
/// sets the floating-point environment by itself.
RowFn row_fn(DType dtype);

constexpr bool is_row_dtype(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}
constexpr bool is_code_dtype(DType dtype) {
  return dtype == DType::int8 || dtype == DType::float8_e4m3fn;
}

}  // namespace fastcoll
