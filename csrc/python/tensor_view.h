// SPDX-License-Identifier: Apache-2.0
// Reading a tensor's facts without any framework's header: DLPack's C exchange table (DLPack 1.2;
// torch 2.11 and later), about 50 ns a call, one build for every torch. NumPy's arrays:
// numpy_view.h.
#pragma once

#include <Python.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "dtypes.h"
#include "python/tensor_layout.h"

namespace fastcoll {

struct TensorView {
  std::byte* ptr;
  uint64_t numel;
  DType dtype;
  int32_t ndim;
  const int64_t* shape;  // the tensor's own
  size_t num_bytes() const { return numel * dtype_size(dtype); }
  std::byte* end() const { return ptr + num_bytes(); }
};

inline bool same_shape(const TensorView& a, const TensorView& b) {
  return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// One whose elements may lie apart.
struct StridedView {
  static constexpr int kMostDims = 16;
  TensorView tensor;  // ptr: of its first element
  std::array<int64_t, kMostDims> strides_bytes;
};

// Take tensors of exactly this type. Not of its subclasses: a FakeTensor has no memory, a DTensor
// means more than its local part.
void add_tensor_type(PyTypeObject* type);

inline PyTypeObject* tensor_types[2];  // those that were added

inline bool is_tensor(PyObject* object) {
  return Py_TYPE(object) == tensor_types[0] || Py_TYPE(object) == tensor_types[1];
}

// The tensor or array, if the fast path takes it. It must be of such a type, on the CPU,
// contiguous, of a known dtype and within its storage. It must be neither negated nor conjugated
// lazily. Never leaves a Python error set. Nothing is remembered of it: its memory may be another
// one by the next call.
std::optional<TensorView> view_tensor(PyObject* object);
// The same of a tensor on this GPU. Arrays of other libraries are Python's.
std::optional<TensorView> view_on_gpu(PyObject* object, int device);
// torch's current stream there; none if torch can't tell.
std::optional<void*> current_stream(int device);
// The first, contiguous or not.
std::optional<StridedView> view_strided(PyObject* object);

// Let autograd know that a call writes this object, if it is such a tensor.
inline void count_write(PyObject* object) {
  if (is_tensor(object)) bump_version(impl_of(object));
}

// Fetch the words behind this object that view_tensor is going to read into the caches.
void expect_tensor(PyObject* object);

}  // namespace fastcoll
