// SPDX-License-Identifier: Apache-2.0
#include "python/tensor_view.h"

#include <algorithm>
#include <iterator>

#include "python/numpy_view.h"
#include "python/tensor_layout.h"

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
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};
constexpr int32_t kDLCPU = 1, kDLCUDA = 2;

const DLPackExchangeApi* exchange_apis[std::size(tensor_types)];  // by type

const DLPackExchangeApi* exchange_api(PyTypeObject* type) {
  for (size_t i = 0; i < std::size(tensor_types); ++i)
    if (tensor_types[i] == type) return exchange_apis[i];
  return nullptr;
}

// By DLPack's code of a kind, and by bytes.
struct DTypeTable {
  static constexpr unsigned kCodes = 13, kMostBytes = 16;
  std::optional<DType> dtypes[kCodes][kMostBytes + 1];

  constexpr DTypeTable() : dtypes{} {
    auto& ints = dtypes[0];
    ints[1] = DType::int8, ints[2] = DType::int16, ints[4] = DType::int32, ints[8] = DType::int64;
    auto& uints = dtypes[1];
    uints[1] = DType::uint8, uints[2] = DType::uint16, uints[4] = DType::uint32;
    uints[8] = DType::uint64;
    auto& floats = dtypes[2];
    floats[2] = DType::float16, floats[4] = DType::float32, floats[8] = DType::float64;
    dtypes[4][2] = DType::bfloat16;
    dtypes[5][8] = DType::complex64, dtypes[5][16] = DType::complex128;
    dtypes[6][1] = DType::boolean;
    dtypes[10][1] = DType::float8_e4m3fn;
    dtypes[12][1] = DType::float8_e5m2;
  }
};
constexpr DTypeTable kDTypesByCode;

std::optional<DType> dtype_of(const DLDataType& type) {
  constexpr unsigned kBits = 8;
  const unsigned num_bytes = type.bits / kBits;
  if (type.lanes != 1 || type.code >= DTypeTable::kCodes || type.bits % kBits != 0 ||
      num_bytes > DTypeTable::kMostBytes)
    return std::nullopt;
  return kDTypesByCode.dtypes[type.code][num_bytes];
}

}  // namespace

void add_tensor_type(PyTypeObject* type) {
  if (!tensor_layout.impl) return;  // without it every call takes the Python path
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  auto* const place = std::find(std::begin(tensor_types), std::end(tensor_types), nullptr);
  if (capsule && place != std::end(tensor_types)) {
    const auto* api =
        static_cast<const DLPackExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (api && api->version.major != 1) api = api->prev_api;
    if (api) {
      Py_INCREF(type);
      exchange_apis[place - tensor_types] = api;
      *place = type;
    }
  }
  Py_XDECREF(capsule);
  PyErr_Clear();  // without the table every call takes the Python path
}

void expect_tensor(PyObject* object) {
  if (!is_tensor(object)) return;
  const char* const impl = impl_of(object);
  constexpr int kLine = 64, kTensorBytes = 4 * kLine;
  for (int at = 0; at < kTensorBytes; at += kLine) __builtin_prefetch(impl + at);
}

namespace {

// Where a tensor has to lie.
struct OnCpu {
  static bool is_plain(const char* impl) { return fastcoll::is_plain(impl); }
  static bool has(const DLDevice& device) { return device.device_type == kDLCPU; }
};
struct OnGpu {
  int32_t id;
  static bool is_plain(const char* impl) { return is_plain_on_gpu(impl); }
  bool has(const DLDevice& device) const {
    return device.device_type == kDLCUDA && device.device_id == id;
  }
};

// Fills `view` in, if the object has one, and `strides` (in elements; null: contiguous). Takes only
// contiguous ones, unless `takes_strided`. In place: to copy words that were just written in pieces
// takes as long as all the rest.
template <class Place>
[[gnu::always_inline]] inline bool see(PyObject* object, const Place& place, bool takes_strided,
                                       TensorView& view, const int64_t*& strides) {
  const DLPackExchangeApi* api = exchange_api(Py_TYPE(object));
  if (!api) return false;
  // On every call: a tensor that was plain yesterday may have been given other memory since.
  const char* const impl = impl_of(object);
  if (!place.is_plain(impl)) return false;
  DLTensor tensor;
  if (api->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  if (!dtype || !place.has(tensor.device)) return false;
  int64_t numel = 1, last = 0;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    // Where there are no elements, no stride matters.
    if (!takes_strided && tensor.strides && tensor.shape[i] != 1 && tensor.strides[i] != numel &&
        numel != 0)
      return false;
    if (takes_strided && tensor.strides) last += tensor.strides[i] * (tensor.shape[i] - 1);
    numel *= tensor.shape[i];
  }
  view.ptr = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const int64_t reach = takes_strided && tensor.strides ? last + 1 : numel;
  if (numel != 0 &&
      (!tensor.data || !storage_reaches(impl, view.ptr + size_t(reach) * dtype_size(*dtype))))
    return false;
  view.numel = uint64_t(numel);
  view.dtype = *dtype;
  view.ndim = tensor.ndim;
  view.shape = tensor.shape;
  strides = tensor.strides;
  return true;
}

}  // namespace

std::optional<TensorView> view_tensor(PyObject* object) {
  std::optional<TensorView> view;  // the one that is returned, on every way: no copy is made
  const int64_t* strides;
  if (is_array(object)) view = view_array(object);
  else if (!see(object, OnCpu{}, false, view.emplace(), strides)) view.reset();
  return view;
}

std::optional<TensorView> view_on_gpu(PyObject* object, int device) {
  std::optional<TensorView> view;
  const int64_t* strides;
  if (!see(object, OnGpu{device}, false, view.emplace(), strides)) view.reset();
  return view;
}

std::optional<void*> current_stream(int device) {
  const DLPackExchangeApi* api = exchange_apis[0];  // torch has one for all its types
  void* stream = nullptr;
  if (!api || !api->current_work_stream) return std::nullopt;
  if (api->current_work_stream(kDLCUDA, device, &stream) == 0) return stream;
  PyErr_Clear();
  return std::nullopt;
}

std::optional<StridedView> view_strided(PyObject* object) {
  if (is_array(object)) return view_strided_array(object);
  std::optional<StridedView> view(std::in_place);
  const int64_t* strides;
  if (!see(object, OnCpu{}, true, view->tensor, strides) || !strides ||
      view->tensor.ndim > StridedView::kMostDims)
    return std::nullopt;
  const auto elem_bytes = int64_t(dtype_size(view->tensor.dtype));
  for (int i = 0; i < view->tensor.ndim; ++i)
    view->strides_bytes[size_t(i)] = strides[i] * elem_bytes;
  return view;
}

}  // namespace fastcoll
