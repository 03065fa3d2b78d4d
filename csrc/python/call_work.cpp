// SPDX-License-Identifier: Apache-2.0
#include "python/call_work.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "python/errors.h"
#include "python/host.h"
#include "python/kept_memory.h"

namespace fastcoll {

namespace {

// The kernel's view of it.
uint32_t* as_word(std::atomic<uint32_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

}  // namespace

void AsyncCall::set_steps(const Prepared& one) {
  first_ = {one.plan, one.operands(places)};
  is_prepared_long_ = copies.num_bytes() >= kGilFreeBytes;
}

void AsyncCall::set_steps(std::vector<PreparedList> lists) {
  lists_ = std::move(lists);
  is_prepared_long_ = copies.num_bytes() >= kGilFreeBytes;
  for (const PreparedList& one : lists_) {
    const Step step{one.plan, {.list = &one.list}};
    if (&one == &lists_.front()) first_ = step;
    else more_.push_back(step);
  }
}

void AsyncCall::over() noexcept {
  is_over_ = true;
  if (has_waiter_.exchange(0) != 0) futex_wake_all(as_word(has_waiter_));
  if (is_abandoned_) release_kept_soon();
}

void AsyncCall::abandon(const std::shared_ptr<AsyncCall>& call, PyObject* kept) {
  keep_until({call, &call->is_over_}, kept);
  call->is_abandoned_ = true;
  if (call->is_over_) release_kept();
}

bool AsyncCall::wait(double limit_s) {
  constexpr int64_t kLookUs = 50000;  // for Ctrl-C
  WaitedTime waited(limit_s);
  if (finish_here(group_.queue(), this, waited)) return true;
  PythonHost host;
  host.blocking();
  for (;;) {
    has_waiter_ = 1;
    if (is_over_) return true;
    if (waited.is_over()) return false;
    futex_wait(as_word(has_waiter_), 1, std::min(waited.left_us(), kLookUs));
    if (!is_over_ && host.interrupted()) throw Interrupted{};
  }
}

bool finish_here(CallQueue& queue, const QueuedCall* call, WaitedTime& waited) {
  WaiterHost<PythonHost> host(waited);
  const bool is_done = queue.finish(call, host);
  if (host.was_interrupted()) throw Interrupted{};
  return is_done;
}

namespace {

struct CallWork {
  PyObject ob_base;
  Caller caller;      // whose object this keeps
  PyObject* kept;     // the owner of the memory, until the call is known to be over
  PyObject* outputs;  // a list; null once the garbage collector has cleared it
  std::shared_ptr<AsyncCall> call;
};

PyTypeObject* subclass = nullptr;

CallWork& work_of(PyObject* object) { return *reinterpret_cast<CallWork*>(object); }

bool is_over(const CallWork& work) { return work.call && work.call->is_over(); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  const CallWork& work = work_of(self);
  if (!is_over(work)) return 0;
  Py_VISIT(work.kept);
  Py_VISIT(work.outputs);
  Py_VISIT(work.caller.object);
  return 0;
}

int clear(PyObject* self) {
  CallWork& work = work_of(self);
  if (!is_over(work)) return 0;
  Py_CLEAR(work.kept);
  Py_CLEAR(work.outputs);
  return 0;
}

void deallocate(PyObject* object) {
  PyObject_GC_UnTrack(object);
  CallWork& work = work_of(object);
  if (work.call->is_over()) {
    Py_XDECREF(work.kept);
    Py_XDECREF(work.outputs);
    Py_DECREF(work.caller.object);
  } else {
    PyObject* all = PyTuple_New(3);
    if (all) {
      PyTuple_SET_ITEM(all, 0, work.kept);
      PyTuple_SET_ITEM(all, 1, work.outputs);
      PyTuple_SET_ITEM(all, 2, work.caller.object);
    } else {  // no memory: the call may still write to its own, which stays for ever
      PyErr_Clear();
    }
    work.caller.group.resume_queue();  // no thread waits for it any more
    AsyncCall::abandon(work.call, all);
  }
  work.call.~shared_ptr();
  Py_TYPE(object)->tp_free(object);
}

PyObject* wait_at_most(PyObject* self, double limit_s) {
  CallWork& work = work_of(self);
  return or_python_error([&]() -> PyObject* {
    if (!work.call->is_over()) {
      work.caller.group.refuse_handler();  // it would wait for the call that it interrupted
      work.caller.group.refuse_child();    // a child lacks the thread that would end it
      if (!work.call->wait(limit_s)) Py_RETURN_FALSE;
    }
    Py_CLEAR(work.kept);
    if (work.call->failure()) throw *work.call->failure();
    Py_RETURN_TRUE;
  });
}

PyObject* is_completed(PyObject* self, PyObject*) {
  const CallWork& work = work_of(self);
  if (!work.call->is_over()) work.caller.group.resume_queue();
  return PyBool_FromLong(work.call->is_over());
}

PyObject* is_over_soon(PyObject* self, PyObject*) {
  const CallWork& work = work_of(self);
  if (!work.call->is_over()) {
    PythonHost host;
    host.blocking();
    work.caller.group.linger(work.call.get());
  }
  return PyBool_FromLong(work.call->is_over());
}

PyMethodDef methods[] = {
    wait_method<wait_at_most>(
        "wait(timeout=None)\n--\n\n"
        "Wait until the call is complete.\n\n"
        "Args:\n"
        "    timeout: Seconds to wait here; None, 0 or less wait as long as the call itself may "
        "take.\n\n"
        "Returns:\n"
        "    True.\n\n"
        "Raises:\n"
        "    FastcollError: What the call raised.\n"
        "    CollectiveTimeout: `timeout` ran out; the call goes on."),
    {"is_completed", is_completed, METH_NOARGS,
     "is_completed()\n--\n\nReturn whether the call is over, well or not."},
    {"_is_over_soon", is_over_soon, METH_NOARGS,
     "_is_over_soon()\n--\n\nReturn whether the call is over within a thread's hand-over."},
    {"_wait_for", wait_for<wait_at_most>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* show(PyObject* self) {
  const CallWork& work = work_of(self);
  const AsyncCall& call = *work.call;
  const uint64_t number = call.number();
  std::string text = "<fastcoll.Work " + call.described();
  if (number != 0) text += " #" + std::to_string(number);
  text += " in group \"" + work.caller.group.name() + "\", ";
  text += !call.is_over() ? number ? "begun" : "queued" : call.failure() ? "failed" : "done";
  return PyUnicode_FromString((text + ">").c_str());
}

PyObject* outputs(PyObject* self, void*) {
  PyObject* const found = work_of(self).outputs;
  return found ? Py_NewRef(found) : PyList_New(0);
}

PyGetSetDef properties[] = {
    {"_outputs", outputs, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject type = handle_type<CallWork>("fastcoll._C.CallWork", deallocate, show, methods,
                                          properties, nullptr, {traverse, clear});

}  // namespace

PyObject* queue_call(const Caller& caller, const std::shared_ptr<AsyncCall>& call, PyObject* kept,
                     PyObject* outputs) {
  release_kept();
  PyTypeObject* made = subclass ? subclass : &type;
  PyObject* object = made->tp_alloc(made, 0);
  if (!object) throw Interrupted{};
  CallWork& work = work_of(object);
  new (&work.caller) Caller{caller.group, Py_NewRef(caller.object)};
  work.kept = Py_NewRef(kept);
  work.outputs = Py_NewRef(outputs);
  new (&work.call) std::shared_ptr<AsyncCall>(call);
  bool is_queued = false;
  try {
    is_queued = caller.group.queue().push(call);
  } catch (const std::exception& error) {
    set_python_error(error);
  }
  if (is_queued) return object;
  call->over();
  Py_DECREF(object);
  if (PyErr_Occurred()) throw Interrupted{};
  return nullptr;
}

bool add_call_work(PyObject* module) { return PyModule_AddType(module, &type) == 0; }

PyObject* set_call_work(PyObject*, PyObject* object) {
  return set_subclass(object, type, subclass);
}

}  // namespace fastcoll
