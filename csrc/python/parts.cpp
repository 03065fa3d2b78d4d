// SPDX-License-Identifier: Apache-2.0
// Fast calls of the verbs with a part for each rank. Decides which tensors and split sizes suit the
// fast path; other calls go to Python.
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
  const Signature& signature = signature_of(verb);
  PartsCall call{signature.core, group.rank(), group.world_size()};
  call.cuts = !signature.takes_sequences;
  if (signature.takes_root && args[kRoot]) {
    const std::optional<int> root = root_of(group, args[kRoot]);
    if (!root) return {};
    call.root = *root;
  }
  const bool is_elsewhere = signature.takes_root && call.rank != call.root;
  const auto read = [&](Views& views, Param param, bool has_parts) {
    if (!has_parts) return views.read_one(args[param]);
    // Ranks other than the root may pass any object in place of its one tensor; it is ignored, as
    // in torch.
    if (is_elsewhere) return call.cuts || !given(args[param]);
    return call.cuts ? views.read_one(args[param]) : views.read_list(args[param]);
  };
  Views outputs, inputs;
  Sizes output_sizes, input_sizes;
  const Param input = signature.output == kTensor ? kSecond : kTensor;
  if (!read(outputs, signature.output, verb_gets_parts(call.verb)) ||
      !read(inputs, input, verb_gives_parts(call.verb)) ||
      !output_sizes.read(group, args[kOutSplits]) || !input_sizes.read(group, args[kInSplits]))
    return {};
  call.outputs = outputs.views();
  call.inputs = inputs.views();
  call.output_sizes = output_sizes.sizes();
  call.input_sizes = input_sizes.sizes();
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
