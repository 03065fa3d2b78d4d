// SPDX-License-Identifier: Apache-2.0
#include "python/errors.h"

#include <array>
#include <cstring>
#include <new>

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

// Writes this rank's last calls down, where FASTCOLL_DUMP_DIR says. A failure here does not hide
// the error that is raised.
void write_down(PyObject* reason) {
  PyObject* dumps = PyImport_ImportModule("fastcoll.calls.dumps");
  PyObject* nothing = dumps ? PyObject_CallMethod(dumps, "dump", "O", reason) : nullptr;
  // A Ctrl-C that came meanwhile takes effect once the error is raised.
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  PyErr_Clear();
  Py_XDECREF(nothing);
  Py_XDECREF(dumps);
}

// The class of an error; null: a Python error is set. Kept for ever, as nothing can be imported
// while the interpreter ends.
PyObject* class_of(ErrorKind kind) {
  static const char* const kNames[] = {
      nullptr,       "UsageError",    "UnsupportedError", "CollectiveTimeout",
      "DesyncError", "PeerLostError", "DriverError",      "AbortedError"};
  static std::array<PyObject*, size_t(kLastKind) + 1> classes{};  // guarded by the GIL
  PyObject*& known = classes[size_t(kind)];
  if (known) return known;
  PyObject* errors = PyImport_ImportModule("fastcoll.errors");
  if (errors) known = PyObject_GetAttrString(errors, kNames[size_t(kind)]);
  Py_XDECREF(errors);
  return known;
}

}  // namespace

bool keep_error_classes() {
  for (uint32_t kind = 1; kind <= uint32_t(kLastKind); ++kind)
    if (!class_of(ErrorKind(kind))) return false;
  return true;
}

void set_python_error(const Failure& failure) {
  const bool names_ranks = failure.kind() == ErrorKind::timeout ||
                           failure.kind() == ErrorKind::peer_lost ||
                           failure.kind() == ErrorKind::aborted;
  // A verdict's text is cut where its page ends, perhaps inside a character.
  PyObject* text =
      PyUnicode_DecodeUTF8(failure.what(), Py_ssize_t(std::strlen(failure.what())), "replace");
  if (text && failure.kind() != ErrorKind::usage && failure.kind() != ErrorKind::unsupported)
    write_down(text);
  PyObject* cls = class_of(failure.kind());
  PyObject* ranks = names_ranks ? rank_tuple(failure.ranks()) : nullptr;
  PyObject* error = nullptr;
  if (cls && text && ranks) error = PyObject_CallFunction(cls, "OO", text, ranks);
  else if (cls && text && !names_ranks) error = PyObject_CallFunction(cls, "O", text);
  if (error) PyErr_SetObject(cls, error);
  Py_XDECREF(error);
  Py_XDECREF(text);
  Py_XDECREF(ranks);
}

void set_python_error(const std::exception& error) {
  if (const auto* failure = dynamic_cast<const Failure*>(&error)) set_python_error(*failure);
  else if (dynamic_cast<const std::bad_alloc*>(&error)) PyErr_NoMemory();
  else PyErr_SetString(PyExc_RuntimeError, error.what());
}

}  // namespace fastcoll
