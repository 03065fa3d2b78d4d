// SPDX-License-Identifier: Apache-2.0
// Reads NumPy's arrays without NumPy's headers, which are absent when fastcoll is built. It does
// without pybind11, too, which takes seconds to compile. The fields below are in NumPy's stable
// ABI, alike in 1.x and 2.x.
#include "python/numpy_view.h"

#include <algorithm>
#include <iterator>

namespace fastcoll {

namespace {

PyTypeObject* array_type = nullptr;
PyTypeObject* integers[16];
size_t num_integers = 0;

// PyArray_Descr and PyArrayObject_fields of numpy/ndarraytypes.h, as far as they are read here.
struct ArrayDescr {
  PyObject_HEAD PyTypeObject* typeobj;
  char kind, type, byteorder, former_flags;
  int type_num;
};

struct ArrayFields {
  PyObject_HEAD char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  ArrayDescr* descr;
  int flags;
};

constexpr int kCContiguous = 0x0001;  // NPY_ARRAY_C_CONTIGUOUS
constexpr int kWriteable = 0x0400;    // NPY_ARRAY_WRITEABLE

std::optional<DType> dtype_of(const ArrayDescr& descr) {
  constexpr bool kLongIs64 = sizeof(long) == 8;
  // The order of NPY_TYPES: bool, byte, ubyte, short, ..., ulonglong, float, double.
  constexpr DType kNumbers[] = {
      DType::boolean,
      DType::int8,
      DType::uint8,
      DType::int16,
      DType::uint16,
      DType::int32,
      DType::uint32,
      kLongIs64 ? DType::int64 : DType::int32,
      kLongIs64 ? DType::uint64 : DType::uint32,
      DType::int64,
      DType::uint64,
      DType::float32,
      DType::float64,
  };
  constexpr int kComplex64 = 14, kComplex128 = 15, kHalf = 23;
  if (descr.byteorder != '=' && descr.byteorder != '|') return std::nullopt;
  if (descr.type_num >= 0 && descr.type_num < int(std::size(kNumbers)))
    return kNumbers[descr.type_num];
  switch (descr.type_num) {
    case kComplex64:
      return DType::complex64;
    case kComplex128:
      return DType::complex128;
    case kHalf:
      return DType::float16;
    default:  // text, objects; the small floats of ml_dtypes, which Python knows by name
      return std::nullopt;
  }
}

}  // namespace

void set_array_type(PyTypeObject* type) {
  Py_INCREF(type);
  Py_XSETREF(array_type, type);
}

void add_array_integer(PyTypeObject* type) {
  if (is_array_integer(type) || num_integers == std::size(integers)) return;
  Py_INCREF(type);
  integers[num_integers++] = type;
}

bool is_array_integer(PyTypeObject* type) {
  return std::find(integers, integers + num_integers, type) != integers + num_integers;
}

bool is_array(PyObject* object) { return Py_TYPE(object) == array_type; }

namespace {

std::optional<TensorView> see(const ArrayFields& array, bool takes_strided) {
  if (!(array.flags & kWriteable)) return std::nullopt;
  if (!takes_strided && !(array.flags & kCContiguous)) return std::nullopt;
  const std::optional<DType> dtype = dtype_of(*array.descr);
  if (!dtype) return std::nullopt;
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  uint64_t numel = 1;
  for (int dim = 0; dim < array.nd; ++dim) numel *= uint64_t(array.dimensions[dim]);
  return TensorView{reinterpret_cast<std::byte*>(array.data), numel, *dtype, int32_t(array.nd),
                    reinterpret_cast<const int64_t*>(array.dimensions)};
}

const ArrayFields& fields(PyObject* array) { return *reinterpret_cast<ArrayFields*>(array); }

}  // namespace

std::optional<TensorView> view_array(PyObject* array) { return see(fields(array), false); }

std::optional<StridedView> view_strided_array(PyObject* array) {
  const std::optional<TensorView> seen = see(fields(array), true);
  if (!seen || seen->ndim > StridedView::kMostDims) return std::nullopt;
  StridedView view{*seen, {}};
  std::copy_n(fields(array).strides, seen->ndim, view.strides_bytes.begin());
  return view;
}

}  // namespace fastcoll
