// SPDX-License-Identifier: Apache-2.0
// The public verbs as C functions (METH_FASTCALL): a call whose plan is known, on contiguous CPU
// tensors, runs without a Python frame. Every other call goes to the Python function of the same
// name (set_fallback), which checks, plans and explains. With async_op=True it is queued here.
//
// Plain CPython here: pybind11 costs seconds of compile time in every file that includes it.
#pragma once

#include <Python.h>

#include <optional>

#include "dtypes.h"
#include "python/verbs.h"

namespace fastcoll {

class ProcessGroup;

// The operation of one of torch's objects; null means the default.
std::optional<Op> op_of(PyObject* object);

// The group inside a Python object, or null if it is none.
using GroupOf = ProcessGroup*(PyObject*);

// The default group's object, a borrowed reference; null where it is none of one node, or not made.
PyObject* default_group_of_calls();

// The C function of a verb.
PyCFunction function_of(FastVerb verb);

// Add the verbs and their setters to the module. False with a Python error set.
bool add_fast_calls(PyObject* module, GroupOf* group_of_object);

}  // namespace fastcoll
