// SPDX-License-Identifier: Apache-2.0
#include "tensor_view.h"

#include <iterator>

#include "numpy_view.h"
#include "weak.h"

namespace fastcoll {

namespace {

// DLPack's binary interface, version 1: as far as it is used here. https://dmlc.github.io/dlpack
struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};
struct DLPackExchangeApi {
  DLPackVersion version;
  DLPackExchangeApi* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  void* current_work_stream;
};
constexpr int32_t kDLCPU = 1;

struct KnownType {
  PyTypeObject* type;
  const DLPackExchangeApi* api;
};
KnownType known_types[4];
size_t num_known_types = 0;

const DLPackExchangeApi* exchange_api(PyTypeObject* type) {
  for (size_t i = 0; i < num_known_types; ++i)
    if (known_types[i].type == type) return known_types[i].api;
  return nullptr;
}

// Tensors whose signs are stored, not only marked (the imaginary part of a conjugated number, what
// torch._neg_view returns; a conjugated number's own). DLPack does not show the marks, and asking
// torch takes as long as all else on the fast path, so each tensor is asked once. A weak reference
// vouches for the object at an address: it leads to a tensor only as long as that one lives.
PyObject* plain_tensors[8192];  // lists have hundreds; of 500 in 2048 places up to 50 shared one

PyObject*& place_of(PyObject* tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor);
  return plain_tensors[(address >> 4 ^ address >> 15) % std::size(plain_tensors)];
}

bool says_no(PyObject* tensor, PyObject* question) {
  PyObject* answer = PyObject_CallMethodNoArgs(tensor, question);
  Py_XDECREF(answer);
  return answer == Py_False;
}

bool is_plain(PyObject* tensor, DType dtype) {
  PyObject*& place = place_of(tensor);
  if (place && leads_to(place, tensor)) return true;
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  const bool is_stored =
      says_no(tensor, is_neg) && (dtype_kind(dtype) != Kind::complex || says_no(tensor, is_conj));
  PyObject* reference = is_stored ? PyWeakref_NewRef(tensor, nullptr) : nullptr;
  PyErr_Clear();
  if (!reference) return false;
  Py_XSETREF(place, reference);
  return true;
}

std::optional<DType> dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code << 8 | type.bits) {
    case 0 << 8 | 8:
      return DType::int8;
    case 0 << 8 | 16:
      return DType::int16;
    case 0 << 8 | 32:
      return DType::int32;
    case 0 << 8 | 64:
      return DType::int64;
    case 1 << 8 | 8:
      return DType::uint8;
    case 1 << 8 | 16:
      return DType::uint16;
    case 1 << 8 | 32:
      return DType::uint32;
    case 1 << 8 | 64:
      return DType::uint64;
    case 2 << 8 | 16:
      return DType::float16;
    case 2 << 8 | 32:
      return DType::float32;
    case 2 << 8 | 64:
      return DType::float64;
    case 4 << 8 | 16:
      return DType::bfloat16;
    case 5 << 8 | 64:
      return DType::complex64;
    case 5 << 8 | 128:
      return DType::complex128;
    case 6 << 8 | 8:
      return DType::boolean;
    case 10 << 8 | 8:
      return DType::float8_e4m3fn;
    case 12 << 8 | 8:
      return DType::float8_e5m2;
    default:
      return std::nullopt;
  }
}

}  // namespace

void add_tensor_type(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule && num_known_types < sizeof known_types / sizeof *known_types) {
    const auto* api =
        static_cast<const DLPackExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (api && api->version.major != 1) api = api->prev_api;
    if (api) {
      Py_INCREF(type);
      known_types[num_known_types++] = {type, api};
    }
  }
  Py_XDECREF(capsule);
  PyErr_Clear();  // without the table every call takes the Python path
}

void expect_tensor(PyObject* object) {
  if (Py_TYPE(object)->tp_basicsize < Py_ssize_t(sizeof(PyObject) + sizeof(void*))) return;
  // Where torch has the address of what the object stands for. A wrong guess costs nothing.
  const char* const tensor = *reinterpret_cast<char* const*>(object + 1);
  constexpr int kLine = 64, kTensorBytes = 4 * kLine;
  for (int at = 0; at < kTensorBytes; at += kLine) __builtin_prefetch(tensor + at);
}

namespace {

// Strides in elements; null: contiguous. Contiguous ones alone, unless `takes_strided`.
struct Seen {
  TensorView tensor;
  const int64_t* strides;
};

[[gnu::always_inline]] inline std::optional<Seen> see(PyObject* object, bool takes_strided) {
  const DLPackExchangeApi* api = exchange_api(Py_TYPE(object));
  if (!api) return std::nullopt;
  DLTensor tensor;
  if (api->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  if (!dtype || tensor.device.device_type != kDLCPU) return std::nullopt;
  int64_t numel = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    // Where there are no elements, no stride matters.
    if (!takes_strided && tensor.strides && tensor.shape[i] != 1 && tensor.strides[i] != numel &&
        numel != 0)
      return std::nullopt;
    numel *= tensor.shape[i];
  }
  if ((!tensor.data && numel != 0) || !is_plain(object, *dtype)) return std::nullopt;
  return Seen{{static_cast<std::byte*>(tensor.data) + tensor.byte_offset, uint64_t(numel), *dtype,
               tensor.ndim, tensor.shape},
              tensor.strides};
}

}  // namespace

std::optional<TensorView> view_tensor(PyObject* object) {
  if (is_array(object)) return view_array(object);
  const std::optional<Seen> seen = see(object, false);
  return seen ? std::optional(seen->tensor) : std::nullopt;
}

std::optional<StridedView> view_strided(PyObject* object) {
  if (is_array(object)) return view_strided_array(object);
  const std::optional<Seen> seen = see(object, true);
  if (!seen || !seen->strides || seen->tensor.ndim > StridedView::kMostDims) return std::nullopt;
  StridedView view{seen->tensor, {}};
  const auto elem_bytes = int64_t(dtype_size(seen->tensor.dtype));
  for (int i = 0; i < seen->tensor.ndim; ++i)
    view.strides_bytes[size_t(i)] = seen->strides[i] * elem_bytes;
  return view;
}

}  // namespace fastcoll
