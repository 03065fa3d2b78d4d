// SPDX-License-Identifier: Apache-2.0
// direct: the one algorithm of all verbs that only move data. A giver stages its message or
// publishes the place of its symmetric tensor; each getter copies it from there. Verbs differ in
// their givers and getters, and in one part for all ranks or a part for each. A plan by single_copy
// runs here, too: it reads a private message in place.
//
// Parts may lie anywhere, so lists of tensors are neither flattened nor copied. Split sizes travel
// in the arrival lines of the call that uses them, not in a call of their own.
#pragma once

#include <array>
#include <numeric>

#include "cpu/call.h"
#include "cpu/single_copy.h"

namespace fastcoll {

// A part for each rank, rather than the same part for all.
inline bool splits_message(Verb verb) { return verb == Verb::all_to_all || verb == Verb::scatter; }

// How a part is cut into segments.
struct PartCut {
  size_t num_segments;
  size_t chunk_bytes;  // of a part, in one segment
  PartCut(const Plan& plan, int world_size, size_t part_bytes) {
    const size_t num_parts = splits_message(plan.verb) ? size_t(std::max(world_size - 1, 1)) : 1;
    const size_t most = plan.segment_bytes / num_parts / kLineBytes * kLineBytes;
    num_segments = plan.inlined ? 1 : std::max<size_t>(1, div_up(part_bytes, most));
    chunk_bytes = round_up(div_up(part_bytes, num_segments), kLineBytes);
  }
};

// Bytes of the largest part, as far as this rank knows them before it has met the others.
template <class P>
size_t largest_part(const Call<P>& call) {
  if (call.plan.splits == kCountedSplits) return 0;
  if (call.plan.splits == 0 || call.list) return call.plan.numel * call.elem_bytes();
  size_t most = 0;
  for (int peer = 0; peer < call.world_size(); ++peer)
    most = std::max(most, call.parts->outputs[peer].num_bytes);
  return most;
}

template <class P>
Staging direct_staging(const Call<P>& call) {
  if (call.plan.inlined || call.plan.verb == Verb::barrier)
    return {.num_segments = 1, .stages = false};
  const PartCut cut(call.plan, call.world_size(), largest_part(call));
  if (call.plan.splits != 0 && !call.list) return {cut.num_segments};  // the parts differ
  const size_t num_parts = splits_message(call.plan.verb) ? size_t(call.world_size() - 1) : 1;
  // A message that would go round all slots writes lines again anyway: few stay in the caches. By
  // turns on a Zen 3, an all_gather of 4 MiB took 0.55 ms in all slots, and takes 0.40 ms. On a Zen
  // 4 an all_gather of 16 MiB takes 0.93 ms in all slots and 1.33 in few. An all_to_all of 4 MiB
  // takes 24 % more in all.
  const bool takes_few = !copy_ways.in_long_rings || call.plan.verb == Verb::all_to_all;
  return {.num_segments = cut.num_segments,
          .segment_bytes = num_parts * cut.chunk_bytes,
          .in_few_slots = cut.num_segments > kNumSlots && takes_few,
          .exchanges = !verb_has_root(call.plan.verb)};
}

template <class P>
class Direct {
 public:
  explicit Direct(const Call<P>& call)
      : call_(call),
        group_(call.group),
        rank_(call.rank()),
        world_(call.world_size()),
        splits_(splits_message(call.plan.verb)),
        is_inlined_(call.plan.inlined || call.plan.verb == Verb::barrier),
        cut_(call.plan, call.world_size(), largest_part(call)),
        owns_by_segments_(owns_by_segments()) {}

  FASTCOLL_HOT void run() {
    if (call_.plan.splits == kCountedSplits) return run_counted();
    give();
    take();
  }

  // Whether `take`, in any object for this call, stages nothing, and no rank waits for another to
  // have read its message.
  bool has_halves() const {
    if (call_.plan.splits != 0 && !call_.list) return false;
    const size_t message_bytes = call_.input_numel() * call_.elem_bytes();
    return is_inlined_ || (cut_.num_segments == 1 && message_bytes < kLeastInPlaceBytes);
  }

  FASTCOLL_HOT void give() {
    if (is_inlined_) {
      give_inlined();
    } else {
      begin_giving();
      group_.arrive(location_, Location::kStaged);
    }
    if (!owns_by_segments_) copy_own();
  }

  FASTCOLL_HOT void take() {
    if (is_inlined_) return take_inlined();
    uint64_t sources[kMaxWorld];
    for (int peer = 0; peer < world_; ++peer)
      if (gets_from(peer)) sources[peer] = group_.wait_arrival(peer).location.input;
    move(sources, 1);
  }

