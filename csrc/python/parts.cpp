// SPDX-License-Identifier: Apache-2.0
// Fast calls of the verbs with a part for each rank, on CPU tensors.
#include "python/prepare_parts.h"
#include "python/prepare_tensors.h"

namespace fastcoll {

Prepared prepare_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                       Parts& parts) {
  const auto finish = [](const PartsCall& call, const PartsKind& kind, const Plan& plan) {
    const bool reduces = call.verb == Verb::reduce_scatter;
    if (reduces && !takes_lists(plan)) return Prepared{};
    Prepared prepared{plan, nullptr, nullptr, kind.num_bytes, !kind.is_whole};
    if (kind.is_whole) prepared.input = call.inputs[0].ptr;
    if (kind.is_whole || reduces) prepared.output = call.outputs[0].ptr;
    return prepared;
  };
  return prepare_parts(OnCpu{group}, verb, args, op, parts, finish);
}

}  // namespace fastcoll
