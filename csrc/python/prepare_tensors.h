// SPDX-License-Identifier: Apache-2.0
// The calls with one tensor, or one of each kind: their checks, alike on CPUs and on a GPU.
//
// A side has the `group`. Its `view` of an argument is none if that is left out or does not suit.
// Its `find` returns the plan of a key, or null.
#pragma once

#include "python/arguments.h"
#include "python/prepare.h"

namespace fastcoll {

struct OnCpu {
  const ProcessGroup& group;
  std::optional<TensorView> view(PyObject* object, bool /*is_written*/ = false) const {
    return view_argument(object);
  }
  const Plan* find(const PlanTable::Key& key) const { return group.cached_plan(key); }
};

template <class Side>
Prepared with_plan(const Side& side, CallOptions options, Verb verb, DType dtype, Op op,
                   uint64_t numel, int root, const void* input, void* output) {
  const Plan* plan = side.find({verb, dtype, op, root, options, 0, numel});
  return plan ? Prepared{*plan, input, output, numel * dtype_size(dtype)} : Prepared{};
}

// The place of a call in place: this rank's part of the whole.
inline bool is_own_part(const ProcessGroup& group, const TensorView& part,
                        const TensorView& whole) {
  return part.ptr == whole.ptr + size_t(group.rank()) * part.num_bytes();
}

template <class Side>
Prepared prepare_reduce(const Side& side, const Args& args, Op op) {
  const ProcessGroup& group = side.group;
  const std::optional<int> root = root_of(group, args[kRoot]);
  const std::optional<TensorView> tensor = side.view(args[kTensor]);
  if (!root || !tensor) return {};
  std::byte* output = tensor->ptr;
  if (group.rank() == *root && given(args[kSecond])) {
    const std::optional<TensorView> out = side.view(args[kSecond]);
    if (!out || out->dtype != tensor->dtype || !same_shape(*tensor, *out)) return {};
    if (out->ptr != tensor->ptr && overlap(*tensor, *out)) return {};
    output = out->ptr;
  }
  return with_plan(side, args.options, Verb::reduce, tensor->dtype, op, tensor->numel, *root,
                   tensor->ptr, output);
}

// Of a verb with one tensor, or one of each kind.
template <class Side>
Prepared prepare_tensors(const Side& side, FastVerb verb, const Args& args, Op op) {
  if (verb == FastVerb::reduce) return prepare_reduce(side, args, op);
  const ProcessGroup& group = side.group;
  if (given(args[kThen])) [[unlikely]]
    return {};
  const std::optional<TensorView> tensor = side.view(args[kTensor]);
  if (!tensor) return {};
  if (verb == FastVerb::broadcast) {
    const std::optional<int> root = root_of(group, args[kRoot]);
    if (!root) return {};
    return with_plan(side, args.options, Verb::broadcast, tensor->dtype, Op::sum, tensor->numel,
                     *root, tensor->ptr, tensor->ptr);
  }
  if (verb == FastVerb::all_reduce && !given(args[kSecond]))
    return with_plan(side, args.options, Verb::all_reduce, tensor->dtype, op, tensor->numel, 0,
                     tensor->ptr, tensor->ptr);
  const std::optional<TensorView> second = side.view(args[kSecond]);
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
      return with_plan(side, args.options, Verb::all_reduce, tensor->dtype, op, tensor->numel, 0,
                       tensor->ptr, second->ptr);
    case FastVerb::reduce_scatter_tensor:  // input -> output
      if (!fits(*tensor, *second)) return {};
      return with_plan(side, args.options, Verb::reduce_scatter, tensor->dtype, op, tensor->numel,
                       0, second->ptr, tensor->ptr);
    case FastVerb::all_gather_into_tensor:  // input_tensor -> output_tensor
      if (!fits(*second, *tensor)) return {};
      return with_plan(side, args.options, Verb::all_gather, tensor->dtype, Op::sum, second->numel,
                       0, second->ptr, tensor->ptr);
    default:
      return {};
  }
}

}  // namespace fastcoll
