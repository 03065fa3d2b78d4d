// SPDX-License-Identifier: Apache-2.0
// Fast calls on GPU tensors: a known plan is launched without a Python frame. Decides what a call
// has to fulfil for that. Other calls go to Python, which makes the same checks and explains them.
#pragma once

#include <Python.h>

#include "group/process_group.h"
#include "python/prepare.h"

namespace fastcoll {

// A call that may start, and the stream in which it does.
struct PreparedOnGpu {
  Prepared call;
  void* stream = nullptr;
};

// Of a verb with one tensor, or one of each kind; no fast call where the group has no GPU.
PreparedOnGpu prepare_on_gpu(FastVerb verb, const ProcessGroup& group, const Args& args, Op op);

// Start it. Throws a Failure.
void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s);

}  // namespace fastcoll
