// SPDX-License-Identifier: Apache-2.0
// Reads the arguments of fast calls: numbers, lists, tensors, and whether tensors overlap. Only
// known types are read, as others could run any code.
#pragma once

#include <Python.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "extents.h"
#include "group/process_group.h"
#include "python/numpy_view.h"
#include "python/tensor_view.h"

namespace fastcoll {

// Owns a reference, perhaps none.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {
    if (!object) PyErr_Clear();
  }
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

inline bool given(PyObject* object) { return object && object != Py_None; }

inline std::optional<TensorView> view_argument(PyObject* object) {
  return given(object) ? view_tensor(object) : std::nullopt;
}

// Of an int, or of NumPy's integers. Other types could run any code while they give their number.
// True is none: a program that passes it means another parameter.
inline std::optional<uint64_t> number_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) [[unlikely]] {
    if (!is_array_integer(Py_TYPE(object))) return std::nullopt;
    const Owned number(PyNumber_Index(object));
    if (number.get()) return number_of(number.get());
    PyErr_Clear();
    return std::nullopt;
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow || number < 0) return std::nullopt;
  return uint64_t(number);
}

inline std::optional<int> root_of(const ProcessGroup& group, PyObject* object) {
  if (!object) return std::nullopt;
  const std::optional<uint64_t> root = number_of(object);
  if (!root || *root >= uint64_t(group.world_size())) return std::nullopt;
  return int(*root);
}

inline std::span<PyObject*> items_of(
    PyObject* object) {  // of a list or tuple; none of anything else
  if (!object || (!PyList_CheckExact(object) && !PyTuple_CheckExact(object))) return {};
  return {PySequence_Fast_ITEMS(object), size_t(PySequence_Fast_GET_SIZE(object))};
}

inline bool overlap(const TensorView& a, const TensorView& b) {
  return a.ptr < b.end() && b.ptr < a.end();
}

}  // namespace fastcoll
