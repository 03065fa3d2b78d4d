// SPDX-License-Identifier: Apache-2.0
// What the fast calls read from Python: numbers, lists, tensors, and whether tensors overlap.
#pragma once

#include <Python.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "extents.h"
#include "process_group.h"
#include "tensor_view.h"

namespace fastcoll {

// Owns a reference, perhaps none.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {
    if (!object) PyErr_Clear();
  }
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

inline std::optional<uint64_t> number_of(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow || number < 0) return std::nullopt;
  return uint64_t(number);
}

// The same of NumPy's integers, too. Not for the items of a list: an object that says its number
// may change that meanwhile. True is none: who gives it means something else.
inline std::optional<uint64_t> any_number_of(PyObject* object) {
  if (PyLong_CheckExact(object)) [[likely]]
    return number_of(object);
  if (PyBool_Check(object) || !PyIndex_Check(object)) return std::nullopt;
  PyObject* index = PyNumber_Index(object);
  if (!index) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<uint64_t> number = number_of(index);
  Py_DECREF(index);
  return number;
}

inline std::optional<int> root_of(const ProcessGroup& group, PyObject* object) {
  if (!object) return std::nullopt;
  const std::optional<uint64_t> root = any_number_of(object);
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
