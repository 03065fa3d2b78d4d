// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_calls.h"

#include <algorithm>
#include <optional>

#include "fastcoll/integrations/gil.h"
#include "python/gpu_work.h"
#include "python/host.h"
#include "python/prepare_tensors.h"

namespace fastcoll {

namespace {

struct OnGpu {
  const ProcessGroup& group;
  GpuCalls& calls;
  std::optional<TensorView> view(PyObject* object) const {
    return given(object) ? view_on_gpu(object, calls.device()) : std::nullopt;
  }
  const Plan* find(const PlanTable::Key& key) const { return calls.find(key); }
};

double limit_of(const GpuCalls& calls, double timeout_s) {
  constexpr double kMostS = 1e6;  // as in calls/limits.py
  return timeout_s < 0 ? calls.limit_s() : std::min(timeout_s, kMostS);
}

// Start a plan on its places, or a message.
template <class... What>
void start(GpuCalls& calls, void* stream, double limit_s, const What&... what) {
  std::optional<Failure> failure;
  {
    const GilAway release;  // a full queue blocks
    failure = calls.start(what..., stream, limit_s);
  }
  if (failure) throw *failure;
}

void follow(GpuCalls& calls, void* stream) {
  if (const auto failure = calls.follow(stream)) throw *failure;
}

// A tensor's memory is not given away before the side's stream is behind this work.
void keep_for(const GpuCalls& calls, PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("record_stream");
  if (!given(tensor)) return;
  auto* const stream = static_cast<PyObject*>(calls.beside().object.get());
  PyObject* const nothing = PyObject_CallMethodOneArg(tensor, name, stream);
  if (!nothing) throw Interrupted{};
  Py_DECREF(nothing);
}

// A message, and the stream in which it goes.
struct MessageOnGpu {
  DeviceMessage message;
  void *stream, *current;
};

std::optional<MessageOnGpu> prepare_message(bool sends, const ProcessGroup& group, const Args& args,
                                            bool beside) {
  GpuCalls* calls = group.gpu_calls();
  if (!calls || group.traces() || calls->pair_channels() == 0) return std::nullopt;
  const std::optional<TensorView> view = OnGpu{group, *calls}.view(args[kTensor]);
  const std::optional<int> peer = root_of(group, args[kRoot]);
  const auto tag = args[kTag] ? number_of(args[kTag]) : std::optional<uint64_t>(0);
  if (!view || view->numel == 0 || !peer || *peer == group.rank() || !tag || *tag > UINT32_MAX)
    return std::nullopt;
  const std::optional<void*> current = current_stream(calls->device());
  if (!current) return std::nullopt;
  void* const stream = beside ? calls->beside().stream : *current;
  if (!calls->may_start(group, view->ptr, view->ptr, stream)) return std::nullopt;
  return MessageOnGpu{
      {sends, view->ptr, view->numel, view->dtype, *peer, uint32_t(*tag)}, stream, *current};
}

}  // namespace

PreparedOnGpu prepare_on_gpu(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                             bool beside) {
  GpuCalls* calls = group.gpu_calls();
  if (!calls || group.traces()) return {};
  PreparedOnGpu prepared{prepare_tensors(OnGpu{group, *calls}, verb, args, op)};
  const Prepared& call = prepared.call;
  if (!call.is_fast() || call.num_bytes == 0) return {};
  // At every call: the program may have another one now.
  const std::optional<void*> current = current_stream(calls->device());
  if (!current) return {};
  prepared.current = *current;
  prepared.stream = beside ? calls->beside().stream : *current;
  if (!calls->may_start(group, call.input, call.output, prepared.stream)) return {};
  return prepared;
}

void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s) {
  GpuCalls& calls = *group.gpu_calls();
  const Prepared& call = prepared.call;
  calls.note(call.plan);
  start(calls, prepared.stream, limit_of(calls, timeout_s), call.plan, call.input, call.output);
}

PyObject* start_beside(const Caller& caller, const PreparedOnGpu& prepared, const Args& args,
                       PyObject* outputs) {
  Owned work(new_gpu_work(caller, outputs, -1));
  GpuCalls& calls = *caller.group.gpu_calls();
  follow(calls, prepared.current);
  start_on_gpu(caller.group, prepared, args.timeout_s);
  begin_gpu_work(work.get());
  keep_for(calls, args[kTensor]);
  keep_for(calls, args[kSecond]);
  return work.release();
}

PyObject* run_transfer_on_gpu(bool sends, ProcessGroup& group, const Args& args) {
  const auto one = prepare_message(sends, group, args, false);
  if (!one) return nullptr;
  if (!sends) count_write(args[kTensor]);
  GpuCalls& calls = *group.gpu_calls();
  calls.note(one->message);
  start(calls, one->stream, limit_of(calls, args.timeout_s), one->message);
  return sends ? Py_NewRef(Py_None) : PyLong_FromLong(one->message.peer);
}

PyObject* start_transfer_on_gpu(bool sends, const Caller& caller, const Args& args) {
  const auto one = prepare_message(sends, caller.group, args, true);
  if (!one) return nullptr;
  const Owned outputs(PyList_New(1));
  if (!outputs.get()) throw Interrupted{};
  PyList_SET_ITEM(outputs.get(), 0, Py_NewRef(args[kTensor]));
  Owned work(new_gpu_work(caller, outputs.get(), one->message.peer));
  if (!sends) count_write(args[kTensor]);
  GpuCalls& calls = *caller.group.gpu_calls();
  follow(calls, one->current);
  calls.note(one->message);
  start(calls, one->stream, limit_of(calls, args.timeout_s), one->message);
  begin_gpu_work(work.get());
  keep_for(calls, args[kTensor]);
  return work.release();
}

}  // namespace fastcoll
