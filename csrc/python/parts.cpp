// SPDX-License-Identifier: Apache-2.0
// Fast calls of the verbs with a part for each rank, on CPU tensors.
#include "python/dense_copies.h"
#include "python/prepare_parts.h"
#include "python/prepare_tensors.h"

namespace fastcoll {

namespace {

Prepared finish(const PartsCall& call, const PartsKind& kind, const Plan& plan) {
  const bool reduces = call.verb == Verb::reduce_scatter;
  if (reduces && !takes_lists(plan)) return {};
  Prepared prepared{plan, nullptr, nullptr, kind.num_bytes, !kind.is_whole};
  if (kind.is_whole) prepared.input = call.inputs[0].ptr;
  if (kind.is_whole || reduces) prepared.output = call.outputs[0].ptr;
  return prepared;
}

// Tensors that are copied where they are not contiguous.
struct Copied {
  const ProcessGroup& group;
  DenseCopies& copies;
  std::optional<TensorView> view(PyObject* object, bool is_written) const {
    return copies.view(object, is_written ? DenseCopies::Use::output : DenseCopies::Use::input);
  }
  const Plan* find(const PlanTable::Key& key) const { return group.cached_plan(key); }
};

}  // namespace

Prepared prepare_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                       Parts& parts) {
  return prepare_parts(OnCpu{group}, verb, args, op, parts, finish);
}

Prepared prepare_copied_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                              Parts& parts, DenseCopies& copies) {
  const Prepared call = prepare_parts(Copied{group, copies}, verb, args, op, parts, finish);
  const bool may_be_in_place = signature_of(verb).core != Verb::all_to_all;
  return call.is_fast() && copies.are_apart(group.rank(), may_be_in_place) ? call : Prepared{};
}

}  // namespace fastcoll
