// SPDX-License-Identifier: Apache-2.0
// Facts of a tensor that DLPack does not hand over: its dispatch keys, the size of its storage and
// its version counter. They are read from torch's own objects, at places that are learnt once.
//
// calls/tensor_layout.py hands over sample tensors with torch's own answers about them. A place is
// known when it has the right value in every sample. So no torch header is needed, and one build
// serves several releases. Where a place is not found, C++ reads no tensor at all: every call then
// takes the Python path.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>

namespace fastcoll {

// Offsets in bytes; 0 is unknown.
struct TensorLayout {
  uint32_t impl = 0;                            // in the Python object: address of the TensorImpl
  uint32_t keys = 0, storage = 0, counter = 0;  // in the TensorImpl
  uint32_t data = 0, num_bytes = 0;             // in the StorageImpl
  uint32_t version = 0;                         // in the version counter
  uint64_t plain_keys = 0, inference_keys = 0;  // of plain tensors, and of those of inference mode
  // The same of tensors on a GPU; unknown until there is one.
  uint64_t gpu_plain_keys = ~uint64_t{0}, gpu_inference_keys = ~uint64_t{0};
};
inline TensorLayout tensor_layout;

template <class Value>
Value value_at(const void* base, uint32_t offset_bytes) {
  Value value;
  std::memcpy(&value, static_cast<const char*>(base) + offset_bytes, sizeof value);
  return value;
}

// The functions below need a known layout.

inline const char* impl_of(PyObject* tensor) {
  return value_at<const char*>(tensor, tensor_layout.impl);
}

// Whether a tensor's memory holds the elements as they are: not negated, conjugated, all zero
// without memory, quantised, or wrapped by a transform. An unknown key counts as one of those.
inline bool is_plain(const char* impl) {
  const auto keys = value_at<uint64_t>(impl, tensor_layout.keys);
  return keys == tensor_layout.plain_keys || keys == tensor_layout.inference_keys;
}

inline bool is_plain_on_gpu(const char* impl) {
  const auto keys = value_at<uint64_t>(impl, tensor_layout.keys);
  return keys == tensor_layout.gpu_plain_keys || keys == tensor_layout.gpu_inference_keys;
}

// Whether the storage reaches to `end`; users resize storages under tensors that keep their shape.
inline bool storage_reaches(const char* impl, const void* end) {
  const auto* storage = value_at<const char*>(impl, tensor_layout.storage);
  const auto begin = value_at<uintptr_t>(storage, tensor_layout.data);
  // An unknown size has the highest bit set.
  const auto num_bytes = value_at<int64_t>(storage, tensor_layout.num_bytes);
  return int64_t(reinterpret_cast<uintptr_t>(end) - begin) <= num_bytes;
}

// Tell autograd that the tensor is written, as torch's in-place functions do. Tensors of inference
// mode have no counter.
inline void bump_version(const char* impl) {
  auto* counter = value_at<char*>(impl, tensor_layout.counter);
  if (!counter) return;
  auto* version = reinterpret_cast<uint32_t*>(counter + tensor_layout.version);
  // Not one locked instruction, which would wait for all stores before it. Where two threads write
  // views of one tensor at the same instant their steps may become one; the version still rises.
  __atomic_store_n(version, __atomic_load_n(version, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

// Learn the layout from samples, which are tuples. A sample has a tensor, and the addresses of its
// TensorImpl, its StorageImpl and its memory. Then come the storage's bytes, the dispatch keys, a
// number for the version counter and the version. Tensors that share a counter have the same
// number; 0 is none. The first sample is a plain tensor, the second one of inference mode. True if
// all was found; else nothing is known. A new reference; null with a Python error.
PyObject* learn_tensor_layout(PyObject* module, PyObject* samples);
// Learn the dispatch keys of tensors on a GPU: a plain one's and those of one of inference mode.
PyObject* learn_gpu_keys(PyObject* module, PyObject* keys);

}  // namespace fastcoll
