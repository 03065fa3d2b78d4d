// SPDX-License-Identifier: Apache-2.0
// The engine of every algorithm but the LL ones: a systolic pipeline. In iteration i a rank does
// step s of segment i - s * lag, for every step s of the algorithm. Then it publishes that to its
// peers with ONE progress word. A step reads data that peers wrote `lag` iterations before: its
// wait has had that long to be over. Knows no verb and no arithmetic.
//
// Why one engine: an algorithm is a few steps (stage, reduce, copy out; a ring has 2n - 1) that
// each look at another segment. So one place waits, one rule reuses memory, one proof covers all
// verbs, and copies overlap with the reduction without code of their own. The protocol needs no
// word at the end of a call (kernels/README.md).
#pragma once

#include "cuda/channel.cuh"
#include "cuda/shape.h"

namespace fastcoll {

struct Flow {
  Peers sources;          // the ranks whose data I read
  Peers readers;          // the ranks that read mine
  Peers meets;            // the ranks whose arrival I wait for: the sources, or more
  uint32_t num_segments;  // of a rank's part; may differ between ranks if they have counts
  uint32_t num_steps;     // that a segment takes, one after the other; at least 2
  uint32_t slot_tiles;    // scratch that a segment takes, in tiles
  uint32_t reads;         // steps from filling a slot until its last reader is through: 1 or 2
  bool pushes = false;    // results go into the outputs of others, or are pulled by them
  // Of a peer's symmetric tensors, which must lie in its heap. No tensor is as large as kStaged.
  static constexpr uint64_t kStaged = ~uint64_t{0};
  uint64_t input_bytes = kStaged, output_bytes = kStaged;
};

template <class P>
class Pipeline {
 public:
  // location: see GpuLocation; `both` of the input's where no peer writes into my output. If ranks
  // exchange different numbers of elements, `counts` has those to each rank, then those from each.
  FASTCOLL_DEVICE Pipeline(Channel<P>& channel, const Flow& flow, uint64_t location,
                           const uint64_t* counts = nullptr)
      : channel_(channel),
        call_(channel.call()),
        flow_(flow),
        location_(location),
        counts_(counts),
        lag_(counts != nullptr || flow.num_segments > kLag ? kLag : 1),
        has_from_(!flow.sources.is_empty()),
        has_to_(!flow.readers.is_empty()),
        from_(channel.own(flow.sources)),
        to_(channel.own(flow.readers)),
        parity_(channel.begin_pipelined()),
        shared_(block_shared<BlockShared>()) {}

  FASTCOLL_DEVICE bool staged() const { return GpuLocation::input(location_) == 0; }
  // The place of a source's data, once it has arrived.
  FASTCOLL_DEVICE uint64_t location(int peer) const {
    return peer == call_.rank ? location_ : shared_.locations[peer];
  }
  FASTCOLL_DEVICE std::byte* symmetric(int rank, uint32_t location) const {
    return call_.heaps[rank] + GpuLocation::heap_offset_bytes(location);
  }
  // Segment k of this call lies in slot k mod kSlots of the call's half of the channel's scratch.
  FASTCOLL_DEVICE std::byte* slot(int rank, uint32_t segment_idx, int part = 0) const {
    return channel_.scratch(rank, parity_) +
           (size_t{segment_idx % kSlots} * flow_.slot_tiles + size_t(part)) * channel_.tile_bytes();
  }

  // step(s, segment_idx) does one step of one segment. False: the call has failed.
  template <class Step>
  FASTCOLL_DEVICE bool run(Step step) {
    if (channel_.failed()) return false;  // before anything is staged
    const uint32_t last = flow_.num_segments + (flow_.num_steps - 1) * lag_ - 1;
    for (uint32_t i = 0; i <= last; ++i) {
      if (i >= lag_ && !wait(i)) return false;
      for (uint32_t s = 0; s < flow_.num_steps; ++s) {
        const uint32_t segment_idx = i - s * lag_;  // before the first: huge
        if (segment_idx < flow_.num_segments) step(s, segment_idx);
      }
      // No rank waits for the steps of the last iterations.
      if (i + lag_ <= last && !publish(i)) return false;
    }
    if (!exit()) return false;
    channel_.end_pipelined(flow_.meets.count() == channel_.peers().count());
    return true;
  }

 private:
  FASTCOLL_DEVICE bool publish(uint32_t i) {
    if (i == 0)
      return channel_.arrive([&](int peer) { return counts_ ? counts_[peer] : location_; });
    if (!has_from_ && !has_to_) return true;
    if (channel_.sync_to_publish()) return false;
    channel_.publish(from_ | to_, i);
    return true;
  }

