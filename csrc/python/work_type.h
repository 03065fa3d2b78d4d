// SPDX-License-Identifier: Apache-2.0
// The common part of the handles that are C types: their group, and waiting.
#pragma once

#include <Python.h>

#include "group/process_group.h"

namespace fastcoll {

// A group, and the Python object that it lives in.
struct Caller {
  ProcessGroup& group;
  PyObject* object;
};

// Wait for the call or transfer of a handle, that many seconds; 0: without a limit. Null with a
// Python error set, else whether it is complete.
using WaitAtMost = PyObject*(PyObject* self, double limit_s);

// wait(timeout=None): waits here if there is no limit, else by the subclass's _wait. No limit is
// None or any false object (torch gives a timedelta of no length).
template <WaitAtMost* kWait>
PyObject* wait(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames) {
  const bool is_usual = !kwnames && num_args <= 1;
  const int has_limit = is_usual && num_args == 1 ? PyObject_IsTrue(args[0]) : !is_usual;
  if (has_limit < 0) return nullptr;
  if (!has_limit) return kWait(self, 0);
  static PyObject* const name = PyUnicode_InternFromString("_wait");
  PyObject* method = PyObject_GetAttr(self, name);
  PyObject* result =
      method ? PyObject_Vectorcall(method, args, size_t(num_args), kwnames) : nullptr;
  Py_XDECREF(method);
  return result;
}

template <WaitAtMost* kWait>
PyObject* wait_for(PyObject* self, PyObject* seconds) {
  const double limit_s = PyFloat_AsDouble(seconds);
  return limit_s == -1 && PyErr_Occurred() ? nullptr : kWait(self, limit_s);
}

template <WaitAtMost* kWait>
constexpr PyMethodDef wait_method(const char* doc) {
  return {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&wait<kWait>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

// The references of a handle, as the garbage collector follows them. Those of a call that goes on
// are neither told nor cleared: its memory may not go. The collector also clears a handle that a
// cycle of others holds.
struct Collected {
  traverseproc traverse = nullptr;  // null: the collector does not know these handles
  inquiry clear = nullptr;
};

// The type of handles whose objects are `Handle`. start: makes one for Python; null: only C++ does.
template <class Handle>
PyTypeObject handle_type(const char* name, destructor deallocate, reprfunc show,
                         PyMethodDef* methods, PyGetSetDef* properties, newfunc start = nullptr,
                         Collected collected = {}) {
  PyTypeObject made = {};
  made.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
  made.tp_name = name;
  made.tp_basicsize = sizeof(Handle);
  made.tp_flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | (start ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
  if (collected.traverse) made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = collected.traverse;
  made.tp_clear = collected.clear;
  made.tp_new = start;
  made.tp_dealloc = deallocate;
  made.tp_repr = show;
  made.tp_methods = methods;
  made.tp_getset = properties;
  return made;
}

// Make `place` the class of a type's handles: its subclass in Python.
inline PyObject* set_subclass(PyObject* object, PyTypeObject& type, PyTypeObject*& place) {
  if (!PyType_Check(object) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(object), &type))
    return PyErr_Format(PyExc_TypeError, "%R is no subclass of %s", object, type.tp_name);
  Py_XSETREF(place, reinterpret_cast<PyTypeObject*>(Py_NewRef(object)));
  Py_RETURN_NONE;
}

}  // namespace fastcoll
