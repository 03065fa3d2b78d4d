// SPDX-License-Identifier: Apache-2.0
// fastcoll._C.RowNorm: the tensors and numbers of an RMSNorm behind a call, and their check in a
// fast call. Programs get its subclass, fastcoll.RMSNorm.
//
// It keeps objects and no addresses, as a tensor's memory may be another one by the next call.
#pragma once

#include <Python.h>

#include "group/process_group.h"
#include "python/prepare.h"

namespace fastcoll {

// A call with `then`; fills `rows`. No fast call where a tensor does not fit: Python then says why.
Prepared prepare_rows(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                      RowCall& rows);

// Let autograd know of the tensors that `then` makes a call write, besides its output.
void count_row_writes(PyObject* then);

// Add the type to the module. False with a Python error set.
bool add_row_norm(PyObject* module);

// The class that programs get: fastcoll.calls.rows.RMSNorm.
PyObject* set_row_norm(PyObject*, PyObject* object);

}  // namespace fastcoll
