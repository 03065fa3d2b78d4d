// SPDX-License-Identifier: Apache-2.0
// The start of a call or a transfer on a GPU, in the current stream or beside it.
#pragma once

#include <Python.h>

#include <algorithm>
#include <optional>

#include "fastcoll/integrations/gil.h"
#include "group/process_group.h"
#include "python/arguments.h"
#include "python/host.h"

namespace fastcoll {

// A side, as prepare_tensors.h has it.
struct OnGpu {
  const ProcessGroup& group;
  GpuCalls& calls;
  std::optional<TensorView> view(PyObject* object, bool /*is_written*/ = false) const {
    return given(object) ? view_on_gpu(object, calls.device()) : std::nullopt;
  }
  const Plan* find(const PlanTable::Key& key) const { return calls.find(key); }
};

// The stream in which something starts. current: torch's, which one beside it follows.
struct StreamsOnGpu {
  void *stream, *current;
};

// At every call: the program may have another stream now. None if torch can't tell.
inline std::optional<StreamsOnGpu> streams_of(const GpuCalls& calls, bool beside) {
  const std::optional<void*> current = current_stream(calls.device());
  if (!current) return std::nullopt;
  return StreamsOnGpu{beside ? calls.beside().stream : *current, *current};
}

inline double limit_of(const GpuCalls& calls, double timeout_s) {
  constexpr double kMostS = 1e6;  // as in calls/limits.py
  return timeout_s < 0 ? calls.limit_s() : std::min(timeout_s, kMostS);
}

// Start a plan on its memory, or messages.
template <class... What>
void start(GpuCalls& calls, void* stream, double limit_s, const What&... what) {
  std::optional<Failure> failure;
  {
    const GilAway release;  // a full queue blocks
    failure = calls.start(what..., stream, limit_s);
  }
  if (failure) throw *failure;
}

// Put the side's stream behind the current one's work so far.
inline void follow(GpuCalls& calls, void* current) {
  if (const auto failure = calls.follow(current)) throw *failure;
}

// A tensor's memory is not given away before the side's stream is behind this work. Anything else
// is ignored, as a root's tensor is on other ranks.
inline void keep_for(const GpuCalls& calls, PyObject* object) {
  static PyObject* const name = PyUnicode_InternFromString("record_stream");
  if (!object || !is_tensor(object) || !is_plain_on_gpu(impl_of(object))) return;
  auto* const stream = static_cast<PyObject*>(calls.beside().object.get());
  PyObject* const nothing = PyObject_CallMethodOneArg(object, name, stream);
  if (!nothing) throw Interrupted{};
  Py_DECREF(nothing);
}
// Of an argument: a tensor, or a list of them.
inline void keep_all_for(const GpuCalls& calls, PyObject* argument) {
  keep_for(calls, argument);
  for (PyObject* item : items_of(argument)) keep_for(calls, item);
}

}  // namespace fastcoll
