// SPDX-License-Identifier: Apache-2.0
// One block's end of a channel. It numbers a call, arrives at every peer, waits with a limit, and
// breaks the group when the limit is over. The protocol is that of kernels/README.md, "On a GPU".
// Knows no verb and no data. Every function is called by all threads of the block; thread t speaks
// with peer t, t + num_threads(), ...
//
// A call takes its channel's turn. Calls in one stream are ordered and need no word for it. But a
// graph can be replayed in another stream, and then two kernels would number the same call. An
// exchange in the rank's own memory detects that, in the time that reading the state takes anyway.
// Its price is one synchronisation of the block: no thread may touch shared memory before all know
// the turn.
//
// A kernel may start before its stream's earlier work is over, and waits for that first. It lets
// the next one start when it waits for no peer any more (kernels/README.md, "Early starts").
#pragma once

#include "cuda/peers.cuh"
#include "cuda/protocol.cuh"
#include "stamp.h"

namespace fastcoll {

// The state that the threads of a block share.
struct BlockShared {
  uint64_t locations[kMaxGpuWorld];  // as the peers published them
  ChannelState state;                // before this call
  uint64_t poison;
};

// Writes the verdict for the host. Breaks the group, too, if this rank found the reason: all ranks
// stop waiting, and later kernels end at once. An abort of the host has that effect on this rank
// alone. Only the first thread of a rank that fails or finds the poison does this.
FASTCOLL_SLOW_PATH void write_verdict(const GroupCall& call, uint64_t poison, uint32_t expected,
                                      uint32_t seen, uint32_t phase) {
  const auto pad = [&](int rank) { return reinterpret_cast<GpuPad*>(call.regions[rank]); };
  if (!claim(&pad(call.rank)->claimed)) return;
  DeviceVerdict& verdict = call.host->verdict;
  verdict.raiser = Poison::raiser(poison);
  verdict.rank = Poison::rank(poison);
  verdict.channel = uint32_t(Poison::channel(poison));
  verdict.epoch = Poison::epoch(poison);
  verdict.expected_stamp = expected;
  verdict.seen_stamp = seen;
  verdict.phase = phase;
  store_release_host(&verdict.kind, Poison::kind(poison));
  // After the verdict: a rank that ends because of the poison has a verdict then.
  const bool found_here = Poison::raiser(poison) == call.rank;
  for (int rank = 0; rank < call.world_size; ++rank)
    if (found_here || rank == call.rank) store_release(&pad(rank)->poison, poison);
}

template <class P>
class Channel {
 public:
  // Done is further than any step.
  static constexpr uint32_t kFinished = 1u << 31;

  // The group's channel of this block.
  FASTCOLL_DEVICE explicit Channel(const DeviceCall& call)
      : call_(call),
        peers_(call, 0, call.world_size),
        idx_(block_idx()),
        count_(num_blocks()),
        tile_bytes_(call.tile_bytes),
        plan_hash_(call.plan_hash) {
    P::begin_kernel();
    const size_t channel = offsetof(GpuPad, channels) + idx_ * sizeof(GpuChannel);
    inbox_ = channel + offsetof(GpuChannel, from);
    stride_ = sizeof(GpuWords);
    outbox_ = inbox_ + size_t(call.rank) * sizeof(GpuWords);
    state_offset_ = channel + offsetof(GpuChannel, state);
    own_status_ = status_ = channel + offsetof(GpuChannel, status);
    scratch_ = layout().scratch(idx_);
    half_bytes_ = layout().half_bytes;
  }

  // Channel idx of the pair of a send or recv: words of its own for each direction.
  FASTCOLL_DEVICE Channel(const GroupCall& call, const PairPart& part, uint32_t idx)
      : call_(call),
        peers_(call, part.peer, part.peer + 1),
        idx_(idx),
        count_(part.channels),
        tile_bytes_(part.tile_bytes),
        plan_hash_(part.plan_hash) {
    P::begin_kernel();
    const size_t sends = offsetof(GpuPad, send), receives = offsetof(GpuPad, receive);
    const bool is_send = part.verb == Verb::send;
    const auto channel = [&](size_t array, int rank) {
      return array + (size_t(rank) * kPairChannels + idx) * sizeof(GpuPairChannel);
    };
    const size_t mine = channel(is_send ? sends : receives, part.peer);
    const size_t theirs = channel(is_send ? receives : sends, call.rank);
    inbox_ = mine + offsetof(GpuPairChannel, from_peer);
    stride_ = 0;
    outbox_ = theirs + offsetof(GpuPairChannel, from_peer);
    state_offset_ = mine + offsetof(GpuPairChannel, state);
    own_status_ = mine + offsetof(GpuPairChannel, status);
    status_ = theirs + offsetof(GpuPairChannel, status);
    const int receiver = is_send ? part.peer : call.rank;
    scratch_ = layout().pair_scratch(receiver, idx);
    half_bytes_ = kPairHalfBytes;
  }

