// SPDX-License-Identifier: Apache-2.0
#include "python/read_parts.h"

#include <array>

namespace fastcoll {

namespace {

// Notes where parts lie, and whether they may be used as they are.
class Reader {
 public:
  Reader(const PartsCall& call, DType dtype, Parts& parts)
      : call_(call), dtype_(dtype), parts_(parts) {
    // Read where this rank gives or gets nothing.
    parts.inputs[size_t(call.rank)] = parts.outputs[size_t(call.rank)] = {nullptr, 0};
  }

  static constexpr uint64_t kAny = ~uint64_t{0};
  // A tensor for each rank; all of `numel` elements, unless that is kAny. The call also writes the
  // tensor of rank `in_place`.
  bool read_list(std::span<const TensorView> tensors, uint64_t numel,
                 std::array<Part, kMaxWorld>& side, int in_place = -1) {
    if (tensors.size() != size_t(call_.world_size)) return false;
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      const TensorView& tensor = tensors[rank];
      if (tensor.dtype != dtype_ || (numel != kAny && tensor.numel != numel)) return false;
      put(side, int(rank), tensor, int(rank) == in_place);
    }
    return true;
  }
  // One part alone; or one of a list. In place, the call also writes it.
  void put(std::array<Part, kMaxWorld>& side, int rank, const TensorView& tensor,
           bool is_in_place = false) {
    side[size_t(rank)] = {tensor.ptr, tensor.num_bytes()};
    if (!is_in_place) add_extent(tensor, &side == &parts_.outputs);
  }
  // One tensor of any shape, which has `numel` elements for each rank.
  bool cut_equally(const TensorView& tensor, uint64_t numel, std::array<Part, kMaxWorld>& side) {
    const auto world = size_t(call_.world_size);
    if (tensor.dtype != dtype_ || tensor.numel != numel * world) return false;
    const size_t part_bytes = tensor.num_bytes() / world;
    for (size_t rank = 0; rank < world; ++rank)
      side[rank] = {tensor.ptr + rank * part_bytes, part_bytes};
    add_extent(tensor, &side == &parts_.outputs);
    return true;
  }
  // One tensor, cut by rows into parts of these sizes, or equally if there are none.
  bool cut(const TensorView& tensor, std::span<const int64_t> sizes,
           std::array<Part, kMaxWorld>& side) {
    const size_t world = size_t(call_.world_size);
    if (tensor.ndim == 0 || tensor.dtype != dtype_) return false;
    const auto rows = uint64_t(tensor.shape[0]);
    if (sizes.empty() ? rows % world != 0 : sizes.size() != world) return false;
    const size_t row_bytes = rows == 0 ? 0 : tensor.num_bytes() / rows;
    uint64_t start = 0;
    for (size_t rank = 0; rank < world; ++rank) {
      const uint64_t size = sizes.empty() ? rows / world : uint64_t(sizes[rank]);
      if (size > rows - start) return false;  // also one below 0
      side[rank] = {tensor.ptr + start * row_bytes, size * row_bytes};
      start += size;
    }
    add_extent(tensor, &side == &parts_.outputs);
    return start == rows;
  }
  std::optional<PartsKind> kind(uint64_t numel, uint64_t splits = 0) {
    if (!apart({extents_.data(), num_extents_})) return std::nullopt;
    return PartsKind{.dtype = dtype_, .numel = numel, .splits = splits, .num_bytes = num_bytes_};
  }
  // Of sizes that only two ranks know: this one gives itself as much as it expects of itself; the
  // others find out in the call.
  std::optional<PartsKind> counted_kind() {
    const auto rank = size_t(call_.rank);
    if (parts_.inputs[rank].num_bytes != parts_.outputs[rank].num_bytes) return std::nullopt;
    return kind(0, kCountedSplits);
  }

 private:
  void add_extent(const TensorView& tensor, bool is_written) {
    extents_[num_extents_++] = {tensor.ptr, tensor.end(), is_written};
    num_bytes_ += tensor.num_bytes();
  }

