// SPDX-License-Identifier: Apache-2.0
// Fast sends and receives of GPU tensors, as gpu_calls.h has the calls. Python takes those to the
// rank itself, from any rank, and of nothing.
#pragma once

#include <Python.h>

#include "python/prepare.h"
#include "python/work_type.h"

namespace fastcoll {

// send and recv in the current stream; isend, irecv and batch_isend_irecv beside it. Null if it is
// no fast call; then nothing has happened. Else a new reference to the result. They throw a
// Failure, or Interrupted with a Python error set.
PyObject* run_transfer_on_gpu(bool sends, ProcessGroup& group, const Args& args);
PyObject* start_transfer_on_gpu(bool sends, const Caller& caller, const Args& args);
PyObject* start_batch_on_gpu(const Caller& caller, const Args& args);

}  // namespace fastcoll
