// SPDX-License-Identifier: Apache-2.0
// The calls with a part for each rank: their tensors and split sizes, alike on CPUs and on a GPU.
//
// A side is that of prepare_tensors.h.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "python/arguments.h"
#include "python/prepare.h"
#include "python/read_parts.h"

namespace fastcoll {

// The tensors of an argument: a list or tuple of them, or one.
template <class Side>
class Views {
 public:
  Views(const Side& side, bool is_written) : side_(side), is_written_(is_written) {}
  // False if one does not suit the fast path, or there are too many.
  bool read_list(PyObject* object) {
    const std::span<PyObject*> items = items_of(object);
    if (items.size() > views_.size()) return false;
    for (PyObject* item : items)
      if (!read_one(item)) return false;
    return true;
  }
  bool read_one(PyObject* object) {
    const std::optional<TensorView> view = side_.view(object, is_written_);
    if (view) views_[size_++] = *view;
    return view.has_value();
  }
  std::span<const TensorView> views() const { return {views_.data(), size_}; }

 private:
  const Side& side_;
  const bool is_written_;
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

// The call, as finish(call, kind, plan) makes it; no fast call if its plan is not known. parts: not
// cleared.
template <class Side, class Finish>
Prepared prepare_parts(const Side& side, FastVerb verb, const Args& args, Op op, Parts& parts,
                       Finish finish) {
  const ProcessGroup& group = side.group;
  const Signature& signature = signature_of(verb);
  PartsCall call{signature.core, group.rank(), group.world_size()};
  call.cuts = !signature.takes_sequences;
  if (signature.takes_root && args[kRoot]) {
    const std::optional<int> root = root_of(group, args[kRoot]);
    if (!root) return {};
    call.root = *root;
  }
  const bool is_elsewhere = signature.takes_root && call.rank != call.root;
  const auto read = [&](Views<Side>& views, Param param, bool has_parts) {
    if (!has_parts) return views.read_one(args[param]);
    // Ranks other than the root may pass any object in place of its one tensor; it is ignored, as
    // in torch.
    if (is_elsewhere) return call.cuts || !given(args[param]);
    return call.cuts ? views.read_one(args[param]) : views.read_list(args[param]);
  };
  Views<Side> outputs(side, true), inputs(side, false);
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
  const Op reduction = call.verb == Verb::reduce_scatter ? op : Op::sum;
  const Plan* plan = side.find(
      {call.verb, kind->dtype, reduction, call.root, args.options, kind->splits, kind->numel});
  return plan ? finish(call, *kind, *plan) : Prepared{};
}

}  // namespace fastcoll