  const PartsCall& call_;
  const DType dtype_;
  Parts& parts_;
  std::array<Extent, 2 * kMaxWorld> extents_;
  size_t num_extents_ = 0;
  size_t num_bytes_ = 0;
};

std::optional<PartsKind> read_rooted(const PartsCall& call, Parts& parts) {
  const bool gathers = call.verb == Verb::gather, is_root = call.rank == call.root;
  const auto &one = gathers ? call.inputs : call.outputs,
             &list = gathers ? call.outputs : call.inputs;
  const size_t list_size = !is_root ? 0 : call.cuts ? 1 : size_t(call.world_size);
  if (one.size() != 1 || list.size() != list_size) return std::nullopt;
  const TensorView& mine = one[0];
  Reader reader(call, mine.dtype, parts);
  auto& listed = gathers ? parts.outputs : parts.inputs;
  bool is_in_place = false;
  if (is_root && call.cuts) {
    if (!reader.cut_equally(list[0], mine.numel, listed)) return std::nullopt;
    is_in_place = listed[size_t(call.rank)].ptr == mine.ptr;
  } else if (is_root) {
    is_in_place = list[size_t(call.rank)].ptr == mine.ptr;
    if (!reader.read_list(list, mine.numel, listed, is_in_place && !gathers ? call.rank : -1))
      return std::nullopt;
  }
  reader.put(gathers ? parts.inputs : parts.outputs, gathers ? call.rank : call.root, mine,
             is_in_place && (gathers || call.cuts));
  return reader.kind(mine.numel);
}

std::optional<PartsKind> read_all_gather(const PartsCall& call, Parts& parts) {
  if (call.inputs.size() != 1) return std::nullopt;
  const TensorView& input = call.inputs[0];
  Reader reader(call, input.dtype, parts);
  if (!reader.read_list(call.outputs, Reader::kAny, parts.outputs)) return std::nullopt;
  const TensorView& own = call.outputs[size_t(call.rank)];
  if (own.numel != input.numel) return std::nullopt;
  reader.put(parts.inputs, call.rank, input, own.ptr == input.ptr);
  std::array<uint64_t, kMaxWorld> numels;
  uint64_t sum = 0;
  bool is_even = true;
  for (size_t rank = 0; rank < call.outputs.size(); ++rank) {
    sum += numels[rank] = call.outputs[rank].numel;
    is_even = is_even && numels[rank] == input.numel;
  }
  if (is_even) return reader.kind(input.numel);
  return reader.kind(sum, uneven_splits({numels.data(), call.outputs.size()}));
}

std::optional<PartsKind> read_reduce_scatter(const PartsCall& call, Parts& parts) {
  if (call.outputs.size() != 1 || call.inputs.size() != size_t(call.world_size))
    return std::nullopt;
  const TensorView& output = call.outputs[0];
  std::array<Extent, kMaxWorld + 1> extents;
  size_t num_extents = 0;
  extents[num_extents++] = {output.ptr, output.end(), true};
  for (size_t rank = 0; rank < call.inputs.size(); ++rank) {
    const TensorView& part = call.inputs[rank];
    if (part.dtype != output.dtype || part.numel != output.numel) return std::nullopt;
    if (!same_shape(part, call.inputs[0])) return std::nullopt;  // the call means a reduce for each
    parts.inputs[rank] = {part.ptr, part.num_bytes()};
    const bool is_in_place = int(rank) == call.rank && part.ptr == output.ptr;
    if (!is_in_place) extents[num_extents++] = {part.ptr, part.end(), false};
  }
  if (!apart({extents.data(), num_extents})) return std::nullopt;
  return PartsKind{.dtype = output.dtype,
                   .numel = output.numel,
                   .num_bytes = output.num_bytes() * call.inputs.size()};
}

std::optional<PartsKind> read_all_to_all(const PartsCall& call, Parts& parts) {
  if (call.outputs.empty() || call.inputs.empty()) return std::nullopt;
  const TensorView &output = call.outputs[0], &input = call.inputs[0];
  Reader reader(call, output.dtype, parts);
  if (!call.cuts) {
    const bool fits = reader.read_list(call.outputs, Reader::kAny, parts.outputs) &&
                      reader.read_list(call.inputs, Reader::kAny, parts.inputs);
    return fits ? reader.counted_kind() : std::nullopt;
  }
  if (!reader.cut(output, call.output_sizes, parts.outputs) ||
      !reader.cut(input, call.input_sizes, parts.inputs))
    return std::nullopt;
  if (!call.output_sizes.empty() || !call.input_sizes.empty()) return reader.counted_kind();
  if (output.numel != input.numel) return std::nullopt;
  std::optional<PartsKind> kind = reader.kind(input.numel / uint64_t(call.world_size));
  if (kind) kind->is_whole = true;
  return kind;
}

}  // namespace

std::optional<PartsKind> read_parts(const PartsCall& call, Parts& parts) {
  switch (call.verb) {
    case Verb::gather:
    case Verb::scatter:
      return read_rooted(call, parts);
    case Verb::all_gather:
      return read_all_gather(call, parts);
    case Verb::reduce_scatter:
      return read_reduce_scatter(call, parts);
    default:
      return read_all_to_all(call, parts);
  }
}

}  // namespace fastcoll