  bool gets_from(int peer) const { return peer != rank_ && gives(peer) && gets(rank_); }

 private:
  // Below this a copy costs less than waiting until all ranks have read a symmetric tensor.
  static constexpr size_t kLeastInPlaceBytes = size_t{64} << 10;

  // ---- givers and getters -----------------------------------------------------------------------
  bool from_root() const {
    return call_.plan.verb == Verb::broadcast || call_.plan.verb == Verb::scatter;
  }
  bool to_root() const { return call_.plan.verb == Verb::gather; }
  bool gives(int rank) const {
    return from_root() ? rank == call_.plan.root : !to_root() || rank != call_.plan.root;
  }
  bool gets(int rank) const {
    return to_root() ? rank == call_.plan.root : !from_root() || rank != call_.plan.root;
  }
  bool keeps_own() const {
    if (call_.plan.verb == Verb::broadcast) return false;
    return !verb_has_root(call_.plan.verb) || rank_ == call_.plan.root;
  }

  // ---- messages in the flag lines ---------------------------------------------------------------
  FASTCOLL_HOT void give_inlined() {
    const size_t own_bytes = part_for(rank_).num_bytes;
    // A rank that gives nothing arrives, too: its line shows the waiters of the next call that it
    // made this one.
    if (!gives(rank_)) group_.arrive_inlined(nullptr, 0);
    else if (splits_) group_.arrive_inlined(packed(own_bytes), size_t(world_) * own_bytes);
    else if (call_.lies_apart())
      group_.arrive_inlined(call_.whole_input(group_.inbox(rank_)), own_bytes);
    else group_.arrive_inlined(part_for(rank_).ptr, own_bytes);
  }

  FASTCOLL_HOT void take_inlined() {
    for (int peer = 0; peer < world_; ++peer) {
      if (!gets_from(peer)) continue;
      const Part to = part_from(peer);
      if (splits_) {
        const size_t start = size_t(rank_) * to.num_bytes;
        group_.read_inlined(peer, group_.inbox(peer), start + to.num_bytes);
        copy_bytes(to.ptr, group_.inbox(peer) + start, to.num_bytes);
      } else if (call_.lies_apart()) {
        group_.read_inlined(peer, group_.inbox(peer), to.num_bytes);
        put(peer, 0, group_.inbox(peer), to.num_bytes);
      } else {
        group_.read_inlined(peer, to.ptr, to.num_bytes);
      }
    }
  }

  // My parts one after another; they may lie apart.
  const std::byte* packed(size_t part_bytes) {
    if (!call_.parts) return call_.input;
    std::byte* message = group_.inbox(rank_);
    for (int peer = 0; peer < world_; ++peer)
      copy_bytes(message + size_t(peer) * part_bytes, part_for(peer).ptr, part_bytes);
    return message;
  }

  // ---- parts of sizes that only their two ranks know --------------------------------------------
  // The arrival lines carry the message's location and its parts' sizes. So every rank sees them
  // all and cuts the call alike.
  void run_counted() {
    const size_t world = size_t(world_);
    const auto given = [&](const uint64_t* row, size_t to) { return row[1 + to]; };
    const auto wanted = [&](const uint64_t* row, size_t from) { return row[1 + world + from]; };
    const uint64_t* rows[kMaxWorld];
    for (int peer = 0; peer < world_; ++peer)
      rows[peer] = reinterpret_cast<const uint64_t*>(group_.inbox(peer));
    auto* mine = reinterpret_cast<uint64_t*>(group_.inbox(rank_));
    mine[0] = location_ = locate();
    for (int peer = 0; peer < world_; ++peer) {
      mine[1 + peer] = call_.parts->inputs[peer].num_bytes;
      mine[1 + world_ + peer] = call_.parts->outputs[peer].num_bytes;
    }
    const size_t row_bytes = (1 + 2 * world) * sizeof(uint64_t);
    static_assert((1 + 2 * kMaxWorld) * sizeof(uint64_t) <= kInlineMaxBytes);
    group_.arrive_inlined(mine, row_bytes);
    copy_own();
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_) group_.read_inlined(peer, group_.inbox(peer), row_bytes);

    size_t most = 0;
    uint64_t sources[kMaxWorld];
    for (size_t from = 0; from < world; ++from) {
      sources[from] = rows[from][0];
      starts_[from] = std::accumulate(rows[from] + 1, rows[from] + 1 + rank_, size_t{0});
      for (size_t to = 0; to < world; ++to) {
        if (given(rows[from], to) != wanted(rows[to], from))
          fail_counts(from, given(rows[from], to), to, wanted(rows[to], from));
        if (!Location::fits(given(rows[from], to)))  // cutting it would overflow
          group_.fail_damaged(group_.call_name(), int(from), "split sizes that no memory has");
        if (from != to) most = std::max<size_t>(most, given(rows[from], to));
      }
    }
    cut_ = PartCut(call_.plan, world_, most);
    group_.take_segments(cut_.num_segments);
    stage(0);
    group_.publish_staged(1);
    move(sources, 0);
  }