  FASTCOLL_DEVICE const GroupCall& call() const { return call_; }
  FASTCOLL_DEVICE uint32_t idx() const { return idx_; }      // of this channel in the call
  FASTCOLL_DEVICE uint32_t count() const { return count_; }  // channels that the call has
  FASTCOLL_DEVICE uint32_t tile_bytes() const { return tile_bytes_; }
  FASTCOLL_DEVICE const Peers& peers() const { return peers_; }
  // The i-th rank after mine, on the circle; i is at most the number of ranks. Where every rank
  // starts with another peer, no rank serves all of them at once.
  FASTCOLL_DEVICE int rank_after(int i) const {
    const int rank = call_.rank + i;
    return rank < call_.world_size ? rank : rank - call_.world_size;
  }
  FASTCOLL_DEVICE std::byte* scratch(int rank, uint32_t parity) const {
    return at<std::byte>(rank, scratch_ + parity * half_bytes_);
  }
  FASTCOLL_DEVICE uint64_t slot() const { return slot_; }
  FASTCOLL_DEVICE const GpuLayout& layout() const { return call_.layout; }
  // The LL packs that a rank has from another one.
  FASTCOLL_DEVICE LlPack* ll(int owner, uint32_t parity, int source) const {
    return at<LlPack>(owner, layout().ll(idx_, parity, source));
  }
  FASTCOLL_DEVICE GpuPad* pad(int rank) const {
    return reinterpret_cast<GpuPad*>(call_.regions[rank]);
  }

  // ---- a call of LL: every rank waits for every rank, in every one. So a peer that arrived in the
  // last one has ended the one before, whose area this one writes. Returns the area's parity.
  FASTCOLL_DEVICE uint32_t begin_ll() {
    begin();
    return ++state_.last.count % P::kParities;
  }

  // ---- any other call. Returns the parity of its scratch and arrival words. They were last used
  // by the pipelined call before last: every peer that has arrived in the last one has ended
  // it. LL calls in between prove nothing, as they order no memory.
  FASTCOLL_DEVICE uint32_t begin_pipelined() {
    begin();
    StateHalf& last = state_.pipelined;
    if (P::kChecksPrevious && last.slot != 0 && state_.last.mark == 0) {
      for_peers(peers_, [&](int peer) {
        wait_arrival(peer, Phase::previous_call, last.count % P::kParities, last.slot);
      });
      failed_ = P::after_wait(failed_);
    }
    last.slot = slot_;
    ++last.count;
    return parity();
  }

  // Publish to every peer that I am in this call, and the location of my data. False: failed.
  template <class Location>
  FASTCOLL_DEVICE bool arrive(Location location) {
    if (sync_to_publish()) return false;
    for_peers(peers_, [&](int peer) {
      GpuWords* words = at<GpuWords>(peer, outbox_);
      // Written so that the word is never idle: after 2^31 calls it would look ahead.
      store_relaxed(&words->progress, progress(0));
      P::arrive(&words->arrive[parity()], {slot_, location(peer)});
    });
    return true;
  }

  // Wait until these peers have arrived; then `locations` holds the places of their data.
  FASTCOLL_DEVICE void wait_arrivals(const Peers& ranks, uint64_t* locations) {
    for_peers(ranks, [&](int peer) {
      locations[peer] = wait_arrival(peer, Phase::arrival, parity(), slot_);
    });
  }

  // To those of this thread's ranks.
  FASTCOLL_DEVICE void publish(uint32_t own, uint32_t step) {
    for_own(own, [&](int peer, uint32_t) {
      P::publish(&at<GpuWords>(peer, outbox_)->progress, progress(step));
    });
  }

  // Wait until this peer has done a step, or the call has failed.
  FASTCOLL_DEVICE void wait_progress(int peer, uint32_t step, Phase phase) {
    const uint64_t* word = &inbox(peer)->progress;
    const uint64_t target = progress(step);
    for (Patience patience{}; !failed_;) {
      const uint64_t seen = P::load(word);
      if (P::reached(seen, target)) return;
      look_around(patience, {peer, phase, slot_, target, seen, false});
    }
  }

