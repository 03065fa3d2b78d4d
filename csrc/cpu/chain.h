// SPDX-License-Identifier: Apache-2.0
// chain: accumulators travel from rank 0 to rank n-1, each rank adding its own, and the result
// travels back. Neighbours only, like a ring, but summed in rank order: the same bits as one_shot
// and two_shot. Pipelined by segments. A reduce_scatter keeps only its own part of the returning
// result.
#pragma once

#include "cpu/call.h"

namespace fastcoll {

// A slot holds a segment's accumulators, then its results.
struct ChainLayout {
  explicit ChainLayout(const Plan& plan)
      : elem(plan.elem_bytes()),
        acc(accumulator_size(plan.dtype)),
        numel(plan.segment_bytes / (acc + elem) / kLineBytes * kLineBytes) {}
  size_t elem, acc;
  size_t numel;  // elements of a segment
  size_t results_offset_bytes() const { return numel * acc; }
};

template <class P>
Staging chain_staging(const Call<P>& call) {
  return {std::max<size_t>(1, div_up(call.input_numel(), ChainLayout(call.plan).numel))};
}

template <class P>
class Chain {
 public:
  explicit Chain(Call<P>& call)
      : call_(call),
        group_(call.group),
        layout_(call.plan),
        fns_(*partial_fns(call.plan.dtype, call.plan.op)),
        rank_(call.rank()),
        last_(call.world_size() - 1) {}

  void run() {
    const size_t num_segments = chain_staging(call_).num_segments;
    group_.arrive(Location::kStaged, Location::kStaged);
    for (int peer = 0; peer <= last_; ++peer)
      if (peer != rank_) group_.wait_arrival(peer);
    // Forward runs ahead of backward, by less than the slots there are.
    for (size_t k = 0; k < num_segments + kAhead; ++k) {
      if (k < num_segments) forward(k);
      if (k >= kAhead) backward(k - kAhead);
    }
  }

 private:
  static constexpr size_t kAhead = kNumSlots / 2;

  Span segment(size_t k) const {
    const size_t start = std::min(k * layout_.numel, call_.input_numel());
    return {start, std::min(layout_.numel, call_.input_numel() - start)};
  }
  std::byte* results(std::byte* slot) const { return slot + layout_.results_offset_bytes(); }

  // 1. Add my input to the left neighbour's sum; the last rank rounds.
  void forward(size_t k) {
    const Span span = segment(k);
    const std::byte* input = call_.input + span.start * layout_.elem;
    std::byte* slot = group_.claim_slot(k);
    if (rank_ == 0) {
      fns_.load(slot, input, span.numel);
    } else {
      group_.wait_staged(rank_ - 1, k + 1);
      fns_.accumulate(slot, group_.slot(rank_ - 1, k), input, span.numel);
    }
    if (rank_ == last_) fns_.finish(results(slot), slot, span.numel, call_.world_size());
    group_.publish_staged(k + 1);
  }

  // 2. Hand the result back to the left, and keep my part of it.
  void backward(size_t k) {
    const Span span = segment(k);
    std::byte* mine = results(group_.slot(rank_, k));
    if (rank_ < last_) {
      group_.wait_reduced(rank_ + 1, k + 1);
      copy_bytes(mine, results(group_.slot(rank_ + 1, k)), span.numel * layout_.elem);
    }
    group_.publish_reduced(k + 1);
    keep(span, mine);
    group_.consume(k + 1);
  }

  void keep(const Span& span, const std::byte* result) {
    const size_t window_start = call_.scatters() ? size_t(rank_) * call_.plan.numel : 0;
    const size_t start = std::max(span.start, window_start);
    const size_t end = std::min(span.start + span.numel, window_start + call_.plan.numel);
    if (start >= end) return;
    copy_bytes(call_.output + (start - window_start) * layout_.elem,
               result + (start - span.start) * layout_.elem, (end - start) * layout_.elem);
  }

  Call<P>& call_;
  Group<P>& group_;
  const ChainLayout layout_;
  const PartialFns& fns_;
  const int rank_, last_;
};

template <class P>
void chain(Call<P>& call) {
  Chain<P>(call).run();
}

}  // namespace fastcoll
