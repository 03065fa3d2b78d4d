// SPDX-License-Identifier: Apache-2.0
// Fast calls of the verbs with a part for each rank.
#include "python/arguments.h"
#include "python/prepare.h"
#include "python/read_parts.h"

namespace fastcoll {

namespace {

// The tensors of an argument: a list or tuple of them, or one.
class Views {
 public:
  // False if one does not suit the fast path, or there are too many.
  bool read_list(PyObject* object) {
    const std::span<PyObject*> items = items_of(object);
    if (items.size() > views_.size()) return false;
    for (PyObject* item : items)
      if (!add(item)) return false;
    return true;
  }
  bool read_one(PyObject* object) { return given(object) && add(object); }
  std::span<const TensorView> views() const { return {views_.data(), size_}; }

 private:
  bool add(PyObject* object) {
    const std::optional<TensorView> view = view_tensor(object);
    if (view) views_[size_++] = *view;
    return view.has_value();
  }

  std::array<TensorView, kMaxWorld> views_;
  size_t size_ = 0;
};

// Split sizes; none if they are not given.
class Sizes {
 public:
  bool read(const ProcessGroup& group, PyObject* object) {
    if (!given(object)) return true;
    const std::span<PyObject*> items = items_of(object);
    if (items.size() != size_t(group.world_size())) return false;
    for (PyObject* item : items) {
      const std::optional<uint64_t> size = number_of(item);
      if (!size) return false;
      sizes_[size_++] = int64_t(*size);
    }
    return true;
  }
  std::span<const int64_t> sizes() const { return {sizes_.data(), size_}; }

 private:
  std::array<int64_t, kMaxWorld> sizes_;
  size_t size_ = 0;
};

}  // namespace

Prepared prepare_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                       Parts& parts) {
  Views first, second;
  Sizes output_sizes, input_sizes;
  PartsCall call{Verb::all_to_all, group.rank(), group.world_size()};
  switch (verb) {
    case FastVerb::gather:
    case FastVerb::gather_single:
    case FastVerb::scatter: {
      const bool gathers = verb != FastVerb::scatter;
      call.verb = gathers ? Verb::gather : Verb::scatter;
      call.cuts = verb == FastVerb::gather_single;
      const std::optional<int> root = args[kRoot] ? root_of(group, args[kRoot]) : 0;
      if (!root || !first.read_one(args[kTensor])) return {};
      call.root = *root;
      if (call.cuts) {  // the others' is ignored, as torch does
        if (group.rank() == *root && !second.read_one(args[kSecond])) return {};
      } else if (group.rank() != *root ? given(args[kSecond]) : !second.read_list(args[kSecond])) {
        return {};
      }
      call.outputs = gathers ? second.views() : first.views();
      call.inputs = gathers ? first.views() : second.views();
      break;
    }
    case FastVerb::all_gather:
      call.verb = Verb::all_gather;
      if (!first.read_one(args[kTensor]) || !second.read_list(args[kSecond])) return {};
      call.inputs = first.views();
      call.outputs = second.views();
      break;
    case FastVerb::reduce_scatter:
      call.verb = Verb::reduce_scatter;
      if (!first.read_one(args[kTensor]) || !second.read_list(args[kSecond])) return {};
      call.outputs = first.views();
      call.inputs = second.views();
      break;
    case FastVerb::all_to_all:
    case FastVerb::all_to_all_single:
      call.cuts = verb == FastVerb::all_to_all_single;
      if (call.cuts ? !first.read_one(args[kTensor]) || !second.read_one(args[kSecond]) ||
                          !output_sizes.read(group, args[kOutSplits]) ||
                          !input_sizes.read(group, args[kInSplits])
                    : !first.read_list(args[kTensor]) || !second.read_list(args[kSecond]))
        return {};
      call.outputs = first.views();
      call.inputs = second.views();
      call.output_sizes = output_sizes.sizes();
      call.input_sizes = input_sizes.sizes();
      break;
    default:
      return {};
  }
  const std::optional<PartsKind> kind = read_parts(call, parts);
  if (!kind) return {};
  const bool reduces = call.verb == Verb::reduce_scatter;
  const Plan* plan = group.cached_plan(call.verb, kind->dtype, reduces ? op : Op::sum, kind->numel,
                                       call.root, kind->splits, args.options);
  if (!plan || (reduces && !takes_lists(*plan))) return {};
  Prepared prepared{*plan, nullptr, nullptr, kind->num_bytes, !kind->is_whole};
  if (kind->is_whole) prepared.input = call.inputs[0].ptr;
  if (kind->is_whole || reduces) prepared.output = call.outputs[0].ptr;
  return prepared;
}

}  // namespace fastcoll
