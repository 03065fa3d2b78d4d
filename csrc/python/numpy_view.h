// SPDX-License-Identifier: Apache-2.0
// The facts of a NumPy array, for tensor_view.cpp.
#pragma once

#include <Python.h>

#include <optional>

#include "python/tensor_view.h"

namespace fastcoll {

// Take arrays of exactly this type: numpy.ndarray, not its subclasses.
void set_array_type(PyTypeObject* type);

// Whether a type is one of NumPy's integers: those that Python named.
void add_array_integer(PyTypeObject* type);
bool is_array_integer(PyTypeObject* type);
bool is_array(PyObject* object);

// The array, if it is one the fast path takes: contiguous, writable, in the machine's byte order,
// of a known dtype.
std::optional<TensorView> view_array(PyObject* array);
// The same, contiguous or not.
std::optional<StridedView> view_strided_array(PyObject* array);

}  // namespace fastcoll
