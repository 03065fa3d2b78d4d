// SPDX-License-Identifier: Apache-2.0
// The verbs as a foreign function of XLA, which fastcoll.jax calls inside compiled programs.
#pragma once

#include <Python.h>

#include "python/fast_calls.h"

namespace fastcoll {

// Add the handler and its setters to the module. False with a Python error set.
bool add_jax_calls(PyObject* module, GroupOf* group_of_object);

}  // namespace fastcoll
