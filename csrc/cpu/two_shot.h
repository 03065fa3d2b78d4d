// SPDX-License-Identifier: Apache-2.0
// two_shot: rank r reduces chunk r of every segment in rank order (reduce_scatter). Then every rank
// takes the reduced chunks of the others (all_gather); in a reduce the root alone does. Segments
// are pipelined: copy-in of k+1, reduce of k, copy-out of k-1. Per rank, on n ranks, (5 - 2/n) S
// bytes move for private tensors. A symmetric tensor is read and written where it lies, without any
// copy.
//
// The cost of a call below 16 MiB is the trips of cache lines that change owner, not its bytes. So
// a result goes to lines that its reader just had (result_place): no line is fetched to be written.
// It takes half of the slots, which are then written again sooner. Why four slots of any size are
// quicker than eight is not understood (measured: two builds by turns). On a Xeon these and the
// store to two places (reduce_kernels.inc) took a quarter off 512 KiB on two ranks.
//
// Tried without gain: reading a peer's fresh lines by four streams a quarter apart is faster
// alone, but not inside two_shot.
#pragma once

#include "cpu/call.h"

namespace fastcoll {

template <class P>
Staging two_shot_staging(const Call<P>& call) {
  const Chunks chunks(call, call.elem_bytes());
  const size_t num_chunks = size_t(call.world_size()) - (call.scatters() ? 1 : 0);
  return {.num_segments = chunks.num_segments(),
          .segment_bytes = num_chunks * chunks.stride() * call.elem_bytes(),
          .in_few_slots = !call.scatters(),
          .exchanges = call.scatters()};
}

template <class P>
class TwoShot {
 public:
  explicit TwoShot(Call<P>& call)
      : call_(call),
        group_(call.group),
        chunks_(call, call.elem_bytes()),
        elem_(call.elem_bytes()),
        rank_(call.rank()),
        world_(call.world_size()) {}

  void run() {
    const size_t num_segments = chunks_.num_segments();
    locate_mine();
    copy_in(0);
    group_.arrive(my_input_, my_output_);
    locate_theirs();
    for (size_t k = 0; k < num_segments; ++k) {
      if (k + 1 < num_segments) {
        copy_in(k + 1);
        group_.publish_staged(k + 2);
      }
      reduce(k);
      group_.publish_reduced(k + 1);
      if (k > 0) copy_out(k - 1);
    }
    end(num_segments);
  }

  // ---- in two halves, which begin once every other rank has arrived (halves.h) ------------------
  void give() {
    locate_mine();
    locate_theirs();  // so the slot is free, too
    copy_in(0);
    group_.arrive(my_input_, my_output_);
    reduce(0);
    group_.publish_reduced(1);
  }
  // Whether `take` would not wait.
  bool may_take() {
    locate_mine();
    if (!takes_all() && !inputs_[rank_]) return true;
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_ && !group_.has_reduced(peer, 1)) return false;
    return true;
  }
  // May be begun anew if a wait was left: no wait comes behind the copies.
  void take() {
    locate_mine();
    end(1);
  }

