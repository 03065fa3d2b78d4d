// SPDX-License-Identifier: Apache-2.0
// fastcoll._C.GpuWork: the quick part of the handle of an asynchronous call or transfer on a GPU.
// Programs get one of its subclasses, in gpu/work.py. As with torch's own handles the current
// stream waits, not the program.
#pragma once

#include <Python.h>

#include <memory>
#include <span>

#include "group/gpu_calls.h"
#include "python/work_type.h"

namespace fastcoll {

// The handle of something that is about to start in the side's stream; its event comes then.
// `outputs` is a list. peer: of a transfer; else -1. Throws Interrupted with a Python error set.
PyObject* new_gpu_work(const Caller& caller, PyObject* outputs, int peer);
// They have started together: the event behind them. Throws a Failure.
void begin_gpu_works(std::span<PyObject* const> works);

// Add the type to the module. False with a Python error set.
bool add_gpu_work(PyObject* module);

// The classes of the handles: fastcoll.gpu.work.KnownWork and KnownTransferWork.
PyObject* set_gpu_works(PyObject*, PyObject* args);

}  // namespace fastcoll
