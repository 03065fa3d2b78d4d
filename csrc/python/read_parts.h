// SPDX-License-Identifier: Apache-2.0
// The verbs with a part for each rank: finds the places of the parts, from the tensors of a caller.
// Needs no GIL, as torch's compiled backend calls it, too (core_api.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpu/operands.h"
#include "extents.h"
#include "python/tensor_view.h"

namespace fastcoll {

struct PartsCall {
  Verb verb;  // all_gather, gather, scatter, reduce_scatter or all_to_all
  int rank, world_size, root = 0;
  std::span<const TensorView> outputs = {}, inputs = {};  // on a side without parts, one
  // Of an all_to_all: each side is one tensor, to be cut by rows, equally where no sizes are given.
  // Of a gather or a scatter: the root's side is one tensor, cut equally.
  bool cuts = false;
  std::span<const int64_t> output_sizes = {}, input_sizes = {};
};

// The key of the plan for these parts.
struct PartsKind {
  DType dtype;
  uint64_t numel = 0;
  uint64_t splits = 0;
  size_t num_bytes = 0;   // how much moves, about
  bool is_whole = false;  // equal parts, end to end in one tensor on either side
};

// None if the tensors do not fit together, or may not be parts of one message. `parts` is not
// cleared.
std::optional<PartsKind> read_parts(const PartsCall& call, Parts& parts);

}  // namespace fastcoll
