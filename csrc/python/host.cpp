// SPDX-License-Identifier: Apache-2.0
#include "python/host.h"

#include <unistd.h>

namespace fastcoll {

namespace {

// Signal handlers run in the main thread only, and asking takes the GIL: every 50 ms will do.
// Python is not asked which thread is the main one: it would run the handlers of pending signals.
bool time_to_look(int64_t& next_look_us) {
  constexpr int64_t kLookUs = 50000;
  if (gettid() != getpid()) return false;
  const int64_t time_us = now_us();
  if (time_us < next_look_us) return false;
  next_look_us = time_us + kLookUs;
  return true;
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
  const bool raised = PyErr_CheckSignals() != 0;
  if (!raised) blocking();
  return raised;
}

std::string PythonHost::interruption() {
  take_gil();
  return name_of_error();
}

bool DetachedHost::interrupted() {
  if (!time_to_look(next_look_us_)) return false;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;  // the error stays with the thread
  PyGILState_Release(state);
  return raised;
}

std::string DetachedHost::interruption() {
  const PyGILState_STATE state = PyGILState_Ensure();
  std::string name = name_of_error();
  PyGILState_Release(state);
  return name;
}

}  // namespace fastcoll
