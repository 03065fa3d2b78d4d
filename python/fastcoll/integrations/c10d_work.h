// SPDX-License-Identifier: Apache-2.0
// The handles of calls that c10d_backend.cpp has started, and their errors: part of that one
// source, compiled with it.
#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <utility>

#include "c10d_threads.h"
#include "core_api.h"
#include "gil.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// The error of a call. Wherever torch turns it into a Python error, that has the class of its kind.
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
    const fastcoll::GilHeld gil;
    core->set_python_error(&failure_);
    throw py::error_already_set();
  }

 private:
  FastcollFailure failure_;
};

// The same of an error that Python raised: of its class, and raised afresh whenever it is read.
class PythonFailed final : public torch::PyTorchError {
 public:
  explicit PythonFailed(const py::error_already_set& error)  // with the GIL
      : torch::PyTorchError(std::string(py::str(error.value()))),
        type_(error.type().inc_ref().ptr()) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* const type_;  // never let go of: that would take the GIL
};

// A wait must not keep the GIL, whether the caller holds it or not.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<fastcoll::GilAway> released_;
};

void raise_unless_done(FastcollOutcome outcome, const FastcollFailure& failure) {
  if (outcome == kFastcollInterrupted) {
    const fastcoll::GilHeld gil;
    throw py::error_already_set();
  }
  if (outcome == kFastcollFailed) CallFailed(failure).raise();
}

// The error that a call raised, or None. For Python: torch 2.11 has Work.exception, but can't hand
// it over.
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

// `what` is the kind of call that goes on, for the text.
[[noreturn]] void raise_late(const char* what, Milliseconds timeout) {
  const fastcoll::GilHeld gil;
  const std::string text =
      c10::str("the ", what, " is not complete after ", seconds(timeout), " s; it goes on");
  py::set_error(py::module_::import("fastcoll.errors").attr("CollectiveTimeout"), text.c_str());
  throw py::error_already_set();
}

c10::intrusive_ptr<c10::ivalue::Future> future_of_tensors() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

// Complete a future with the tensors that a call returns, or the error that it raises.
template <class Result>
void complete(c10::ivalue::Future& future, const Result& result) {
  Tensors outputs;
  std::exception_ptr error;
  try {
    outputs = result();
  } catch (const py::error_already_set& raised) {
    const fastcoll::GilHeld gil;
    error = std::make_exception_ptr(PythonFailed(raised));
  } catch (...) {
    error = std::current_exception();
  }
  if (error) future.setError(error);
  else future.markCompleted(c10::IValue(std::move(outputs)));
}

