// SPDX-License-Identifier: Apache-2.0
// C++ failures as Python errors, for both extensions.
#pragma once

#include <Python.h>

#include "check.h"

namespace fastcoll {

// Finds the classes of all errors, for those that come while the interpreter ends. Needs the GIL.
// False: a Python error is set.
bool keep_error_classes();

// Sets the Python error of this failure. Needs the GIL.
void set_python_error(const Failure& failure);

}  // namespace fastcoll
