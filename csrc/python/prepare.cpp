// SPDX-License-Identifier: Apache-2.0
#include "python/prepare.h"

#include "python/arguments.h"

namespace fastcoll {

Prepared with_plan(const ProcessGroup& group, CallOptions options, Verb verb, DType dtype, Op op,
                   uint64_t numel, int root, const void* input, void* output) {
  const Plan* plan = group.cached_plan(verb, dtype, op, numel, root, 0, options);
  return plan ? Prepared{*plan, input, output, numel * dtype_size(dtype)} : Prepared{};
}

namespace {

// The place of a call in place: this rank's part of the whole.
bool is_own_part(const ProcessGroup& group, const TensorView& part, const TensorView& whole) {
  return part.ptr == whole.ptr + size_t(group.rank()) * part.num_bytes();
}

Prepared prepare_reduce(const ProcessGroup& group, const Args& args, Op op) {
  const std::optional<int> root = root_of(group, args[kRoot]);
  const std::optional<TensorView> tensor = view_argument(args[kTensor]);
  if (!root || !tensor) return {};
  std::byte* output = tensor->ptr;
  if (group.rank() == *root && given(args[kSecond])) {
    const std::optional<TensorView> out = view_tensor(args[kSecond]);
    if (!out || out->dtype != tensor->dtype || !same_shape(*tensor, *out)) return {};
    if (out->ptr != tensor->ptr && overlap(*tensor, *out)) return {};
    output = out->ptr;
  }
  return with_plan(group, args.options, Verb::reduce, tensor->dtype, op, tensor->numel, *root,
                   tensor->ptr, output);
}

Prepared prepare_tensors(FastVerb verb, const ProcessGroup& group, const Args& args, Op op) {
  if (given(args[kThen])) [[unlikely]]
    return {};
  const std::optional<TensorView> tensor = view_argument(args[kTensor]);
  if (!tensor) return {};
  if (verb == FastVerb::broadcast) {
    const std::optional<int> root = root_of(group, args[kRoot]);
    if (!root) return {};
    return with_plan(group, args.options, Verb::broadcast, tensor->dtype, Op::sum, tensor->numel,
                     *root, tensor->ptr, tensor->ptr);
  }
  if (verb == FastVerb::all_reduce && !given(args[kSecond]))
    return with_plan(group, args.options, Verb::all_reduce, tensor->dtype, op, tensor->numel, 0,
                     tensor->ptr, tensor->ptr);
  const std::optional<TensorView> second = view_argument(args[kSecond]);
  if (!second || second->dtype != tensor->dtype) return {};
  const uint64_t world = uint64_t(group.world_size());
  const auto fits = [&](const TensorView& part, const TensorView& whole) {
    return whole.numel == part.numel * world &&
           (is_own_part(group, part, whole) || !overlap(part, whole));
  };
  switch (verb) {
    case FastVerb::all_reduce:  // tensor -> out
      if (!same_shape(*tensor, *second)) return {};
      if (second->ptr != tensor->ptr && overlap(*tensor, *second)) return {};
      return with_plan(group, args.options, Verb::all_reduce, tensor->dtype, op, tensor->numel, 0,
                       tensor->ptr, second->ptr);
    case FastVerb::reduce_scatter_tensor:  // input -> output
      if (!fits(*tensor, *second)) return {};
      return with_plan(group, args.options, Verb::reduce_scatter, tensor->dtype, op, tensor->numel,
                       0, second->ptr, tensor->ptr);
    case FastVerb::all_gather_into_tensor:  // input_tensor -> output_tensor
      if (!fits(*second, *tensor)) return {};
      return with_plan(group, args.options, Verb::all_gather, tensor->dtype, Op::sum, second->numel,
                       0, second->ptr, tensor->ptr);
    default:
      return {};
  }
}

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
  switch (verb) {
    case FastVerb::barrier:
      return with_plan(group, {}, Verb::barrier, DType::uint8, Op::sum, 0, 0, nullptr, nullptr);
    case FastVerb::reduce:
      return prepare_reduce(group, args, op);
    default:
      return prepare_tensors(verb, group, args, op);
  }
}

std::vector<PreparedList> prepare_lists(Verb verb, const ProcessGroup& group, PyObject* output_list,
                                        PyObject* input_list, Op op, CallOptions options) {
  const bool reduces_all = verb == Verb::all_reduce, gathers = verb == Verb::all_gather;
  const std::span<PyObject*> outputs = items_of(output_list);
  const std::span<PyObject*> inputs = reduces_all ? outputs : items_of(input_list);
  if (outputs.size() != inputs.size()) return {};
  const uint64_t world = uint64_t(group.world_size());
  std::vector<PreparedList> lists;
  std::vector<TensorSize> sizes;
  std::vector<Extent> extents;
  sizes.reserve(outputs.size());
  extents.reserve(2 * outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    expect_tensors(outputs, i);
    if (!reduces_all) expect_tensors(inputs, i);
    const std::optional<TensorView> first = view_tensor(outputs[i]);
    const std::optional<TensorView> second = reduces_all ? std::nullopt : view_tensor(inputs[i]);
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
  return lists;
}

void run_lists(ProcessGroup& group, const std::vector<PreparedList>& lists, Host& host,
               double timeout_s) {
  for (const PreparedList& one : lists) {
    if (one.numel * dtype_size(one.dtype) >= kGilFreeBytes) host.blocking();
    group.run(one.plan, {.list = &one.list}, host, timeout_s);
  }
}

}  // namespace fastcoll