void raise_signals() {
  const fastcoll::GilHeld gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A call that the core carries out.
class NativeWork final : public c10d::Work {
 public:
  // `owner` keeps the group.
  NativeWork(c10::intrusive_ptr<c10d::Backend> owner, FastcollGroup* group, c10d::OpType type,
             const char* title, const Tensors& inputs, const Tensors& outputs)
      : Work(owner->getRank(), type, title, inputs),
        call_(std::make_shared<Call>(std::move(owner), group, inputs, outputs)) {}

  // Null where it has to go behind calls that are queued in Python.
  static WorkPtr queue(c10::intrusive_ptr<NativeWork> work, FastcollQueuedCall call) {
    work->call_->handle = c10::weak_intrusive_ptr<c10d::Work>(WorkPtr(work));
    call.work = new std::shared_ptr<Call>(work->call_);
    call.over = over;
    call.drop = drop;
    FastcollFailure failure;
    const auto outcome = core->queue(work->call_->group, &call, &work->place_, &failure);
    if (outcome != kFastcollDone) work->call_->end();
    raise_unless_done(outcome, failure);
    return outcome == kFastcollDone ? WorkPtr(work) : WorkPtr();
  }

  bool isCompleted() override {
    if (!Work::isCompleted()) core->go_on(call_->group);
    return Work::isCompleted();
  }

  bool wait(Milliseconds timeout) override {
    const WithoutGil without_gil;
    constexpr Milliseconds kLook(50);  // for Ctrl-C
    const auto start = std::chrono::steady_clock::now();
    if (!Work::isCompleted()) {
      FastcollFailure failure;
      raise_unless_done(core->finish(call_->group, place_, seconds(timeout), &failure), failure);
    }
    auto waited = std::chrono::steady_clock::now() - start;
    std::unique_lock lock(mutex_);
    while (!cv_.wait_for(lock, kLook, [this] { return completed_; })) {
      lock.unlock();
      raise_signals();
      waited += kLook;  // not the time in which a paused container stood still
      if (timeout > kNoTimeout && waited >= timeout) raise_late("call", timeout);
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
    return call_->outputs;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // Waiting for the future does not go on with the call.
    if (!call_->is_over) {
      const WithoutGil without_gil;
      core->linger(call_->group, place_);
    }
    bool is_over;
    {
      const std::lock_guard lock(call_->mutex);
      if (call_->future) return call_->future;
      call_->future = future_of_tensors();
      is_over = call_->is_over;
    }
    if (is_over) call_->complete(*call_->future);
    return call_->future;
  }

  // The handle is gone, and the call was under way, or else this would be destroyed at once.
  void release_resources() override {
    bool is_over;
    {
      const std::lock_guard lock(call_->mutex);
      is_over = call_->is_over;
      // The profiler's event ends with the call.
      if (!is_over) call_->at_end = std::exchange(recordFunctionEndCallback_, nullptr);
    }
    if (is_over) finish();
    else core->go_on(call_->group);  // no thread waits for it any more
  }

 private:
  // All that the call needs until it is over. It outlives the handle, if that goes first.
  struct Call {
    Call(c10::intrusive_ptr<c10d::Backend> its_owner, FastcollGroup* its_group, Tensors its_inputs,
         Tensors its_outputs)
        : owner(std::move(its_owner)),
          group(its_group),
          inputs(std::move(its_inputs)),
          outputs(std::move(its_outputs)) {}

    // Mark the call as over. Return the handle, the future and the callback to notify.
    std::tuple<WorkPtr, c10::intrusive_ptr<c10::ivalue::Future>, std::function<void()>> end() {
      c10::weak_intrusive_ptr<c10d::Work> weak{WorkPtr()};
      const std::lock_guard lock(mutex);
      is_over = true;
      std::swap(weak, handle);
      return {weak.lock(), future, std::exchange(at_end, nullptr)};
    }

    void complete(c10::ivalue::Future& its_future) const {
      if (error) its_future.setError(error);
      else its_future.markCompleted(c10::IValue(outputs));
    }

    const c10::intrusive_ptr<c10d::Backend> owner;
    FastcollGroup* const group;
    const Tensors inputs, outputs;
    c10::weak_intrusive_ptr<c10d::Work> handle{WorkPtr()};  // a NativeWork
    std::mutex mutex;
    std::atomic<bool> is_over{false};
    std::exception_ptr error;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::function<void()> at_end;
  };

  // For the core. Releasing tensors may take the GIL, so `over` releases none.
  static void over(void* its_call, const FastcollFailure* failure) {
    const std::shared_ptr<Call>& call = *static_cast<std::shared_ptr<Call>*>(its_call);
    if (failure) call->error = std::make_exception_ptr(CallFailed(*failure));
    const auto [handle, future, at_end] = call->end();
    if (handle) static_cast<NativeWork*>(handle.get())->finish(call->error);
    if (at_end) at_end();
    if (!future) return;
    try {
      // Not in this thread: a callback may start further calls of the group and wait for them.
      run_in_thread([call, future = future] { call->complete(*future); });
    } catch (const std::system_error&) {  // there is no other one
      call->complete(*future);
    }
  }
  static void drop(void* its_call) { delete static_cast<std::shared_ptr<Call>*>(its_call); }

  const std::shared_ptr<Call> call_;
  const void* place_ = nullptr;  // in the core's queue
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
    const fastcoll::GilHeld gil;
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
  std::exception_ptr exception() const override {
    const fastcoll::GilHeld gil;
    const py::object error = work_.attr("exception")();
    if (error.is_none()) return nullptr;
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
  }

  // Of tensors: Python's own holds an object, which torch's C++ takes nothing from (DDP's built-in
  // hooks). One of a GPU stays as it is: its waiters wait in their stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto inner = inner_->getFuture();
    if (!inner->devices().empty()) return inner;
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future_ = future_of_tensors();
    }
    inner->addCallback([self = c10::intrusive_ptr<PythonWork>::reclaim_copy(this),
                        future = future_](c10::ivalue::Future&) {
      complete(*future, [&] { return self->result(); });
    });
    return future_;
  }

 private:
  template <class T>
  T ask(const char* method) const {
    const fastcoll::GilHeld gil;
    return work_.attr(method)().template cast<T>();
  }

  WorkPtr inner_;
  py::object work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace
