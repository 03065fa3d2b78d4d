// SPDX-License-Identifier: Apache-2.0
// Dense copies of the tensors of a call whose plan needs each part in one piece, made where a
// tensor is not contiguous. Decides whether the tensors may share memory; in doubt they may not,
// and Python looks closer. Needs the GIL to look at tensors, not to copy them. Implemented in
// strided.cpp, beside the other looks at layouts.
#pragma once

#include <Python.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/strided.h"
#include "python/tensor_view.h"

namespace fastcoll {

class DenseCopies {
 public:
  enum class Use { input, output, both };
  // The call takes the result in place of the argument: the tensor, or a copy that has no elements
  // yet. None if no fast call takes it.
  std::optional<TensorView> view(PyObject* object, Use use);
  // Whether no output overlaps another one, nor an input. In place, this rank's input may be the
  // very tensor of its output.
  bool are_apart(int rank, bool may_be_in_place) const;
  size_t num_bytes() const { return num_bytes_; }
  void read() const;   // the inputs, before the call
  void write() const;  // the outputs, after it

 private:
  struct Copy {
    Strided place;
    std::unique_ptr<std::byte[]> dense;
    size_t numel;
    Use use;
  };
  // All of them, contiguous or not; outputs_ has those that are both, too.
  std::vector<StridedView> outputs_, inputs_;
  std::vector<Copy> copies_;
  size_t num_bytes_ = 0;
};

}  // namespace fastcoll