 private:
  void locate_mine() {
    if (!call_.lies_apart()) {
      if (!call_.parts) my_input_ = group_.locate(call_.input, call_.input_numel() * elem_);
      // A scattered output is small and written by its owner alone: nothing to gain from its place.
      if (takes_all()) my_output_ = group_.locate(call_.output, call_.plan.numel * elem_);
    }
    place(rank_, my_input_, my_output_);
  }
  void locate_theirs() {
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_) {
        const ArriveLine& line = group_.wait_arrival(peer);
        place(peer, line.location.input, line.location.output);
      }
  }
  void place(int peer, uint64_t input, uint64_t output) {
    inputs_[peer] = group_.resolve(peer, input, 0, call_.input_numel() * elem_);
    outputs_[peer] = group_.resolve(peer, output, 0, call_.plan.numel * elem_);
  }

  void end(size_t num_segments) {
    copy_out(num_segments - 1);
    // Peers read my symmetric input and write my symmetric output: neither is mine again before
    // they have reduced everything.
    if (inputs_[rank_] || outputs_[rank_])
      for (int peer = 0; peer < world_; ++peer)
        if (peer != rank_) group_.wait_reduced(peer, num_segments);
  }

  // 1. The others' chunks of segment k into my slot; my own stays where it is.
  void copy_in(size_t k) {
    slot_ = group_.claim_slot(k);
    if (inputs_[rank_]) return;
    for (int j = 0; j < world_; ++j) {
      if (j != rank_) call_.read_input(in_slot(slot_, rank_, j), j, chunks_.chunk(j, k));
    }
  }

  // 2. My chunk of segment k: from every rank's input, to every rank's output.
  void reduce(size_t k) {
    const Span span = chunks_.chunk(rank_, k);
    const void* srcs[kMaxWorld];
    void* dsts[kMaxWorld + 1];
    srcs[rank_] = dsts[0] = nullptr;  // see Call::reduce
    int num_dsts = call_.gets(rank_) ? 1 : 0;
    bool pulled = false;  // a peer takes the result from there
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      if (!inputs_[peer]) {
        if (k > 0) group_.wait_staged(peer, k + 1);
        srcs[peer] = in_slot(group_.slot(peer, k), peer, rank_);
      } else {
        srcs[peer] = inputs_[peer] + call_.input_start(rank_, span.start) * elem_;
      }
      if (call_.scatters() || !call_.gets(peer)) continue;
      if (!outputs_[peer]) pulled = true;
      else dsts[num_dsts++] = outputs_[peer] + span.start * elem_;
    }
    std::byte* mine = result_place(rank_, k);
    const bool streams = pulled && !call_.strided && group_.staging_copy().streams();
    if (streams && !call_.gets(rank_)) return reduce_in_pieces(span, mine, srcs);
    if (pulled && !streams) dsts[num_dsts++] = mine;
    call_.reduce(span, dsts, num_dsts, srcs);
    if (!streams) return;
    call_.each_stretch(rank_, span, [&](const std::byte*, const std::byte* result, size_t numel) {
      group_.staging_copy()(mine, result, numel * elem_);
      mine += numel * elem_;
    });
  }

  // For that place alone: in one that the caches hold meanwhile.
  void reduce_in_pieces(Span span, std::byte* mine, const void** srcs) {
    alignas(kLineBytes) std::byte piece[size_t{8} << 10];
    const size_t most = sizeof piece / elem_;
    for (size_t at = 0; at < span.numel; at += most) {
      const Span part{span.start + at, std::min(most, span.numel - at)};
      const void* from[kMaxWorld];
      for (int peer = 0; peer < world_; ++peer)  // mine is null: see Call::reduce
        from[peer] = srcs[peer] ? static_cast<const std::byte*>(srcs[peer]) + at * elem_ : nullptr;
      void* to = piece;
      call_.reduce(part, &to, 1, from);
      group_.staging_copy()(mine + at * elem_, piece, part.numel * elem_);
    }
  }

  // 3. The others' reduced chunks of segment k to my output, if they did not put them there.
  void copy_out(size_t k) {
    if (takes_all() && !outputs_[rank_]) {
      for (int i = 1; i < world_; ++i) {
        const int peer = (rank_ + i) % world_;
        group_.wait_reduced(peer, k + 1);
        call_.write_output(peer, chunks_.chunk(peer, k), result_place(peer, k));
      }
    }
    group_.consume(k + 1);
  }

  // Whether this rank gets the chunks of all ranks, not its own alone or none.
  bool takes_all() const { return !call_.scatters() && call_.gets(rank_); }

  // Chunk j in a rank's slot. In a reduce_scatter its own has no room there. So where two ranks
  // change scratch, each writes where it has read: 16 KiB took 1.5 us on a Zen 4, and take 0.65.
  std::byte* in_slot(std::byte* slot, int rank, int j) const {
    const int place = call_.scatters() && j > rank ? j - 1 : j;
    return slot + size_t(place) * chunks_.stride() * elem_;
  }
  // The place where rank r leaves its reduced chunk: over the chunk that the next rank staged for
  // it. No other rank reads that chunk. Its lines are in r's cache since r read them. Lines of a
  // place of its own would have to be taken back from all readers. Safe: r holds its own slot, so
  // by the reuse rule every rank has consumed the previous contents of all slots.
  std::byte* result_place(int r, size_t k) const {
    const int next = (r + 1) % world_;
    return in_slot(group_.slot(next, k), next, r);
  }

  Call<P>& call_;
  Group<P>& group_;
  const Chunks chunks_;
  const size_t elem_;
  const int rank_, world_;
  std::byte* slot_ = nullptr;
  uint64_t my_input_ = Location::kStaged, my_output_ = Location::kStaged;
  // Every rank's symmetric memory; null: staged.
  std::byte* inputs_[kMaxWorld] = {};
  std::byte* outputs_[kMaxWorld] = {};
};

template <class P>
void two_shot(Call<P>& call) {
  TwoShot<P>(call).run();
}

}  // namespace fastcoll
