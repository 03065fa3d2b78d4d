// SPDX-License-Identifier: Apache-2.0
// fastcoll._C.TransferWork: the quick part of the handle of a send or a receive. Programs get its
// subclass, a class in transfer_work.py. Decides how long the memory of a transfer is kept: by its
// handle, and if that goes first, until the transfer is over.
#pragma once

#include <Python.h>

#include <memory>
#include <span>

#include "python/fast_calls.h"
#include "python/work_type.h"

namespace fastcoll {

// A handle of a transfer that is not started yet, or null with a Python error set. `kept`: the
// owner of its memory.
PyObject* new_transfer_work(const Caller& caller, PyObject* kept);

// Start the transfers of such handles, and see to it that a thread moves them on. Throws
// Interrupted where a Python error is set.
void start_works(const Caller& caller, std::span<const std::shared_ptr<Transfer>> transfers,
                 std::span<PyObject* const> works);

// Add the type to the module. False with a Python error set.
bool add_transfer_work(PyObject* module, GroupOf* group_of_object);

// The class of the handles: fastcoll.calls.transfer_work.TransferWork.
PyObject* set_transfer_work(PyObject*, PyObject* object);

}  // namespace fastcoll