  // An awaited word, as a look in vain found it.
  struct Awaited {
    int peer;
    Phase phase;
    uint64_t slot;            // the call that the peer should be in
    uint64_t expected, seen;  // of the word
    bool is_slot;             // the word is a slot
  };
  struct Patience {
    int polls;
    uint64_t started_ns, patrolled_ns;
  };

  // After a look in vain. Now and then it checks for poison, for an abort of the host, for another
  // call of the peer and for the limit. Each of them fails the call. A long wait is told to the
  // host, which can name the late rank before the limit.
  FASTCOLL_DEVICE void look_around(Patience& patience, const Awaited& awaited) {
    spin(awaited.peer, awaited.phase, awaited.expected, awaited.seen);
    if (++patience.polls < kPollsPerLook) return;
    patience.polls = 0;
    uint64_t poison = load_relaxed(&pad(call_.rank)->poison);
    if (poison == 0 && P::kHearsAborts) poison = load_relaxed(&call_.host->abort);
    if (poison != 0) return drain(poison);
    if (awaited.is_slot && differs(awaited.seen, awaited.expected))
      return fail(DeviceError::desync, awaited, awaited.seen);
    const uint64_t now = time_ns();
    if (patience.started_ns == 0) patience.started_ns = patience.patrolled_ns = now;
    const uint64_t waited = now - patience.started_ns;
    if (now - patience.patrolled_ns >= kPatrolNs) {
      patience.patrolled_ns = now;
      const uint64_t said = load_relaxed(&at<ChannelStatus>(awaited.peer, status_)->slot);
      if (differs(said, awaited.slot)) return fail(DeviceError::desync, awaited, said);
      // A peer that is in the call waits for another rank itself. All channels would say the same.
      if (P::kReports && waited >= call_.report_ns && said != awaited.slot && idx_ == 0)
        store_relaxed(&call_.host->late[awaited.peer], awaited.slot);
    }
    if (waited < call_.limit_ns) return;
    // A peer that is in the call, too, waits for another rank, and will name it.
    const bool here = load_relaxed(&at<ChannelStatus>(awaited.peer, status_)->slot) == awaited.slot;
    if (!here || waited - call_.limit_ns >= call_.limit_ns / 8)
      fail(DeviceError::timeout, awaited, awaited.is_slot ? awaited.seen : 0);
  }

  // The peer is in this call, but it published an impossible count or place.
  FASTCOLL_DEVICE void fail_said(int peer, Phase phase) {
    fail(DeviceError::desync, {peer, phase, slot_, slot_, slot_, true}, slot_);
  }

  FASTCOLL_DEVICE bool failed() const { return failed_; }
  FASTCOLL_DEVICE bool sync_failed() { return failed_ = P::after_wait(failed_); }
  FASTCOLL_DEVICE bool sync_to_publish() { return failed_ = P::before_arrive(failed_); }

  // The call is over.
  FASTCOLL_DEVICE void end_ll() { end(); }
  // met: this rank has waited for the arrival of every peer.
  FASTCOLL_DEVICE void end_pipelined(bool met) {
    state_.last.mark = met;
    end();
  }

  // f(peer) for this thread's part of a set of ranks.
  template <class F>
  FASTCOLL_DEVICE void for_peers(const Peers& ranks, F f) const {
    for_own_ranks(P::known_ranks(call_.world_size), [&](int peer, uint32_t) {
      if (ranks.has(peer)) f(peer);
    });
  }
  // The bits of its ranks that are in the set.
  FASTCOLL_DEVICE uint32_t own(const Peers& ranks) const {
    uint32_t bits = 0;
    for_own_ranks(call_.world_size, [&](int peer, uint32_t bit) {
      if (ranks.has(peer)) bits |= bit;
    });
    return bits;
  }
  // f(peer, bit) for each of its ranks whose bit is set.
  template <class F>
  FASTCOLL_DEVICE void for_own(uint32_t own, F f) const {
    for_own_ranks(P::known_ranks(call_.world_size), [&](int peer, uint32_t bit) {
      if ((own & bit) != 0) f(peer, bit);
    });
  }

 private:
  // After this time in a wait, a look at the peer's status.
  static constexpr uint64_t kPatrolNs = 1000000;
  static constexpr int kMostTries = 1 << 16;  // far more than memory takes to be consistent

