// SPDX-License-Identifier: Apache-2.0
#include "python_host.h"

namespace fastcoll {

namespace {

// The identifier of Python's main thread; 0 if it can't be had. Takes the GIL.
unsigned long main_thread_ident() {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* threading = PyImport_ImportModule("threading");
  PyObject* thread = threading ? PyObject_CallMethod(threading, "main_thread", nullptr) : nullptr;
  PyObject* ident = thread ? PyObject_GetAttrString(thread, "ident") : nullptr;
  const unsigned long value = ident ? PyLong_AsUnsignedLong(ident) : 0;
  Py_XDECREF(ident);
  Py_XDECREF(thread);
  Py_XDECREF(threading);
  PyErr_Clear();
  PyGILState_Release(state);
  return value;
}

// Signal handlers run in the main thread only, and asking takes the GIL: every 50 ms will do.
bool time_to_look(int64_t& next_look_us) {
  constexpr int64_t kLookUs = 50000;
  static const unsigned long main_thread = main_thread_ident();
  if (PyThread_get_thread_ident() != main_thread) return false;
  const int64_t time_us = now_us();
  if (time_us < next_look_us) return false;
  next_look_us = time_us + kLookUs;
  return true;
}

}  // namespace

bool PythonHost::interrupted() {
  if (!time_to_look(next_look_us_)) return false;
  take_gil();
  const bool raised = PyErr_CheckSignals() != 0;
  if (!raised) blocking();
  return raised;
}

bool DetachedHost::interrupted() {
  if (!time_to_look(next_look_us_)) return false;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;  // the error stays with the thread
  PyGILState_Release(state);
  return raised;
}

}  // namespace fastcoll
