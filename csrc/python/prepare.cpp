// SPDX-License-Identifier: Apache-2.0
#include "python/prepare.h"

#include "python/arguments.h"
#include "python/dense_copies.h"
#include "python/prepare_tensors.h"

namespace fastcoll {

namespace {

// A list of hundreds of tensors drives its own objects out of the caches. So fetch some tensors
// ahead of the i-th, and their objects earlier still.
void expect_tensors(std::span<PyObject* const> tensors, size_t i) {
  constexpr size_t kAhead = 4;
  if (i + kAhead < tensors.size()) expect_tensor(tensors[i + kAhead]);
  if (i + 2 * kAhead < tensors.size()) __builtin_prefetch(tensors[i + 2 * kAhead]);
}

}  // namespace

Prepared prepare(FastVerb verb, const ProcessGroup& group, const Args& args, Op op, Parts& parts) {
  if (signature_of(verb).kind == VerbKind::parts)
    return prepare_parts(verb, group, args, op, parts);
  const OnCpu side{group};
  if (verb == FastVerb::barrier)
    return with_plan(side, {}, Verb::barrier, DType::uint8, Op::sum, 0, 0, nullptr, nullptr);
  return prepare_tensors(side, verb, args, op);
}

Prepared with_plan(const ProcessGroup& group, CallOptions options, Verb verb, DType dtype, Op op,
                   uint64_t numel, int root, const void* input, void* output) {
  return with_plan(OnCpu{group}, options, verb, dtype, op, numel, root, input, output);
}

std::vector<PreparedList> prepare_lists(Verb verb, const ProcessGroup& group, PyObject* output_list,
                                        PyObject* input_list, Op op, CallOptions options,
                                        DenseCopies* copies) {
  const bool reduces_all = verb == Verb::all_reduce, gathers = verb == Verb::all_gather;
  const std::span<PyObject*> outputs = items_of(output_list);
  const std::span<PyObject*> inputs = reduces_all ? outputs : items_of(input_list);
  if (outputs.size() != inputs.size()) return {};
  using Use = DenseCopies::Use;
  const auto view = [copies](PyObject* object, Use use) {
    return copies ? copies->view(object, use) : view_tensor(object);
  };
  const uint64_t world = uint64_t(group.world_size());
  std::vector<PreparedList> lists;
  std::vector<TensorSize> sizes;
  std::vector<Extent> extents;
  sizes.reserve(outputs.size());
  extents.reserve(2 * outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    expect_tensors(outputs, i);
    if (!reduces_all) expect_tensors(inputs, i);
    const std::optional<TensorView> first = view(outputs[i], reduces_all ? Use::both : Use::output);
    const std::optional<TensorView> second =
        reduces_all ? std::nullopt : view(inputs[i], Use::input);
    if (!first || !(second || reduces_all)) return {};
    const TensorView &output = *first, &input = reduces_all ? *first : *second;
    if (output.dtype != input.dtype) return {};
    const TensorView &part = gathers ? input : output, &whole = gathers ? output : input;
    const uint64_t numel = part.numel;
    sizes.push_back({input.dtype, numel});
    if (reduces_all) {
      extents.push_back({output.ptr, output.end(), true});
    } else {
      if (whole.numel != numel * world) return {};
      const bool in_place = is_own_part(group, part, whole);
      extents.push_back({whole.ptr, whole.end(), in_place || gathers});
      if (!in_place) extents.push_back({part.ptr, part.end(), !gathers});
    }
    auto same = std::find_if(lists.begin(), lists.end(),
                             [&](const PreparedList& other) { return other.dtype == input.dtype; });
    if (same == lists.end()) same = lists.insert(same, PreparedList{input.dtype});
    if (numel != 0) same->list.push_back({input.ptr, output.ptr, same->numel, numel});
    same->numel += numel;
  }
  if (!apart(extents)) return {};
  for (PreparedList& one : lists) {
    const Plan* plan = group.cached_plan(verb, one.dtype, op, one.numel, 0,
                                         list_splits(sizes, one.dtype), options);
    if (!plan) return {};
    one.plan = *plan;
  }
  return !copies || copies->are_apart(group.rank(), false) ? lists : std::vector<PreparedList>{};
}

void run_lists(ProcessGroup& group, const std::vector<PreparedList>& lists, Host& host,
               double timeout_s) {
  for (const PreparedList& one : lists) {
    if (one.numel * dtype_size(one.dtype) >= kGilFreeBytes) host.blocking();
    group.run(one.plan, {.list = &one.list}, host, timeout_s);
  }
}

}  // namespace fastcoll