  // All threads learn whether the call has failed already: then none of its memory may be touched.
  FASTCOLL_DEVICE void begin() {
    BlockShared& shared = block_shared<BlockShared>();
    if (thread_idx() == 0) {
      shared.poison = load_relaxed(&pad(call_.rank)->poison);
      take_turn(shared.state);
    }
    sync_block();
    state_ = shared.state;
    slot_ =
        ((state_.last.slot >> 32) + 1) << 32 | next_stamp(uint32_t(state_.last.slot), plan_hash_);
    if (shared.poison != 0) return drain(shared.poison);
    if (state_.turn == ChannelState::kTaken) {
      failed_ = true;
      if (thread_idx() == 0)
        fail(DeviceError::usage, {call_.rank, Phase::turn, slot_, slot_, slot_, true}, slot_);
      return;
    }
    if (thread_idx() == 0) store_relaxed(&at<ChannelStatus>(call_.rank, own_status_)->slot, slot_);
  }

  // The state is read before the turn is known: each takes as long. So the kernel before may have
  // ended in between, if it is in a stream that this one does not wait for.
  FASTCOLL_DEVICE void take_turn(ChannelState& seen) {
    ChannelState* kept = at<ChannelState>(call_.rank, state_offset_);
    seen.last = load_relaxed(&kept->last);
    seen.pipelined = load_relaxed(&kept->pipelined);
    seen.turn = P::take(&kept->turn);
    const auto is_old = [&] {
      return seen.turn != ChannelState::turn_after(seen.last.slot) ||
             seen.pipelined.mark != uint32_t(seen.last.slot >> 32);
    };
    for (int tries = 0; P::kReadsAgain && seen.turn != ChannelState::kTaken && is_old(); ++tries) {
      if (tries == kMostTries) seen.turn = ChannelState::kTaken;
      seen.last = load_relaxed(&kept->last);
      seen.pipelined = load_relaxed(&kept->pipelined);
    }
  }

  // The block was synchronised after its last wait.
  FASTCOLL_DEVICE void end() {
    P::end_waits();
    sync_block();  // no thread still writes or reads for this call
    if (thread_idx() != 0) return;
    ChannelState* kept = at<ChannelState>(call_.rank, state_offset_);
    state_.last.slot = slot_;
    state_.pipelined.mark = uint32_t(slot_ >> 32);
    store_relaxed(&kept->last, state_.last);
    store_relaxed(&kept->pipelined, state_.pipelined);
    store_relaxed(&kept->turn, ChannelState::turn_after(slot_));
  }

  // The same call on the channel, but another plan. 0: nothing was ever written there.
  static FASTCOLL_DEVICE bool differs(uint64_t seen, uint64_t slot) {
    return seen >> 32 == slot >> 32 && seen != slot && seen != 0;
  }
  FASTCOLL_DEVICE uint32_t parity() const { return state_.pipelined.count % P::kParities; }
  FASTCOLL_DEVICE uint64_t progress(uint32_t step) const {
    return uint64_t{state_.pipelined.count} << 32 | step;
  }

  template <class T>
  FASTCOLL_DEVICE T* at(int rank, size_t offset_bytes) const {
    return reinterpret_cast<T*>(call_.regions[rank] + offset_bytes);
  }
  FASTCOLL_DEVICE const GpuWords* inbox(int peer) const {
    return at<GpuWords>(call_.rank, inbox_ + size_t(peer) * stride_);
  }

  FASTCOLL_DEVICE uint64_t wait_arrival(int peer, Phase phase, uint32_t parity, uint64_t slot) {
    const ArrivePack* pack = &inbox(peer)->arrive[parity];
    for (Patience patience{}; !failed_;) {
      const ArrivePack seen = P::load(pack);
      if (seen.slot == slot) return seen.location;
      look_around(patience, {peer, phase, slot, slot, seen.slot, true});
    }
    return 0;
  }

  FASTCOLL_DEVICE void fail(DeviceError kind, const Awaited& awaited, uint64_t seen_slot) {
    failed_ = true;
    const uint64_t poison = Poison::encode(uint32_t(kind), call_.rank, awaited.peer, int(idx_),
                                           uint32_t(awaited.slot >> 32));
    write_verdict(call_, poison, uint32_t(awaited.slot), uint32_t(seen_slot),
                  uint32_t(awaited.phase));
  }
  FASTCOLL_DEVICE void drain(uint64_t poison) {
    failed_ = true;
    write_verdict(call_, poison, 0, 0, 0);
  }

  const GroupCall& call_;
  const Peers peers_;
  uint32_t idx_, count_;
  uint32_t tile_bytes_, plan_hash_;  // of the call, or of its part for a pair
  // Offsets in a region: the peers' words to me, my words to them, the peers' status.
  size_t inbox_, stride_, outbox_, state_offset_, own_status_, status_, scratch_, half_bytes_;
  ChannelState state_{};  // before this call, then with it
  uint64_t slot_ = 0;
  bool failed_ = false;
};

}  // namespace fastcoll
