// SPDX-License-Identifier: Apache-2.0
// Fast calls on tensors of which one at least is not contiguous. Decides whether their elements may
// share memory; a call in doubt goes to Python.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "python/arguments.h"
#include "python/dense_copies.h"
#include "python/prepare.h"

namespace fastcoll {

namespace {

struct Reach {
  const std::byte* begin;  // the first byte of any element
  int64_t num_bytes;       // to behind the last one
};

// Of the elements in one row: dimensions of whole pitches are left out. 0: of all elements.
Reach reach_of(const StridedView& view, int64_t pitch = 0) {
  int64_t before = 0, after = int64_t(dtype_size(view.tensor.dtype));
  for (int i = 0; i < view.tensor.ndim; ++i) {
    const int64_t stride = view.strides_bytes[size_t(i)];
    if (pitch == 0 || stride % pitch != 0)
      (stride < 0 ? before : after) += stride * (view.tensor.shape[i] - 1);
  }
  return {view.tensor.ptr + before, after - before};
}

// Whether two tensors interleave as columns of one matrix do: modulo its pitch, their rows lie
// apart.
bool interleave(const StridedView& a, const StridedView& b) {
  int64_t pitch = 1;
  for (int i = 0; i < a.tensor.ndim; ++i)
    if (a.tensor.shape[i] > 1) pitch = std::max(pitch, std::abs(a.strides_bytes[size_t(i)]));
  const Reach in_a = reach_of(a, pitch), in_b = reach_of(b, pitch);
  const int64_t from_a = ((in_b.begin - in_a.begin) % pitch + pitch) % pitch;
  return from_a >= in_a.num_bytes && from_a + in_b.num_bytes <= pitch;
}

bool are_apart(const StridedView& a, const StridedView& b) {
  const Reach all_a = reach_of(a), all_b = reach_of(b);
  return all_a.begin + all_a.num_bytes <= all_b.begin ||
         all_b.begin + all_b.num_bytes <= all_a.begin || interleave(a, b);
}

// Whether elements may share memory. They can't if the extent along smaller strides fits between
// the elements of each greater stride.
bool may_overlap_itself(const StridedView& view) {
  std::array<std::pair<int64_t, int64_t>, StridedView::kMostDims> dims;  // stride, size
  size_t num_dims = 0;
  for (int i = 0; i < view.tensor.ndim; ++i) {
    if (view.tensor.shape[i] <= 1) continue;
    const std::pair dim(std::abs(view.strides_bytes[size_t(i)]), view.tensor.shape[i]);
    size_t place = num_dims++;  // sorted by hand: GCC 16 warns of std::sort in a small array
    for (; place > 0 && dim < dims[place - 1]; --place) dims[place] = dims[place - 1];
    dims[place] = dim;
  }
  auto reach = int64_t(dtype_size(view.tensor.dtype));
  for (size_t i = 0; i < num_dims; ++i) {
    const auto [stride, size] = dims[i];
    if (stride < reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

bool is_same(const StridedView& a, const StridedView& b) {
  const auto dims = size_t(a.tensor.ndim);
  return a.tensor.ptr == b.tensor.ptr && same_shape(a.tensor, b.tensor) &&
         std::equal(a.strides_bytes.begin(), a.strides_bytes.begin() + dims,
                    b.strides_bytes.begin());
}

bool put(Strided& place, const StridedView& view) {
  return place.set(view.tensor.ptr, dtype_size(view.tensor.dtype), view.tensor.ndim,
                   view.tensor.shape, view.strides_bytes.data());
}

bool is_contiguous(const StridedView& view) {
  auto stride = int64_t(dtype_size(view.tensor.dtype));
  for (int i = view.tensor.ndim - 1; i >= 0; --i) {
    if (view.tensor.shape[i] != 1 && view.strides_bytes[size_t(i)] != stride) return false;
    stride *= view.tensor.shape[i];
  }
  return true;
}

// The roles of the arguments; the numel is that of the plan.
struct Roles {
  Verb verb;
  PyObject *input, *output;
  int root = 0;
};

std::optional<Roles> roles_of(FastVerb verb, const ProcessGroup& group, const Args& args) {
  PyObject *first = args[kTensor], *second = args[kSecond];
  PyObject* result = given(second) ? second : first;
  const std::optional<int> root = signature_of(verb).takes_root ? root_of(group, args[kRoot]) : 0;
  if (!root) return std::nullopt;
  switch (verb) {
    case FastVerb::all_reduce:
      return Roles{Verb::all_reduce, first, result};
    case FastVerb::reduce_scatter_tensor:
      return Roles{Verb::reduce_scatter, second, first};
    case FastVerb::all_gather_into_tensor:
      return Roles{Verb::all_gather, second, first};
    case FastVerb::broadcast:
      return Roles{Verb::broadcast, first, first, *root};
    case FastVerb::reduce:
      return Roles{Verb::reduce, first, group.rank() == *root ? result : first, *root};
    default:
      return std::nullopt;
  }
}

}  // namespace

Prepared prepare_strided(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                         StridedPair& places) {
  const std::optional<Roles> roles = roles_of(verb, group, args);
  if (!roles || !given(roles->input) || !given(roles->output)) return {};
  const std::optional<StridedView> input = view_strided(roles->input);
  const std::optional<StridedView> output =
      roles->output == roles->input ? input : view_strided(roles->output);
  if (!input || !output || input->tensor.dtype != output->tensor.dtype) return {};

  const bool is_root = group.rank() == roles->root;
  const bool is_written = roles->verb == Verb::broadcast ? !is_root
                          : roles->verb == Verb::reduce  ? is_root
                                                         : true;
  if (is_written && may_overlap_itself(*output)) return {};
  const bool scatters = roles->verb == Verb::reduce_scatter,
             gathers = roles->verb == Verb::all_gather;
  const TensorView &whole = scatters ? input->tensor : output->tensor,
                   &part = scatters ? output->tensor : input->tensor;
  if (part.numel == 0) return {};
  if (scatters || gathers) {
    if (whole.numel != part.numel * uint64_t(group.world_size())) return {};
  } else if (!same_shape(whole, part)) {
    return {};
  }
  if (!is_same(*input, *output) && !are_apart(*input, *output)) return {};

  const Op reduction = verb_reduces(roles->verb) ? op : Op::sum;
  Prepared call = with_plan(group, args.options, roles->verb, part.dtype, reduction, part.numel,
                            roles->root, nullptr, nullptr);
  if (!call.is_fast() || !takes_strided(call.plan)) return {};
  call.is_strided = true;
  return put(places.input, *input) && put(places.output, *output) ? call : Prepared{};
}

std::optional<TensorView> DenseCopies::view(PyObject* object, Use use) {
  const bool is_written = use != Use::input;
  if (!given(object)) return std::nullopt;
  const std::optional<StridedView> seen = view_strided(object);
  if (!seen) return std::nullopt;
  TensorView tensor = seen->tensor;
  (is_written ? outputs_ : inputs_).push_back(*seen);
  if (tensor.numel == 0 || is_contiguous(*seen)) return tensor;
  if (is_written && may_overlap_itself(*seen)) return std::nullopt;
  Copy copy{{}, nullptr, tensor.numel, use};
  if (!put(copy.place, *seen)) return std::nullopt;
  copy.dense.reset(new (std::nothrow) std::byte[tensor.num_bytes()]);
  if (!copy.dense) return std::nullopt;  // Python tells the other ranks
  tensor.ptr = copy.dense.get();
  num_bytes_ += tensor.num_bytes();
  copies_.push_back(std::move(copy));
  return tensor;
}

bool DenseCopies::are_apart(int rank, bool may_be_in_place) const {
  struct Extent {
    Reach reach;
    const StridedView* view;
    bool is_written, is_own;
    const std::byte* end() const { return reach.begin + reach.num_bytes; }
  };
  std::vector<Extent> extents;
  const auto add = [&](const std::vector<StridedView>& side, bool is_written) {
    const size_t own = side.size() == 1 ? 0 : size_t(rank);
    for (size_t i = 0; i < side.size(); ++i)
      if (side[i].tensor.numel != 0)
        extents.push_back({reach_of(side[i]), &side[i], is_written, may_be_in_place && i == own});
  };
  add(outputs_, true);
  add(inputs_, false);
  // Sorted, so that long lists take no look at each pair.
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.reach.begin < b.reach.begin; });
  for (size_t i = 0; i < extents.size(); ++i) {
    const Extent& one = extents[i];
    for (size_t j = i + 1; j < extents.size() && extents[j].reach.begin < one.end(); ++j) {
      const Extent& other = extents[j];
      if (!one.is_written && !other.is_written) continue;
      if (one.is_own && other.is_own && is_same(*one.view, *other.view)) continue;
      if (!interleave(*one.view, *other.view)) return false;
    }
  }
  return true;
}

void DenseCopies::read() const {
  for (const Copy& copy : copies_)
    if (copy.use != Use::output) copy.place.read(copy.dense.get(), 0, copy.numel);
}

void DenseCopies::write() const {
  for (const Copy& copy : copies_)
    if (copy.use != Use::input) copy.place.write(0, copy.dense.get(), copy.numel);
}

}  // namespace fastcoll
