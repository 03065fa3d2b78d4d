// SPDX-License-Identifier: Apache-2.0
// The verbs with a part for each rank.
#include "fast_arguments.h"
#include "fast_prepare.h"

namespace fastcoll {

namespace {

// Reads a call's parts into `parts`, and notes where they lie.
class PartsReader {
 public:
  PartsReader(const ProcessGroup& group, DType dtype, Parts& parts)
      : group_(group), dtype_(dtype), parts_(parts) {
    // Read where this rank gives or gets nothing.
    parts.inputs[size_t(group.rank())] = parts.outputs[size_t(group.rank())] = {nullptr, 0};
  }

  bool is_written(const std::array<Part, kMaxWorld>& side) const {
    return &side == &parts_.outputs;
  }
  // A tensor for each rank; all of `numel` elements, unless that is kAny.
  static constexpr uint64_t kAny = ~uint64_t{0};
  bool read_list(PyObject* object, uint64_t numel, std::array<Part, kMaxWorld>& side) {
    const std::span<PyObject*> items = items_of(object);
    if (items.size() != size_t(group_.world_size())) return false;
    for (size_t rank = 0; rank < items.size(); ++rank) {
      const std::optional<TensorView> tensor = view_tensor(items[rank]);
      if (!tensor || tensor->dtype != dtype_ || (numel != kAny && tensor->numel != numel))
        return false;
      put(side, rank, tensor->ptr, tensor->num_bytes());
    }
    return true;
  }
  // One part alone; as big as one of the list.
  void put_one(std::array<Part, kMaxWorld>& side, int rank, const TensorView& tensor) {
    put(side, size_t(rank), tensor.ptr, tensor.num_bytes());
  }
  // A tensor cut by rows: into `sizes`, one number for each rank, or equally.
  bool cut(const TensorView& tensor, PyObject* sizes, std::array<Part, kMaxWorld>& side) {
    const size_t world = size_t(group_.world_size());
    if (tensor.ndim == 0) return false;
    const auto rows = uint64_t(tensor.shape[0]);
    const std::span<PyObject*> items = items_of(sizes);
    const bool equally = !given(sizes);
    if (equally ? rows % world != 0 : items.size() != world) return false;
    const size_t row_bytes = rows == 0 ? 0 : tensor.num_bytes() / rows;
    uint64_t start = 0;
    for (size_t rank = 0; rank < world; ++rank) {
      const std::optional<uint64_t> size = equally ? rows / world : number_of(items[rank]);
      if (!size || *size > rows - start) return false;
      side[rank] = {tensor.ptr + start * row_bytes, *size * row_bytes};
      start += *size;
    }
    return start == rows;
  }
  Prepared with_plan(Verb verb, uint64_t numel, int root, uint64_t splits = 0) {
    const Plan* plan = group_.cached_plan(verb, dtype_, Op::sum, numel, root, splits);
    if (!plan || !apart({extents_.data(), num_extents_})) return {};
    return {*plan, nullptr, nullptr, num_bytes_, true};
  }

 private:
  void put(std::array<Part, kMaxWorld>& side, size_t rank, std::byte* ptr, size_t num_bytes) {
    side[rank] = {ptr, num_bytes};
    extents_[num_extents_++] = {ptr, ptr + num_bytes, is_written(side)};
    num_bytes_ += num_bytes;
  }

