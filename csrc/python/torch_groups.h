// SPDX-License-Identifier: Apache-2.0
// The communicators that stand for torch's process groups. The table keeps none of them alive.
// Guarded by the GIL.
#pragma once

#include <Python.h>

namespace fastcoll {

// The communicator that stands for a process group, a new reference; null if none is known. It may
// be closed. Never leaves a Python error set.
PyObject* stand_in_of(PyObject* process_group);

// A global rank's rank in a process group with a stand-in, a new reference; null if it has none.
PyObject* group_rank_of(PyObject* process_group, PyObject* global_rank);

// set_stand_in(process_group, communicator, global_ranks)
PyObject* set_stand_in(PyObject*, PyObject* args);

}  // namespace fastcoll
