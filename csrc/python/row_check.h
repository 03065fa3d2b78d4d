// SPDX-License-Identifier: Apache-2.0
// Whether an RMSNorm fits the call that it stands behind, and its form for the kernels. Of a
// program's objects (row_norm.cpp) and of the tensors of torch's operator (core_api.cpp).
//
// Each function is false where something does not fit: Python then says what.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

#include "cpu/rows.h"
#include "dtypes.h"
#include "extents.h"
#include "python/tensor_view.h"

namespace fastcoll {

constexpr bool op_takes_rows(Op op) { return op == Op::sum || op == Op::avg; }
inline bool is_epsilon(double value) { return value >= 0 && std::isfinite(value); }

// Fills `rows`: first `start`, then each tensor that there is, last `finish`.
class RowCheck {
 public:
  RowCheck(RowCall& rows, const TensorView& input, const TensorView& out)
      : rows_(rows), input_(input), out_(out) {}

  bool start(bool is_in_place) {
    if (!is_row_dtype(input_.dtype) || out_.ndim == 0) return false;
    rows_ = {};
    rows_.columns = size_t(out_.shape[out_.ndim - 1]);
    if (rows_.columns == 0) return false;
    rows_.num_rows = out_.numel / rows_.columns;
    rows_.dtype = input_.dtype;
    rows_.out_dtype = out_.dtype;
    rows_.out = out_.ptr;
    add(input_, is_in_place);
    if (!is_in_place) add(out_, true);
    return true;
  }

  bool add_residual(const TensorView& residual, bool is_written) {
    if (!fits(residual)) return false;
    rows_.residual = residual.ptr;
    if (is_written) rows_.summed = residual.ptr;
    add(residual, is_written);
    return true;
  }

  bool add_summed(const TensorView& summed) {
    if (!fits(summed)) return false;
    rows_.summed = summed.ptr;
    add(summed, true);
    return true;
  }

  bool add_weight(const TensorView& weight) {
    if (weight.ndim != 1 || weight.numel != rows_.columns || !is_row_dtype(weight.dtype))
      return false;
    rows_.weight = weight.ptr;
    rows_.weight_dtype = weight.dtype;
    add(weight, false);
    return true;
  }

  bool add_scales(const TensorView& scales) {
    if (scales.dtype != DType::float32 || scales.ndim != 1 || scales.numel != rows_.num_rows ||
        !is_code_dtype(out_.dtype))
      return false;
    rows_.scales = reinterpret_cast<float*>(scales.ptr);
    add(scales, true);
    return true;
  }

  bool finish(double epsilon, double offset, bool rounds_first, bool wide_sum) {
    rows_.epsilon = float(epsilon);
    rows_.offset = float(offset);
    rows_.rounds_first = rounds_first;
    rows_.wide_sum = wide_sum;
    return (rows_.scales || out_.dtype == input_.dtype) && apart({extents_.data(), num_extents_});
  }

 private:
  bool fits(const TensorView& tensor) const {
    return tensor.dtype == input_.dtype && same_shape(tensor, out_);
  }

  // A piece of memory of the call; one that is there twice has one entry.
  void add(const TensorView& tensor, bool is_written) {
    extents_[num_extents_++] = {tensor.ptr, tensor.end(), is_written};
  }

  RowCall& rows_;
  const TensorView &input_, &out_;
  std::array<Extent, 6> extents_;
  size_t num_extents_ = 0;
};

}  // namespace fastcoll
