// SPDX-License-Identifier: Apache-2.0
// schedule: carries out any schedule that the model has proven (python/fastcoll_model), step by
// step. Its scratch is the group's: segment k of every block of the message lies in slot k. Up to
// kAhead segments are in flight at once, so that a rank that waits in one advances the next. A sum
// in scratch has the tensor's type: half types are rounded at every addition.
#pragma once

#include "cpu/call.h"
#include "cpu/program.h"

namespace fastcoll {

// How the message is cut: units (a rank's part, or all of it) of blocks, blocks into segments.
template <class P>
struct BlockCut {
  explicit BlockCut(const Call<P>& call)
      : unit_blocks(call.program->blocks().unit), unit_numel(call.plan.numel) {
    const size_t elem = call.elem_bytes(), line = kLineBytes / std::min(elem, kLineBytes);
    const size_t most =
        call.plan.segment_bytes / call.program->blocks().scratch / kLineBytes * kLineBytes / elem;
    block_numel = round_up(div_up(unit_numel, unit_blocks), line);
    num_segments = std::max<size_t>(1, div_up(block_numel, most));
    stride = round_up(div_up(block_numel, num_segments), line);
  }
  // Segment k of a block, counted from its unit's first element.
  Span span(size_t block, size_t k) const {
    const size_t first = block % unit_blocks * block_numel;
    const size_t end = std::min({first + block_numel, first + (k + 1) * stride, unit_numel});
    const size_t start = std::min(first + k * stride, end);
    return {start, end - start};
  }
  size_t unit_blocks, unit_numel, block_numel, num_segments, stride;
};

template <class P>
Staging executor_staging(const Call<P>& call) {
  if (!call.program) throw Failure(ErrorKind::usage, "a plan of a schedule that was not added");
  return {BlockCut<P>(call).num_segments};
}

template <class P>
class Executor {
 public:
  explicit Executor(Call<P>& call)
      : call_(call), group_(call.group), program_(*call.program), cut_(call) {}

  void run() {
    group_.arrive(Location::kStaged, Location::kStaged);
    for (int peer = 0; peer < call_.world_size(); ++peer)
      if (peer != call_.rank()) group_.wait_arrival(peer);
    // Segments [first, next) are on their way.
    for (size_t first = 0, next = 0; first < cut_.num_segments;) {
      while (next < cut_.num_segments && next - first < kAhead) start(next++);
      for (size_t k = first; k < next; ++k) advance(k);
      if (!ended(first)) wait_for(first);
      while (first < next && ended(first)) group_.consume(++first);
    }
  }

 private:
  // So many that slower ranks have room to be behind.
  static constexpr size_t kAhead = kNumSlots / 2;

  bool ended(size_t k) const { return at_[k % kAhead] == program_.steps().size(); }

  // Other ranks write into my slot of segment k as I do into theirs. So all ranks wait for the
  // `done` of all ranks before their first step.
  void start(size_t k) {
    if (P::kClaimsSegments) group_.claim_slot(k);
    at_[k % kAhead] = 0;
  }

  // Do steps of segment k up to a wait whose signal is not there yet.
  void advance(size_t k) {
    size_t& at = at_[k % kAhead];
    for (; at < program_.steps().size(); ++at) {
      const ProgramStep& step = program_.steps()[at];
      if (step.kind == StepKind::wait) {
        if (!group_.has_signalled(step.peer, k, step.count)) return;
      } else if (step.kind == StepKind::signal) {
        group_.publish_signals(k, step.count);
      } else {
        move(step, k);
      }
    }
  }

  // Nothing can be done before a signal comes. The oldest segment depends on no younger one of
  // any rank, so to wait in it is no deadlock.
  void wait_for(size_t k) {
    const ProgramStep& step = program_.steps()[at_[k % kAhead]];
    group_.wait_signals(step.peer, k, step.count);
  }

  void move(const ProgramStep& step, size_t k) {
    const Place* places = program_.places(step);
    const bool is_result = places[0].buffer == BufferKind::output;
    const bool divides = call_.plan.op == Op::avg && verb_reduces(call_.plan.verb);
    const Op op = divides && !is_result ? Op::sum : call_.plan.op;
    const bool copies = step.kind == StepKind::copy && !(divides && is_result);
    const void* sources[kMaxWorld];
    for (uint32_t i = 0; i < step.num_blocks; ++i) {
      const size_t numel = cut_.span(places[0].block + i, k).numel;
      if (numel == 0) continue;
      void* dst = address(places[0], i, k);
      for (uint32_t j = 0; j < step.num_sources; ++j) sources[j] = address(places[1 + j], i, k);
      if (copies) {
        copy_bytes(dst, sources[0], numel * call_.elem_bytes());
      } else {
        reduce_fn(call_.plan.dtype,
                  op)({&dst, 1, sources, int(step.num_sources), numel, call_.world_size()});
      }
    }
  }

  std::byte* address(const Place& place, uint32_t i, size_t k) const {
    const size_t block = place.block + i, elem = call_.elem_bytes();
    if (place.buffer == BufferKind::scratch)
      return group_.slot(place.rank, k) + block * cut_.stride * elem;
    const size_t unit = block / cut_.unit_blocks, start = cut_.span(block, k).start;
    const bool is_input = place.buffer == BufferKind::input;
    if (call_.parts) {
      const Part& part = (is_input ? call_.parts->inputs : call_.parts->outputs)[unit];
      return part.ptr + start * elem;
    }
    // An input is only read.
    std::byte* base = is_input ? const_cast<std::byte*>(call_.input) : call_.output;
    return base + (unit * cut_.unit_numel + start) * elem;
  }

  Call<P>& call_;
  Group<P>& group_;
  const Program& program_;
  const BlockCut<P> cut_;
  size_t at_[kAhead] = {};  // the next step of each segment on its way
};

template <class P>
void execute(Call<P>& call) {
  Executor<P>(call).run();
}

}  // namespace fastcoll
