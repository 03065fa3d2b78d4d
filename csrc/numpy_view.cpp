// SPDX-License-Identifier: Apache-2.0
// A file of its own: pybind11's NumPy support takes long to compile.
#include "numpy_view.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <iterator>

namespace py = pybind11;

namespace fastcoll {

namespace {

PyTypeObject* array_type = nullptr;
PyTypeObject* integers[16];
size_t num_integers = 0;

std::optional<DType> dtype_of(const py::dtype& dtype) {
  if (dtype.byteorder() != '=' && dtype.byteorder() != '|') return std::nullopt;
  const auto sized = [&](DType one, DType two, DType four, DType eight) -> std::optional<DType> {
    switch (dtype.itemsize()) {
      case 1:
        return one;
      case 2:
        return two;
      case 4:
        return four;
      case 8:
        return eight;
      default:
        return std::nullopt;
    }
  };
  switch (dtype.kind()) {
    case 'b':
      return DType::boolean;
    case 'i':
      return sized(DType::int8, DType::int16, DType::int32, DType::int64);
    case 'u':
      return sized(DType::uint8, DType::uint16, DType::uint32, DType::uint64);
    case 'f':
      if (dtype.itemsize() == 1) return std::nullopt;
      return sized({}, DType::float16, DType::float32, DType::float64);
    case 'c':
      if (dtype.itemsize() == 8) return DType::complex64;
      if (dtype.itemsize() == 16) return DType::complex128;
      return std::nullopt;
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

std::optional<TensorView> see(py::array& array, bool takes_strided) {
  if (!array.writeable()) return std::nullopt;
  if (!takes_strided && !(array.flags() & py::array::c_style)) return std::nullopt;
  const std::optional<DType> dtype = dtype_of(array.dtype());
  if (!dtype) return std::nullopt;
  static_assert(sizeof(py::ssize_t) == sizeof(int64_t));
  return TensorView{static_cast<std::byte*>(array.mutable_data()), uint64_t(array.size()), *dtype,
                    int32_t(array.ndim()), reinterpret_cast<const int64_t*>(array.shape())};
}

}  // namespace

std::optional<TensorView> view_array(PyObject* object) {
  auto array = py::reinterpret_borrow<py::array>(object);
  return see(array, false);
}

std::optional<StridedView> view_strided_array(PyObject* object) {
  auto array = py::reinterpret_borrow<py::array>(object);
  const std::optional<TensorView> seen = see(array, true);
  if (!seen || seen->ndim > StridedView::kMostDims) return std::nullopt;
  StridedView view{*seen, {}};
  std::copy_n(array.strides(), seen->ndim, view.strides_bytes.begin());
  return view;
}

}  // namespace fastcoll
