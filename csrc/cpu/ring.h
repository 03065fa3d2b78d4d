// SPDX-License-Identifier: Apache-2.0
// ring (Patarasuk and Yuan 2009): chunk c starts at rank c+1 and gathers every rank's part on its
// way round to rank c. In an all_reduce it goes round once more as a result. Only neighbours
// exchange data, in 2(n-1) steps. The order of summation differs from chunk to chunk. So ring is
// admitted only where the order can't matter or numerics="fast" was asked for.
#pragma once

#include "cpu/call.h"

namespace fastcoll {

// A slot holds a segment's accumulators, chunk by chunk, then its results, chunk by chunk.
inline size_t ring_slot_elem_bytes(const Plan& plan) {
  return plan.elem_bytes() + accumulator_size(plan.dtype);
}

template <class P>
Staging ring_staging(const Call<P>& call) {
  return {Chunks(call, ring_slot_elem_bytes(call.plan)).num_segments()};
}

template <class P>
class Ring {
 public:
  explicit Ring(Call<P>& call)
      : call_(call),
        group_(call.group),
        chunks_(call, ring_slot_elem_bytes(call.plan)),
        fns_(*partial_fns(call.plan.dtype, call.plan.op)),
        elem_(call.elem_bytes()),
        acc_(accumulator_size(call.plan.dtype)),
        rank_(call.rank()),
        world_(call.world_size()),
        left_((call.rank() + world_ - 1) % world_) {}

  void run() {
    group_.arrive(Location::kStaged, Location::kStaged);
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_) group_.wait_arrival(peer);
    for (size_t k = 0; k < chunks_.num_segments(); ++k) {
      mine_ = group_.claim_slot(k);
      theirs_ = group_.slot(left_, k);
      for (int step = 0; step < world_; ++step) reduce_scatter_step(k, step);
      if (!call_.scatters())
        for (int step = 1; step < world_; ++step) all_gather_step(k, step);
      group_.consume(k + 1);
    }
  }

 private:
  // Steps are counted through the call: 0..n-1 reduce, n..2n-2 gather.
  uint64_t step_count(size_t k, int step) const {
    return k * uint64_t(2 * world_ - 1) + uint64_t(step) + 1;
  }
  int wrap(int rank) const { return (rank % world_ + world_) % world_; }

  void reduce_scatter_step(size_t k, int step) {
    const int j = wrap(rank_ - 1 - step);
    const Span span = chunks_.chunk(j, k);
    const std::byte* input = call_.input + call_.input_start(j, span.start) * elem_;
    if (step == 0) {
      fns_.load(partial(mine_, j), input, span.numel);
    } else {
      group_.wait_staged(left_, step_count(k, step - 1));
      fns_.accumulate(partial(mine_, j), partial(theirs_, j), input, span.numel);
    }
    if (step == world_ - 1) {  // j == rank: the chunk is whole
      fns_.finish(result(mine_, j), partial(mine_, j), span.numel, world_);
      keep(k, j);
    }
    group_.publish_staged(step_count(k, step));
  }

  void all_gather_step(size_t k, int step) {
    const int j = wrap(rank_ - step);
    group_.wait_staged(left_, step_count(k, world_ - 1 + step - 1));
    copy_bytes(result(mine_, j), result(theirs_, j), chunks_.chunk(j, k).numel * elem_);
    keep(k, j);
    group_.publish_staged(step_count(k, world_ - 1 + step));
  }

  void keep(size_t k, int j) { call_.write_output(j, chunks_.chunk(j, k), result(mine_, j)); }
  std::byte* partial(std::byte* slot, int j) const {
    return slot + size_t(j) * chunks_.stride() * acc_;
  }
  std::byte* result(std::byte* slot, int j) const {
    return slot + chunks_.stride() * (size_t(world_) * acc_ + size_t(j) * elem_);
  }

  Call<P>& call_;
  Group<P>& group_;
  const Chunks chunks_;
  const PartialFns& fns_;
  const size_t elem_, acc_;
  const int rank_, world_, left_;
  std::byte* mine_ = nullptr;
  std::byte* theirs_ = nullptr;
};

template <class P>
void ring(Call<P>& call) {
  Ring<P>(call).run();
}

}  // namespace fastcoll