  [[noreturn]] void fail_counts(size_t from, uint64_t given, size_t to, uint64_t wanted) {
    const size_t elem = call_.elem_bytes();
    group_.fail(ErrorKind::desync,
                group_.call_name() + ": rank " + std::to_string(from) + " gives " +
                    std::to_string(given / elem) + " elements to rank " + std::to_string(to) +
                    ", which expects " + std::to_string(wanted / elem) +
                    ": input_split_sizes and output_split_sizes do not match. Outputs of this "
                    "call are undefined",
                uint64_t{1} << from | uint64_t{1} << to);
  }

  // ---- messages in scratch, or where they lie ---------------------------------------------------
  void begin_giving() {
    if (!gives(rank_)) return;
    location_ = locate();
    stage(0);
  }

  // 1. Segment k of my parts, for all peers to read.
  void stage(size_t k) {
    if (location_ != Location::kStaged) return;
    std::byte* slot = group_.claim_slot(k);
    if (!splits_) return give(slot, k * cut_.chunk_bytes, chunk(part_for(rank_), k));
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      const Part part = part_for(peer);
      group_.staging_copy()(slot + place_in_slot(rank_, peer), part.ptr + k * cut_.chunk_bytes,
                            chunk(part, k));
    }
  }

  // first_published: segments from here on are announced by progress words, those before by the
  // arrival.
  void move(const uint64_t* sources, size_t first_published) {
    // A rank that only gives reads no peer's memory. It consumes at once, so as not to hold up its
    // peers' slots or its own later calls.
    const bool is_getter = gets(rank_), is_giver = gives(rank_);
    if (!is_getter) group_.consume(cut_.num_segments);
    const std::byte* places[kMaxWorld];  // of a peer's part for me; null: staged
    for (int i = 1; i < world_; ++i) {
      const int peer = (rank_ + i) % world_;
      if (!gets_from(peer)) continue;
      if (is_copied(sources[peer])) take(peer, sources[peer]);
      else
        places[peer] =
            group_.resolve(peer, sources[peer], start_at(peer), part_from(peer).num_bytes);
    }
    for (size_t k = 0; k < cut_.num_segments; ++k) {
      if (is_giver && k + 1 < cut_.num_segments && location_ == Location::kStaged) {
        stage(k + 1);
        group_.publish_staged(k + 2);
      }
      if (owns_by_segments_) copy_own(k);
      if (!is_getter) continue;
      for (int i = 1; i < world_; ++i) {
        const int peer = (rank_ + i) % world_;
        if (gets_from(peer) && !is_copied(sources[peer]))
          fetch(peer, places[peer], k, k >= first_published);
      }
      group_.consume(k + 1);
    }
    // The owner of a message that is read in place may reuse it only when all ranks have read it.
    if (P::kAwaitsReaders && location_ != Location::kStaged)
      group_.wait_consumed(cut_.num_segments);
  }

  bool is_copied(uint64_t source) const {
    return call_.plan.algorithm == Algorithm::single_copy && Location::is_private(source);
  }

  // 2. A peer's whole part for me, out of its private memory.
  void take(int peer, uint64_t source) {
    const Part part = part_from(peer);
    if (part.num_bytes == 0) return;
    const uint64_t address = Location::offset_bytes(source) + start_at(peer);
    read_private(group_, peer, address, part.ptr, part.num_bytes,
                 [&] { return group_.call_name(); });
  }

  // Or segment k of it, from scratch or symmetric memory.
  void fetch(int peer, const std::byte* place, size_t k, bool published) {
    const Part part = part_from(peer);
    const size_t num_bytes = chunk(part, k);
    if (num_bytes == 0) return;
    const std::byte* from;
    if (!place) {
      if (published) group_.wait_staged(peer, k + 1);
      from = group_.slot(peer, k) + (splits_ ? place_in_slot(peer, rank_) : 0);
    } else {
      from = place + k * cut_.chunk_bytes;
    }
    put(peer, k * cut_.chunk_bytes, from, num_bytes);
  }

  // Bytes of my part for all ranks, and of a peer's part for me. A list or a strided tensor is not
  // in one place.
  void give(std::byte* to, size_t start_bytes, size_t num_bytes) const {
    if (call_.lies_apart()) return call_.read_input(to, rank_, elements(start_bytes, num_bytes));
    group_.staging_copy()(to, part_for(rank_).ptr + start_bytes, num_bytes);
  }
  void put(int peer, size_t start_bytes, const std::byte* from, size_t num_bytes) const {
    if (call_.lies_apart()) return call_.write_output(peer, elements(start_bytes, num_bytes), from);
    const Part part = part_from(peer);
    copy_some(part.ptr + start_bytes, from, num_bytes, part.num_bytes,
              copy_ways.fetched_past_caches);
  }
  Span elements(size_t start_bytes, size_t num_bytes) const {  // chunks hold whole ones
    return {start_bytes / call_.elem_bytes(), num_bytes / call_.elem_bytes()};
  }

  FASTCOLL_HOT void copy_own() {
    if (!keeps_own()) return;
    if (call_.lies_apart()) [[unlikely]]
      return call_.copy_own();
    copy_own(0, part_for(rank_).num_bytes);
  }
  void copy_own(size_t start_bytes, size_t num_bytes) {
    const Part from = part_for(rank_), to = part_from(rank_);
    if (from.ptr == to.ptr) return;
    copy_some(to.ptr + start_bytes, from.ptr + start_bytes, num_bytes, from.num_bytes,
              copy_ways.past_caches);
  }
  // Whether a rank copies its own part between the segments of the others. A scatter's root is
  // waited for from the second segment on, other ranks once their peers' slots are full. By turns
  // on a Zen 4, a gather of 8 MiB took 425 us with the part in one piece, and takes 241. An
  // all_gather of 4 MiB took 203 us, and takes 168. At 2 MiB, which the slots hold, a gather takes
  // 10 % more.
  bool owns_by_segments() const {
    if (!keeps_own() || call_.lies_apart()) return false;
    if (call_.plan.verb == Verb::scatter) return cut_.num_segments > 1;
    return call_.plan.algorithm != Algorithm::single_copy && cut_.num_segments > kNumSlots;
  }
  void copy_own(size_t k) { copy_own(k * cut_.chunk_bytes, chunk(part_for(rank_), k)); }

  // ---- where parts lie --------------------------------------------------------------------------
  FASTCOLL_HOT Part part_for(int peer) const {
    if (call_.parts) return call_.parts->inputs[peer];
    const size_t num_bytes = call_.plan.numel * call_.elem_bytes();
    const size_t start = splits_ ? size_t(peer) * num_bytes : 0;
    return {const_cast<std::byte*>(call_.input) + start, num_bytes};
  }
  FASTCOLL_HOT Part part_from(int peer) const {
    if (call_.parts) return call_.parts->outputs[peer];
    const size_t num_bytes = call_.plan.numel * call_.elem_bytes();
    return {call_.output + (from_root() ? 0 : size_t(peer) * num_bytes), num_bytes};
  }
  size_t chunk(const Part& part, size_t k) const {
    return std::min(cut_.chunk_bytes,
                    part.num_bytes - std::min(part.num_bytes, k * cut_.chunk_bytes));
  }
  size_t place_in_slot(int from, int to) const {  // no rank stages a part for itself
    return size_t(to < from ? to : to - 1) * cut_.chunk_bytes;
  }
  // Where my part begins in a peer's message. Unequal parts that all ranks know are an
  // all_gather's, whose messages are not split.
  size_t start_at(int peer) const {
    if (!splits_) return 0;
    return call_.plan.splits == 0 ? size_t(rank_) * call_.plan.numel * call_.elem_bytes()
                                  : starts_[peer];
  }
  // Where my whole message lies, if peers can read it there.
  uint64_t locate() const {
    if (call_.lies_apart()) return Location::kStaged;
    const Part first = part_for(splits_ ? 0 : rank_);
    size_t num_bytes = first.num_bytes;
    for (int peer = 1; splits_ && peer < world_; ++peer) {
      if (part_for(peer).ptr != first.ptr + num_bytes) return Location::kStaged;
      num_bytes += part_for(peer).num_bytes;
    }
    if (num_bytes < kLeastInPlaceBytes) return Location::kStaged;
    const uint64_t location = group_.locate(first.ptr, num_bytes);
    const bool stays = location == Location::kStaged &&
                       call_.plan.algorithm == Algorithm::single_copy &&
                       group_.readable().covers(first.ptr, num_bytes);
    return stays ? Location::kPrivate | uint64_t(uintptr_t(first.ptr)) : location;
  }

  const Call<P>& call_;
  Group<P>& group_;
  const int rank_, world_;
  const bool splits_, is_inlined_;
  PartCut cut_;
  const bool owns_by_segments_;
  uint64_t location_ = Location::kStaged;
  std::array<size_t, kMaxWorld> starts_;  // counted: of my part in each peer's message
};

}  // namespace fastcoll
