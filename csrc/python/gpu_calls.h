// SPDX-License-Identifier: Apache-2.0
// Fast calls on GPU tensors: a known plan is launched without a Python frame. Decides what a call
// has to fulfil for that. Other calls go to Python, which makes the same checks and explains them.
#pragma once

#include <Python.h>

#include <span>
#include <vector>

#include "group/process_group.h"
#include "python/prepare.h"
#include "python/work_type.h"

namespace fastcoll {

// As in DeviceOperands.
struct PartsOnGpu {
  std::vector<uint64_t> counts;
  std::vector<const std::byte*> input;
  std::vector<std::byte*> output;
};

// A call that may start, and the stream in which it does.
struct PreparedOnGpu {
  Prepared call;
  void* stream = nullptr;
  void* current = nullptr;  // of a call beside: the stream that it follows
  PartsOnGpu parts;
};

// Of a verb with tensors or parts; no fast call where the group has no GPU. A call beside runs in
// the side's stream.
PreparedOnGpu prepare_on_gpu(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                             bool beside = false);

// Of a verb with lists: a call for each tensor of the list, or none of them.
std::vector<PreparedOnGpu> prepare_list_on_gpu(FastVerb verb, const ProcessGroup& group,
                                               const Args& args, Op op, bool beside = false);

// Start it. Throws a Failure.
void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s);
// Start calls beside the current stream; return their one handle, whose results are in the list
// `outputs`. Throws a Failure, or Interrupted with a Python error set.
PyObject* start_beside(const Caller& caller, std::span<const PreparedOnGpu> calls, const Args& args,
                       PyObject* outputs);

}  // namespace fastcoll
