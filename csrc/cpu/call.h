// SPDX-License-Identifier: Apache-2.0
// One call as the algorithms see it, and how its elements are cut into segments and chunks.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/group.h"
#include "cpu/reduce.h"

namespace fastcoll {

// What one rank gives to another, or gets from it.
struct Part {
  std::byte* ptr;
  size_t num_bytes;
};

// By rank; a side on which this rank gives or gets nothing is not read.
struct Parts {
  std::array<Part, kMaxWorld> inputs, outputs;
};

template <class P>
struct Call {
  Group<P>& group;
  const Plan& plan;
  const std::byte* input;
  std::byte* output;
  const Parts* parts = nullptr;  // in place of input and output, for verbs that only move data

  int rank() const { return group.rank(); }
  int world_size() const { return group.world_size(); }
  size_t elem_bytes() const { return plan.elem_bytes(); }
  bool scatters() const { return plan.verb == Verb::reduce_scatter; }
  // Whether a rank gets a result.
  bool gets(int rank) const { return plan.verb != Verb::reduce || rank == plan.root; }
  // Elements of a rank's whole input.
  size_t input_numel() const {
    const bool has_all_parts =
        scatters() || plan.verb == Verb::all_to_all || plan.verb == Verb::scatter;
    return has_all_parts ? plan.numel * size_t(world_size()) : plan.numel;
  }
  void reduce(void* const* dsts, int num_dsts, const void* const* srcs, size_t numel) const {
    if (numel == 0) return;
    reduce_fn(plan.dtype, plan.op)({dsts, num_dsts, srcs, world_size(), numel, world_size()});
  }
};

struct Span {
  size_t start;  // first element, counted in a rank's input
  size_t numel;
};

constexpr size_t div_up(size_t a, size_t b) { return (a + b - 1) / b; }
constexpr size_t round_up(size_t a, size_t b) { return div_up(a, b) * b; }

// A reduction's input, cut into num_segments segments of world_size chunks; chunk j is reduced by
// rank j. Every chunk starts on a line of its own in the slot, so ranks never share one. The same
// for every rank: computed from the plan alone.
class Chunks {
 public:
  // slot_elem_bytes: what one element takes in a slot.
  template <class P>
  Chunks(const Call<P>& call, size_t slot_elem_bytes)
      : scatters_(call.scatters()), numel_(call.plan.numel) {
    const size_t world = size_t(call.world_size());
    const size_t line = kLineBytes / std::min(call.elem_bytes(), kLineBytes);
    const size_t most =
        call.plan.segment_bytes / world / kLineBytes * kLineBytes / slot_elem_bytes / line * line;
    const size_t chunk_numel = scatters_ ? numel_ : div_up(numel_, world);
    num_segments_ = std::max<size_t>(1, div_up(chunk_numel, most));
    // Equal segments, rather than full ones and a small rest.
    stride_ = round_up(div_up(chunk_numel, num_segments_), line);
    world_ = world;
  }
  size_t num_segments() const { return num_segments_; }
  size_t stride() const { return stride_; }  // elements from one chunk to the next in a slot
  Span chunk(int j, size_t segment_idx) const {
    if (scatters_) {
      const size_t start = std::min(segment_idx * stride_, numel_);
      return {size_t(j) * numel_ + start, std::min(stride_, numel_ - start)};
    }
    const size_t start = std::min((segment_idx * world_ + size_t(j)) * stride_, numel_);
    return {start, std::min(stride_, numel_ - start)};
  }
  // Where chunk j's elements go in a rank's output.
  size_t output_start(int j, size_t segment_idx) const {
    return scatters_ ? std::min(segment_idx * stride_, numel_) : chunk(j, segment_idx).start;
  }

 private:
  bool scatters_;
  size_t numel_;
  size_t world_;
  size_t num_segments_;
  size_t stride_;
};

}  // namespace fastcoll
