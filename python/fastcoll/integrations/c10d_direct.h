// SPDX-License-Identifier: Apache-2.0
// The operators of c10d_operators.h as functions of Python, for the code that torch's compiler
// writes (lowered.py). Part of c10d_backend.cpp, compiled with it.
//
// A call from Python by torch.ops boxes its arguments for torch's dispatcher, which takes about as
// long as a small all_reduce. Compiled code needs the operator's body alone. Other calls go by
// torch.ops: under a profiler, a mode of torch, or a transform of torch.func. So do those with a
// derivative, with a tensor of a subclass, or with a tensor that the bodies leave to Python.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "c10d_operators.h"

namespace {

// An argument; nothing where its type is another one.
template <class Term>
std::optional<Term> read_term(PyObject* object);

template <>
std::optional<at::Tensor> read_term(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return std::nullopt;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return is_plain(tensor) ? std::optional(tensor) : std::nullopt;
}
template <>
std::optional<OptionalTensor> read_term(PyObject* object) {
  if (object == Py_None) return OptionalTensor();
  const std::optional<at::Tensor> tensor = read_term<at::Tensor>(object);
  return tensor ? std::optional<OptionalTensor>(*tensor) : std::nullopt;
}
template <>
std::optional<double> read_term(PyObject* object) {
  return PyFloat_CheckExact(object) ? std::optional(PyFloat_AS_DOUBLE(object)) : std::nullopt;
}
template <>
std::optional<bool> read_term(PyObject* object) {
  return PyBool_Check(object) ? std::optional(object == Py_True) : std::nullopt;
}
template <>
std::optional<int64_t> read_term(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? std::optional(value) : std::nullopt;
}
template <>
std::optional<std::string> read_term(PyObject* object) {
  Py_ssize_t length = 0;
  if (!PyUnicode_CheckExact(object)) return std::nullopt;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);
  if (!text) throw python_error();
  return std::string(text, size_t(length));
}

PyObject* to_python(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }
PyObject* to_python(const Tensors& tensors) { return py::cast(tensors).release().ptr(); }

// Whether a profiler, a mode or a transform has a say in each operator's call.
bool is_watched() {
  const auto is_included = [](c10::DispatchKey key) {
    return c10::impl::tls_is_dispatch_key_included(key);
  };
  return at::hasCallbacks() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         is_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

template <const char* kName, class Result, class... Terms>
class DirectCall {
 public:
  // operator_: what torch.ops has of this name.
  static py::object make(Result (*body)(Terms...), PyObject* operator_) {
    body_ = body;
    boxed_ = Py_NewRef(operator_);
    static PyMethodDef method{
        kName, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL,
        "The operator of this name in torch.ops.fastcoll, without torch's dispatcher."};
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  }

 private:
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
    HANDLE_TH_ERRORS
    if (num_args == Py_ssize_t(sizeof...(Terms)) && !is_watched())
      if (PyObject* result = run(args, std::index_sequence_for<Terms...>())) return result;
    return PyObject_Vectorcall(boxed_, args, size_t(num_args), nullptr);
    END_HANDLE_TH_ERRORS
  }

  // Null where the call is torch's.
  template <size_t... kIdx>
  static PyObject* run(PyObject* const* args, std::index_sequence<kIdx...>) {
    const std::tuple terms{read_term<std::decay_t<Terms>>(args[kIdx])...};
    if (!(std::get<kIdx>(terms) && ...)) return nullptr;
    if ((wants_derivative(*std::get<kIdx>(terms)) || ...)) return nullptr;
    const at::AutoDispatchBelowAutograd below;
    return to_python(body_(*std::get<kIdx>(terms)...));
  }

  static inline Result (*body_)(Terms...) = nullptr;
  static inline PyObject* boxed_ = nullptr;
};

// ---- serving them ----

// Of one dispatch key. Never destroyed: torch's dispatcher may end earlier.
torch::Library& library_of(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "fastcoll", key, __FILE__, __LINE__);
}

// Returns the direct function.
template <const char* kName, class Result, class... Terms>
py::object serve(torch::Library& cpu, torch::Library& autograd, const py::dict& operators,
                 Result (*body)(Terms...)) {
  cpu.impl(kName, body);
  autograd.impl(kName, &with_gradient<kName, Result, Terms...>);
  return DirectCall<kName, Result, Terms...>::make(body, operators[kName].ptr());
}

py::dict serve_all(const py::dict& operators) {
  torch::Library& cpu = library_of(c10::DispatchKey::CPU);
  torch::Library& autograd = library_of(c10::DispatchKey::AutogradCPU);
  py::dict direct;
  direct[names::kAllReduce] = serve<names::kAllReduce>(cpu, autograd, operators, &all_reduce);
  direct[names::kReduceScatter] =
      serve<names::kReduceScatter>(cpu, autograd, operators, &reduce_scatter);
  direct[names::kAllGather] = serve<names::kAllGather>(cpu, autograd, operators, &all_gather);
  direct[names::kAllReduceRmsNorm] =
      serve<names::kAllReduceRmsNorm>(cpu, autograd, operators, &all_reduce_rms_norm);
  return direct;
}

// operators: what torch.ops has, by name. Returns the direct functions by name.
py::dict serve_operators(const py::dict& operators, py::dict functions, py::dict gradients,
                         py::object named) {
  operator_groups().serve(std::move(functions), std::move(gradients), std::move(named));
  static const auto* direct = new py::dict(serve_all(operators));  // never destroyed
  return *direct;
}

}  // namespace
