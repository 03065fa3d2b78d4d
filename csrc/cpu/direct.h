// SPDX-License-Identifier: Apache-2.0
// direct: all_gather, broadcast and barrier. On memory everyone can read there is nothing to
// choose: the owner stages (or points at its symmetric tensor), the readers copy.
#pragma once

#include "cpu/call.h"

namespace fastcoll {

inline size_t direct_segments(const Plan& plan) {
  if (plan.inlined) return 1;
  return std::max<size_t>(1, div_up(plan.numel * plan.elem_bytes(), plan.segment_bytes));
}

template <class P>
class Direct {
 public:
  explicit Direct(Call<P>& call)
      : call_(call),
        group_(call.group),
        num_bytes_(call.plan.numel * call.elem_bytes()),
        num_segments_(direct_segments(call.plan)),
        segment_bytes_(round_up(div_up(num_bytes_, num_segments_), kLineBytes)) {}

  void all_gather() {
    if (call_.plan.inlined) return all_gather_inlined();
    open(call_.input);
    std::byte* own = call_.output + size_t(call_.rank()) * num_bytes_;
    if (own != call_.input) copy_bytes(own, call_.input, num_bytes_);
    uint64_t sources[kMaxWorld];
    for (int peer = 0; peer < call_.world_size(); ++peer)
      if (peer != call_.rank()) sources[peer] = group_.wait_arrival(peer).location.input;
    for (size_t k = 0; k < num_segments_; ++k) {
      if (k + 1 < num_segments_) stage(call_.input, k + 1);
      for (int i = 1; i < call_.world_size(); ++i) {
        const int peer = (call_.rank() + i) % call_.world_size();
        fetch(peer, sources[peer], k, call_.output + size_t(peer) * num_bytes_);
      }
      group_.consume(k + 1);
    }
    close();
  }

  void broadcast() {
    const int root = call_.plan.root;
    if (call_.plan.inlined) {
      // A rank that is not the root sends nothing, but its line tells the next call's waiters that
      // it was here.
      group_.arrive_inlined(call_.input, call_.rank() == root ? num_bytes_ : 0);
      if (call_.rank() != root) group_.read_inlined(root, call_.output, num_bytes_);
      return;
    }
    if (call_.rank() == root) {
      open(call_.input);
      for (size_t k = 1; k < num_segments_; ++k) stage(call_.input, k);
      close();
      return;
    }
    group_.arrive(Location::kStaged, Location::kStaged);
    const uint64_t source = group_.wait_arrival(root).location.input;
    for (size_t k = 0; k < num_segments_; ++k) {
      fetch(root, source, k, call_.output);
      group_.consume(k + 1);
    }
  }

  void barrier() {
    group_.arrive_inlined(nullptr, 0);
    for (int peer = 0; peer < call_.world_size(); ++peer)
      if (peer != call_.rank()) group_.wait_arrival(peer);
  }

 private:
  // Below this a copy costs less than waiting until everybody has read a symmetric tensor.
  static constexpr size_t kLeastInPlaceBytes = size_t{64} << 10;

  size_t segment_numel_bytes(size_t k) const {
    return std::min(segment_bytes_, num_bytes_ - std::min(num_bytes_, k * segment_bytes_));
  }

  // Say where my message lies; stage its first segment if nobody can read it there.
  void open(const std::byte* message) {
    location_ =
        num_bytes_ < kLeastInPlaceBytes ? Location::kStaged : group_.locate(message, num_bytes_);
    if (location_ == Location::kStaged)
      copy_bytes(group_.claim_slot(0), message, segment_numel_bytes(0));
    group_.arrive(location_, Location::kStaged);
  }

  void stage(const std::byte* message, size_t k) {
    if (location_ != Location::kStaged) return;
    copy_bytes(group_.claim_slot(k), message + k * segment_bytes_, segment_numel_bytes(k));
    group_.publish_staged(k + 1);
    // A root consumes nothing itself: it must not hold up its own later calls or anybody's slots.
    if (call_.plan.verb == Verb::broadcast) group_.consume(k);
  }

  void fetch(int peer, uint64_t source, size_t k, std::byte* output) {
    const std::byte* from;
    if (source == Location::kStaged) {
      if (k > 0) group_.wait_staged(peer, k + 1);
      from = group_.slot(peer, k);
    } else {
      from = group_.resolve(peer, source) + k * segment_bytes_;
    }
    copy_bytes(output + k * segment_bytes_, from, segment_numel_bytes(k));
  }

  // A symmetric message is its owner's again only when everybody has read it.
  void close() {
    if (location_ == Location::kStaged) return;
    group_.consume(num_segments_);
    group_.wait_consumed(num_segments_);
  }

  void all_gather_inlined() {
    group_.arrive_inlined(call_.input, num_bytes_);
    std::byte* own = call_.output + size_t(call_.rank()) * num_bytes_;
    if (own != call_.input) copy_bytes(own, call_.input, num_bytes_);
    for (int peer = 0; peer < call_.world_size(); ++peer)
      if (peer != call_.rank())
        group_.read_inlined(peer, call_.output + size_t(peer) * num_bytes_, num_bytes_);
  }

  Call<P>& call_;
  Group<P>& group_;
  const size_t num_bytes_;
  const size_t num_segments_;
  const size_t segment_bytes_;
  uint64_t location_ = Location::kStaged;
};

}  // namespace fastcoll
