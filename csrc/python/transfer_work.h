// SPDX-License-Identifier: Apache-2.0
// fastcoll._C.TransferWork: the handle of a send or a receive as far as it has to be quick; the
// class that programs get is its heir in transfers.py. Decides how long the memory of a transfer is
// kept: by its handle, and if that goes first, until the transfer is over.
#pragma once

#include <Python.h>

#include <memory>
#include <span>

#include "python/fast_calls.h"
#include "python/work_type.h"

namespace fastcoll {

// A handle of what is not started yet, or null with a Python error set. `kept`: whose memory it is.
PyObject* new_transfer_work(const Caller& caller, PyObject* kept);

// Start the transfers of such handles, and see to it that somebody moves them on. Throws
// Interrupted where a Python error is set.
void start_works(const Caller& caller, std::span<const std::shared_ptr<Transfer>> transfers,
                 std::span<PyObject* const> works);

// Add the type to the module. False with a Python error set.
bool add_transfer_work(PyObject* module, GroupOf* group_of_object);

// The class of the handles: fastcoll.calls.transfer_work.TransferWork.
PyObject* set_transfer_work(PyObject*, PyObject* object);

}  // namespace fastcoll
