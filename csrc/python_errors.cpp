// SPDX-License-Identifier: Apache-2.0
#include "python_errors.h"

namespace fastcoll {

namespace {

// A tuple of the ranks in a bit set.
PyObject* rank_tuple(uint64_t ranks) {
  PyObject* list = PyList_New(0);
  for (int rank = 0; list && rank < 64; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    PyObject* number = PyLong_FromLong(rank);
    if (!number || PyList_Append(list, number) != 0) Py_CLEAR(list);
    Py_XDECREF(number);
  }
  PyObject* tuple = list ? PyList_AsTuple(list) : nullptr;
  Py_XDECREF(list);
  return tuple;
}

}  // namespace

void set_python_error(const Failure& failure) {
  static const char* const kNames[] = {
      nullptr,       "UsageError",    "UnsupportedError", "CollectiveTimeout",
      "DesyncError", "PeerLostError", "DriverError"};
  const bool names_ranks =
      failure.kind() == ErrorKind::timeout || failure.kind() == ErrorKind::peer_lost;
  PyObject* errors = PyImport_ImportModule("fastcoll.errors");
  PyObject* cls =
      errors ? PyObject_GetAttrString(errors, kNames[uint32_t(failure.kind())]) : nullptr;
  PyObject* ranks = names_ranks ? rank_tuple(failure.ranks()) : nullptr;
  PyObject* error = nullptr;
  if (cls && names_ranks && ranks) error = PyObject_CallFunction(cls, "sO", failure.what(), ranks);
  else if (cls && !names_ranks) error = PyObject_CallFunction(cls, "s", failure.what());
  if (error) PyErr_SetObject(cls, error);
  Py_XDECREF(error);
  Py_XDECREF(ranks);
  Py_XDECREF(cls);
  Py_XDECREF(errors);
}

}  // namespace fastcoll