  FASTCOLL_DEVICE bool wait(uint32_t i) {
    if (i == lag_) {
      channel_.wait_arrivals(flow_.meets, shared_.locations);
      if (counts_ != nullptr) compare_counts();
      else check_places();
      if (channel_.sync_failed()) return false;
      if (counts_ == nullptr) relax();
      return true;
    }
    const bool reuses = P::kAcknowledges && has_to_ && i >= kSlots;
    if (!has_from_ && !reuses) return true;
    channel_.for_own(from_ | to_, [&](int peer, uint32_t bit) {
      uint32_t step = (from_ & bit) != 0 ? i - lag_ : 0;
      if (reuses && (to_ & bit) != 0) {
        const uint32_t read = i - kSlots + flow_.reads * lag_;
        if (read > step) step = read;
      }
      if (step != 0) channel_.wait_progress(peer, step, Phase::progress);
    });
    return !channel_.sync_failed();
  }

  // Ranks with counts publish them in place of a location: all is staged.
  FASTCOLL_DEVICE void compare_counts() {
    channel_.for_peers(flow_.sources, [&](int peer) {
      if (!channel_.failed() && shared_.locations[peer] != counts_[call_.world_size + peer])
        channel_.fail_said(peer, Phase::count);
    });
  }

  // A peer's place is used as an address: its tensor must lie where its heap is mapped.
  FASTCOLL_DEVICE void check_places() {
    if (!P::kChecksPlaces) return;
    channel_.for_peers(flow_.meets, [&](int peer) {
      const uint64_t place = shared_.locations[peer];
      const uint64_t heap_bytes = call_.heap_bytes;
      const bool fits =
          GpuLocation::fits(GpuLocation::input(place), flow_.input_bytes, heap_bytes) &&
          (!flow_.pushes ||
           GpuLocation::fits(GpuLocation::output(place), flow_.output_bytes, heap_bytes));
      if (!channel_.failed() && !fits) channel_.fail_said(peer, Phase::place);
    });
  }

  // With the locations known: no rank needs to wait for data that is not staged.
  FASTCOLL_DEVICE void relax() {
    has_from_ = has_to_ = false;
    uint32_t bit = 1;
    for (int peer = 0, own = int(thread_idx()); peer < call_.world_size; ++peer) {
      const bool is_source = flow_.sources.has(peer);
      const bool is_touched = is_source && location(peer) != 0;
      const bool is_from = is_source && stages(location(peer), location_);
      const bool is_to =
          flow_.readers.has(peer) && stages(location_, is_source ? location(peer) : 0);
      has_touched_ = has_touched_ || is_touched;
      has_from_ = has_from_ || is_from;
      has_to_ = has_to_ || is_to;
      if (peer != own) continue;
      if (is_touched) touched_ |= bit;
      if (!is_from) from_ &= ~bit;
      if (!is_to) to_ &= ~bit;
      own += int(num_threads());
      bit <<= 1;
    }
  }
  FASTCOLL_DEVICE bool stages(uint64_t source, uint64_t reader) const {
    return GpuLocation::input(source) == 0 || (flow_.pushes && GpuLocation::output(reader) == 0);
  }

  // The owner of a symmetric tensor may use it again when no peer touches it any more.
  FASTCOLL_DEVICE bool exit() {
    const bool counted = counts_ != nullptr;
    const bool tells = P::kExits && (has_touched_ || (counted && (has_from_ || has_to_)));
    const bool waits = P::kExits && location_ != 0 && !flow_.readers.is_empty();
    if (!tells && !waits) return true;
    if (channel_.sync_to_publish()) return false;
    channel_.publish(touched_ | (counted ? from_ | to_ : 0), Channel<P>::kFinished);
    if (!waits) return true;
    channel_.for_peers(flow_.readers, [&](int peer) {
      channel_.wait_progress(peer, Channel<P>::kFinished, Phase::exit);
    });
    return !channel_.sync_failed();
  }

  Channel<P>& channel_;
  const GroupCall& call_;
  const Flow flow_;
  const uint64_t location_;
  const uint64_t* const counts_;
  const uint32_t lag_;
  // `from` and `to` are the sources and readers with whom segments are exchanged by progress. The
  // sources in `touched` have symmetric tensors. A word has those that are this thread's own.
  bool has_from_, has_to_, has_touched_ = false;
  uint32_t from_, to_, touched_ = 0;
  const uint32_t parity_;
  BlockShared& shared_;
};

}  // namespace fastcoll
