// SPDX-License-Identifier: Apache-2.0
// The handles of calls that c10d_backend.cpp has started, and what they raise: part of that one
// source, compiled with it.
#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d_threads.h"
#include "core_api.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// What a call raises: the Python class of its kind, wherever torch turns it into a Python error.
class CallFailed final : public torch::PyTorchError {
 public:
  explicit CallFailed(const FastcollFailure& failure)
      : torch::PyTorchError(failure.text), failure_(failure) {}
  PyObject* python_type() override {
    core->set_python_error(&failure_);
    const py::error_already_set error;
    return error.type().ptr();  // the module of the errors keeps it
  }
  // The error itself, which knows the ranks at fault, too.
  [[noreturn]] void raise() const {
    const py::gil_scoped_acquire gil;
    core->set_python_error(&failure_);
    throw py::error_already_set();
  }

 private:
  FastcollFailure failure_;
};

// A wait must not keep the GIL, whoever called.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

void raise_unless_done(FastcollOutcome outcome, const FastcollFailure& failure) {
  if (outcome == kFastcollInterrupted) {
    const py::gil_scoped_acquire gil;
    throw py::error_already_set();
  }
  if (outcome == kFastcollFailed) CallFailed(failure).raise();
}

// What a call raised, or None: for Python, as torch 2.11 has Work.exception, but can't hand it
// over.
py::object error_of(const c10d::Work& work) {
  const std::exception_ptr raised = work.exception();
  if (!raised) return py::none();
  try {
    try {
      std::rethrow_exception(raised);
    } catch (const CallFailed& failed) {
      failed.raise();
    }
  } catch (const py::error_already_set& error) {
    return error.value();
  }
}

double seconds(Milliseconds time) { return double(time.count()) * 1e-3; }

// what: of what kind it is that goes on.
[[noreturn]] void raise_late(const char* what, Milliseconds timeout) {
  const py::gil_scoped_acquire gil;
  const std::string text =
      c10::str("the ", what, " is not complete after ", seconds(timeout), " s; it goes on");
  py::set_error(py::module_::import("fastcoll.errors").attr("CollectiveTimeout"), text.c_str());
  throw py::error_already_set();
}

c10::intrusive_ptr<c10::ivalue::Future> future_of_tensors() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

void raise_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A call that a thread of the core carries out.
class NativeWork final : public c10d::Work {
 public:
  NativeWork(int rank, c10d::OpType type, const char* title, Tensors inputs, Tensors outputs)
      : Work(rank, type, title, inputs), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  // For the core's queue, which has a reference of its own.
  static void over(void* work, const FastcollFailure* failure) {
    static_cast<NativeWork*>(work)->complete(failure);
  }
  static void drop(void* work) {
    c10::intrusive_ptr<NativeWork>::reclaim(static_cast<NativeWork*>(work));
  }

  bool wait(Milliseconds timeout) override {
    const WithoutGil without_gil;
    constexpr Milliseconds kLook(50);  // for Ctrl-C
    const auto end = std::chrono::steady_clock::now() + timeout;
    std::unique_lock lock(mutex_);
    while (!cv_.wait_for(lock, kLook, [this] { return completed_; })) {
      lock.unlock();
      raise_signals();
      if (timeout > kNoTimeout && std::chrono::steady_clock::now() >= end)
        raise_late("call", timeout);
      lock.lock();
    }
    const std::exception_ptr error = exception_;
    lock.unlock();
    if (error) try {
        std::rethrow_exception(error);
      } catch (const CallFailed& failed) {
        failed.raise();
      }
    return true;
  }

  Tensors result() override {
    wait(kNoTimeout);
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    bool is_settled;
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future_ = future_of_tensors();
      is_settled = is_settled_;
    }
    if (is_settled) settle(*future_);
    return future_;
  }

 private:
  void complete(const FastcollFailure* failure) {
    if (failure) error_ = std::make_exception_ptr(CallFailed(*failure));
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex_);
      is_settled_ = true;
      future = future_;
    }
    finish(error_);
    // Not in this thread: a callback may start further calls of the group and wait for them.
    if (future)
      run_in_thread([self = c10::intrusive_ptr<NativeWork>::reclaim_copy(this), future] {
        self->settle(*future);
      });
  }

  void settle(c10::ivalue::Future& future) {
    if (error_) future.setError(error_);
    else future.markCompleted(c10::IValue(outputs_));
  }

  const Tensors inputs_, outputs_;  // kept alive
  std::exception_ptr error_;
  bool is_settled_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A call that Python carries out: torch's own forwarding knows wait and get_future only.
class PythonWork final : public c10d::Work {
 public:
  PythonWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs, py::object work)
      : Work(rank, type, title, inputs), inner_(work.cast<WorkPtr>()), work_(std::move(work)) {}
  ~PythonWork() override {
    finish();
    if (!Py_IsInitialized()) {
      work_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    work_ = py::object();
  }

  bool wait(Milliseconds timeout) override {
    const WithoutGil without_gil;
    const bool done = inner_->wait(timeout);
    finish();  // the profiler's event ends
    return done;
  }
  void synchronize() override { ask<bool>("wait"); }
  bool isCompleted() override { return ask<bool>("is_completed"); }
  bool isSuccess() const override { return ask<bool>("is_success"); }
  int sourceRank() const override { return ask<int>("source_rank"); }
  Tensors result() override { return ask<Tensors>("result"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  std::exception_ptr exception() const override {
    const py::gil_scoped_acquire gil;
    const py::object error = work_.attr("exception")();
    if (error.is_none()) return nullptr;
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
  }

 private:
  template <class T>
  T ask(const char* method) const {
    const py::gil_scoped_acquire gil;
    return work_.attr(method)().template cast<T>();
  }

  WorkPtr inner_;
  py::object work_;
};

}  // namespace
