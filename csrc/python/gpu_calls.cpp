// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_calls.h"

#include <algorithm>
#include <optional>

#include "fastcoll/integrations/gil.h"
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

}  // namespace

PreparedOnGpu prepare_on_gpu(FastVerb verb, const ProcessGroup& group, const Args& args, Op op) {
  GpuCalls* calls = group.gpu_calls();
  if (!calls || group.traces()) return {};
  PreparedOnGpu prepared{prepare_tensors(OnGpu{group, *calls}, verb, args, op)};
  const Prepared& call = prepared.call;
  if (!call.is_fast() || call.num_bytes == 0) return {};
  // At every call: the program may have another one now.
  const std::optional<void*> stream = current_stream(calls->device());
  if (!stream || !calls->may_start(group, call.input, call.output, *stream)) return {};
  prepared.stream = *stream;
  return prepared;
}

void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s) {
  constexpr double kMostS = 1e6;  // as in calls/limits.py
  GpuCalls& calls = *group.gpu_calls();
  const Prepared& call = prepared.call;
  const double limit_s = timeout_s < 0 ? calls.limit_s() : std::min(timeout_s, kMostS);
  calls.note(call.plan);
  std::optional<Failure> failure;
  {
    const GilAway release;  // a full queue blocks
    failure = calls.start(call.plan, call.input, call.output, prepared.stream, limit_s);
  }
  if (failure) throw *failure;
}

}  // namespace fastcoll
