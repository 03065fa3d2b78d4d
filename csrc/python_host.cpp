// SPDX-License-Identifier: Apache-2.0
#include "python_host.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace fastcoll {

bool PythonHost::interrupted() {
  // Signal handlers run in the main thread only, and asking takes the GIL: every 50 ms will do.
  constexpr int64_t kLookUs = 50000;
  static const unsigned long main_thread = [] {
    const py::gil_scoped_acquire gil;
    return py::module_::import("threading")
        .attr("main_thread")()
        .attr("ident")
        .cast<unsigned long>();
  }();
  if (PyThread_get_thread_ident() != main_thread) return false;
  const int64_t time_us = now_us();
  if (time_us < next_look_us_) return false;
  next_look_us_ = time_us + kLookUs;
  take_gil();
  const bool raised = PyErr_CheckSignals() != 0;
  if (!raised) blocking();
  return raised;
}

void set_python_error(const Failure& failure) {
  static const char* const kNames[] = {
      nullptr,       "UsageError",    "UnsupportedError", "CollectiveTimeout",
      "DesyncError", "PeerLostError", "DriverError",      "AbortedError"};
  try {
    const py::object cls =
        py::module_::import("fastcoll.errors").attr(kNames[uint32_t(failure.kind())]);
    py::object error;
    if (failure.kind() == ErrorKind::timeout || failure.kind() == ErrorKind::peer_lost ||
        failure.kind() == ErrorKind::aborted) {
      py::list ranks;
      for (int rank = 0; rank < 64; ++rank)
        if (failure.ranks() >> rank & 1) ranks.append(rank);
      error = cls(failure.what(), py::tuple(ranks));
    } else {
      error = cls(failure.what());
    }
    PyErr_SetObject(cls.ptr(), error.ptr());
  } catch (py::error_already_set& problem) {
    problem.restore();
  }
}

}  // namespace fastcoll
