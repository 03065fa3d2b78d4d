// SPDX-License-Identifier: Apache-2.0
// C++ failures as Python errors, for both extensions.
#pragma once

#include <Python.h>

#include <exception>

#include "check.h"

namespace fastcoll {

// Finds the classes of all errors, for those that come while the interpreter ends. Needs the GIL.
// False: a Python error is set.
bool keep_error_classes();

// Sets the Python error of this failure. Needs the GIL.
void set_python_error(const Failure& failure);

// The same of any error: MemoryError where there is no memory, RuntimeError for one of the standard
// library's.
void set_python_error(const std::exception& error);

// Returns what `body` does; null with a Python error set if it throws. Python calls functions of C,
// which no exception may leave. With the GIL.
template <class Body>
PyObject* or_python_error(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    set_python_error(error);
  } catch (const Interrupted&) {  // its Python error is set already
  }
  return nullptr;
}

}  // namespace fastcoll
