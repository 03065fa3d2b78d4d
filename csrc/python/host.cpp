// SPDX-License-Identifier: Apache-2.0
#include "python/host.h"

#include <atomic>

#include "python/wait_listener.h"

namespace fastcoll {

namespace {

std::atomic<PyObject*> listener{nullptr};  // kept for ever

// Signal handlers run in the main thread only, and asking takes the GIL: every 50 ms will do.
// Python is not asked which thread is the main one: it would run the handlers of pending signals.
bool time_to_look(int64_t& next_look_us) {
  constexpr int64_t kLookUs = 50000;
  if (!is_main_thread() && !listener.load(std::memory_order_relaxed)) return false;
  const int64_t time_us = now_us();
  if (time_us < next_look_us) return false;
  next_look_us = time_us + kLookUs;
  return true;
}

// With the GIL. True: a Python error is set.
bool look() {
  if (PyObject* function = listener.load(std::memory_order_relaxed)) {
    PyObject* nothing = PyObject_CallNoArgs(function);
    if (!nothing) return true;
    Py_DECREF(nothing);
  }
  return PyErr_CheckSignals() != 0;
}

// Of the Python error that is set: KeyboardInterrupt, or the error of a handler of the program's.
std::string name_of_error() {
  PyObject* type = PyErr_Occurred();
  return type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "";
}

}  // namespace

bool PythonHost::interrupted() {
  if (!time_to_look(next_look_us_)) return false;
  take_gil();
  const bool raised = look();
  if (!raised) blocking();
  return raised;
}

std::string PythonHost::interruption() {
  take_gil();
  return name_of_error();
}

bool DetachedHost::interrupted() {
  if (!time_to_look(next_look_us_)) return false;
  const GilHeld gil;
  return look();  // the error stays with the thread
}

std::string DetachedHost::interruption() {
  const GilHeld gil;
  return name_of_error();
}

PyObject* set_wait_listener(PyObject*, PyObject* function) {
  Py_XDECREF(listener.exchange(Py_NewRef(function)));
  Py_RETURN_NONE;
}

}  // namespace fastcoll