  const ProcessGroup& group_;
  const DType dtype_;
  Parts& parts_;
  std::array<Extent, 2 * kMaxWorld> extents_;
  size_t num_extents_ = 0;
  size_t num_bytes_ = 0;
};

}  // namespace

Prepared prepare_rooted(FastVerb verb, const ProcessGroup& group, const Args& args, Parts& parts) {
  const std::optional<int> root = args[kRoot] ? root_of(group, args[kRoot]) : 0;
  const std::optional<TensorView> tensor = view_argument(args[kTensor]);
  if (!tensor || !root) return {};
  const bool gathers = verb == FastVerb::gather;
  PartsReader reader(group, tensor->dtype, parts);
  reader.put_one(gathers ? parts.inputs : parts.outputs, gathers ? group.rank() : *root, *tensor);
  if (group.rank() != *root) {
    if (given(args[kSecond])) return {};
  } else if (!reader.read_list(args[kSecond], tensor->numel,
                               gathers ? parts.outputs : parts.inputs)) {
    return {};
  }
  return reader.with_plan(gathers ? Verb::gather : Verb::scatter, tensor->numel, *root);
}

Prepared prepare_all_gather(const ProcessGroup& group, const Args& args, Parts& parts) {
  const std::optional<TensorView> tensor = view_argument(args[kTensor]);
  if (!tensor) return {};
  PartsReader reader(group, tensor->dtype, parts);
  reader.put_one(parts.inputs, group.rank(), *tensor);
  if (!reader.read_list(args[kSecond], tensor->numel, parts.outputs)) return {};
  return reader.with_plan(Verb::all_gather, tensor->numel, 0);
}

Prepared prepare_reduce_scatter(const ProcessGroup& group, const Args& args, Op op, Parts& parts) {
  const std::optional<TensorView> output = view_argument(args[kTensor]);
  const std::span<PyObject*> items = items_of(args[kSecond]);
  if (!output || items.size() != size_t(group.world_size())) return {};
  std::optional<TensorView> first;
  std::array<Extent, kMaxWorld + 1> extents;
  size_t num_extents = 0;
  extents[num_extents++] = {output->ptr, output->end(), true};
  for (size_t rank = 0; rank < items.size(); ++rank) {
    const std::optional<TensorView> part = view_tensor(items[rank]);
    if (!part || part->dtype != output->dtype || part->numel != output->numel) return {};
    if (!first) first = part;
    if (!same_shape(*part, *first)) return {};  // which means a reduce for each
    parts.inputs[rank] = {part->ptr, part->num_bytes()};
    const bool is_in_place = int(rank) == group.rank() && part->ptr == output->ptr;
    if (!is_in_place) extents[num_extents++] = {part->ptr, part->end(), false};
  }
  Prepared call = with_plan(group, args.asked, Verb::reduce_scatter, output->dtype, op,
                            output->numel, 0, nullptr, output->ptr);
  if (!call.is_fast() || !takes_lists(call.plan) || !apart({extents.data(), num_extents}))
    return {};
  call.in_parts = true;
  call.num_bytes *= items.size();
  return call;
}

namespace {

// Whether a rank gives itself as much as it expects of itself; the others find out in the call.
bool own_part_fits(const ProcessGroup& group, const Parts& parts) {
  const auto rank = size_t(group.rank());
  return parts.inputs[rank].num_bytes == parts.outputs[rank].num_bytes;
}

}  // namespace

Prepared prepare_all_to_all(const ProcessGroup& group, const Args& args, Parts& parts) {
  const std::span<PyObject*> items = items_of(args[kTensor]);
  const std::optional<TensorView> first = items.empty() ? std::nullopt : view_tensor(items[0]);
  if (!first) return {};
  PartsReader reader(group, first->dtype, parts);
  if (!reader.read_list(args[kTensor], PartsReader::kAny, parts.outputs) ||
      !reader.read_list(args[kSecond], PartsReader::kAny, parts.inputs) ||
      !own_part_fits(group, parts))
    return {};
  return reader.with_plan(Verb::all_to_all, 0, 0, kCountedSplits);
}

Prepared prepare_all_to_all_single(const ProcessGroup& group, const Args& args, Parts& parts) {
  const std::optional<TensorView> output = view_argument(args[kTensor]);
  const std::optional<TensorView> input = view_argument(args[kSecond]);
  if (!output || !input || output->dtype != input->dtype || overlap(*output, *input)) return {};
  PartsReader reader(group, input->dtype, parts);
  if (!reader.cut(*output, args[kOutSplits], parts.outputs) ||
      !reader.cut(*input, args[kInSplits], parts.inputs) || !own_part_fits(group, parts))
    return {};
  if (given(args[kOutSplits]) || given(args[kInSplits])) {
    Prepared call = reader.with_plan(Verb::all_to_all, 0, 0, kCountedSplits);
    call.num_bytes = input->num_bytes() + output->num_bytes();
    return call;
  }
  return with_plan(group, {}, Verb::all_to_all, input->dtype, Op::sum,
                   input->numel / uint64_t(group.world_size()), 0, input->ptr, output->ptr);
}

}  // namespace fastcoll
