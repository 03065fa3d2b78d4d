// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_work.h"

#include <new>
#include <optional>
#include <utility>

#include "python/arguments.h"
#include "python/errors.h"
#include "python/host.h"
#include "python/tensor_view.h"

namespace fastcoll {

namespace {

struct GpuWork {
  PyObject ob_base;
  Caller caller;      // whose object this keeps; it keeps the side
  PyObject* outputs;  // a list
  std::shared_ptr<GpuCalls> calls;
  std::shared_ptr<void> event;  // none until it has started
  int peer;
};

PyTypeObject *subclass = nullptr, *transfer_subclass = nullptr;

GpuWork& work_of(PyObject* object) { return *reinterpret_cast<GpuWork*>(object); }

void deallocate(PyObject* object) {
  GpuWork& work = work_of(object);
  work.event.~shared_ptr();
  work.calls.~shared_ptr();
  Py_DECREF(work.outputs);
  Py_DECREF(work.caller.object);
  Py_TYPE(object)->tp_free(object);
}

// The current stream waits. Python looks closer where something may be wrong.
PyObject* wait_in_stream(PyObject* self, double) {
  static PyObject* const check = PyUnicode_InternFromString("_check");
  const GpuWork& work = work_of(self);
  const std::optional<void*> stream = current_stream(work.calls->device());
  if (!stream)
    return PyErr_Format(PyExc_RuntimeError, "torch does not tell its current stream any more");
  if (const auto failure = work.calls->make_stream_wait(*stream, work.event.get())) {
    set_python_error(*failure);
    return nullptr;
  }
  if (!work.calls->is_healthy(work.caller.group)) {
    PyObject* const checked = PyObject_CallMethodNoArgs(self, check);
    if (!checked) return nullptr;
    Py_DECREF(checked);
  }
  Py_RETURN_TRUE;
}

PyObject* is_completed(PyObject* self, PyObject*) {
  const GpuWork& work = work_of(self);
  return PyBool_FromLong(work.calls->is_event_complete(work.event.get()));
}

PyMethodDef methods[] = {
    wait_method<wait_in_stream>(
        "wait(timeout=None)\n--\n\n"
        "Let the current stream wait for the call.\n\n"
        "Args:\n"
        "    timeout: Seconds for which the program itself waits; None, 0 or less do not wait.\n\n"
        "Returns:\n"
        "    True.\n\n"
        "Raises:\n"
        "    FastcollError: The error that broke the group, if that is known already.\n"
        "    CollectiveTimeout: `timeout` ran out; the call goes on."),
    {"is_completed", is_completed, METH_NOARGS,
     "is_completed()\n--\n\nReturn whether the call is over, well or not."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* outputs(PyObject* self, void*) { return Py_NewRef(work_of(self).outputs); }
PyObject* group(PyObject* self, void*) { return Py_NewRef(work_of(self).caller.object); }
PyObject* peer(PyObject* self, void*) { return PyLong_FromLong(work_of(self).peer); }

PyGetSetDef properties[] = {
    {"_outputs", outputs, nullptr, nullptr, nullptr},
    {"_group", group, nullptr, nullptr, nullptr},
    {"_peer", peer, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject type =
    handle_type<GpuWork>("fastcoll._C.GpuWork", deallocate, nullptr, methods, properties);

}  // namespace

PyObject* new_gpu_work(const Caller& caller, PyObject* outputs, int peer) {
  PyTypeObject* made = peer < 0 ? subclass : transfer_subclass;
  if (!made) made = &type;
  PyObject* object = made->tp_alloc(made, 0);
  if (!object) throw Interrupted{};
  GpuWork& work = work_of(object);
  new (&work.caller) Caller{caller.group, Py_NewRef(caller.object)};
  new (&work.calls) std::shared_ptr<GpuCalls>(caller.group.shared_gpu_calls());
  new (&work.event) std::shared_ptr<void>();
  work.outputs = Py_NewRef(outputs);
  work.peer = peer;
  return object;
}

void begin_gpu_works(std::span<PyObject* const> works) {
  const std::shared_ptr<GpuCalls> calls = work_of(works[0]).calls;
  void* taken = nullptr;
  const auto failure = calls->take_event(taken);
  const std::shared_ptr<void> event(taken, [calls](void* one) {
    if (one) calls->give_back(one);
  });
  if (failure) throw *failure;
  for (PyObject* work : works) work_of(work).event = event;
}

bool add_gpu_work(PyObject* module) { return PyModule_AddType(module, &type) == 0; }

PyObject* set_gpu_works(PyObject*, PyObject* args) {
  PyObject *calls = nullptr, *transfers = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &calls, &transfers)) return nullptr;
  const Owned first(set_subclass(calls, type, subclass));
  return first.get() ? set_subclass(transfers, type, transfer_subclass) : nullptr;
}

}  // namespace fastcoll
