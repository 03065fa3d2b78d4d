// SPDX-License-Identifier: Apache-2.0
// Transfers that end while a rank looks for the reason why nothing moves: just before each look a
// peer sends, takes, leaves or fails. And a transfer of memory that no peer can copy. The operating
// system is lone_machine.h.
//
//   test_ends
#include <cerrno>

#include "lone_machine.h"
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kLarge = 128 << 10;
const std::string kLost = ": its process ended or left the group";

// Each rank is known by its number, as the socket of every link to it.
Pairs pairs_of(int size) {
  machine::clear();
  return Pairs(size, [](GroupOptions& options) {
    for (int peer = 0; peer < options.world_size; ++peer) {
      options.links[size_t(peer)].socket = peer;
      options.links[size_t(peer)].pid = 100 + peer;
    }
  });
}
// Before a look of rank 0.
void before_look(Pairs& pairs, const std::function<void()>& act, int nth = 1) {
  pairs.world.host(0).hook = [=, &pairs] {
    if (pairs.world.host(0).num_looks == nth) act();
  };
}
void require_lost(const Seen& seen, int rank) {
  require_part(seen.text, " lost rank " + std::to_string(rank) + kLost);
  require_equal(seen.ranks, int64_t{1} << rank, "the rank that was lost");
}

// Its messages are there, and its marks of those that it took: no loss for this rank.
void leave_behind_parts() {
  for (const bool sends : {true, false}) {
    Pairs pairs = pairs_of(2);
    for (const int rank : {0, 1}) pairs.engine(rank).allow_single_copy(true);
    const Posted mine = sends ? pairs.send(0, 1, kLarge, 5, 3) : pairs.receive(0, 1, 8);
    Posted theirs;
    before_look(pairs, [&] {
      theirs = sends ? pairs.receive(1, 0, kLarge) : pairs.send(1, 0, 8, 5, 3);
      machine::time_us += 10;  // a receiver is patient at first
      require(pairs.look(1, theirs), "the peer's part");
      machine::gone = {1};
    });
    require_equal(pairs.wait(0, mine).text, "no error", "a rank that left behind its part");
    require_message(mine, 3);
    require(!pairs.engine(0).has_open(), "what is done is open no more");
  }
}

// A driver's memory comes in chunks, whichever way the receiver is ready for.
void send_unreadable_memory() {
  Pairs pairs = pairs_of(2);
  for (const int rank : {0, 1}) pairs.engine(rank).allow_single_copy(true);
  machine::is_readable = false;
  machine::read_error = EFAULT;
  const Posted sent = pairs.send(1, 0, kLarge, 5, 3), got = pairs.receive(0, 1, kLarge);
  for (int i = 0; i < 8; ++i) {
    machine::time_us += 1000;  // a receiver is patient at first
    for (const int rank : {0, 1}) pairs.look(rank, rank == 0 ? got : sent);
  }
  require_message(got, 3);
  require(sent.transfer->done, "a message that was sent");
}

// A peer may sleep for each step of a rank: a grant, or chunks. A look without a step wakes nobody.
void wake_peers() {
  Pairs pairs = pairs_of(2);
  constexpr size_t kLong = (PairChannel::kChunks + 2) * PairChannel::kChunkBytes;
  const auto sleep_for = [&](int rank) {
    P::set_sleepers(pairs.world.pad(rank).sleep);
    machine::take_steps();
  };
  const Posted sent = pairs.send(1, 0, kLong);
  sleep_for(0);
  const Posted got = pairs.receive(0, 1, kLong);
  require_equal(machine::take_steps(), "1 x wake", "a grant");
  for (const std::string steps : {"1 x wake", ""}) {
    sleep_for(1);
    pairs.look(1, sent);
    require_equal(machine::take_steps(), steps, "chunks, then none as the ring is full");
  }
}

// In the same look the limit is over.
void end_in_time() {
  Pairs pairs = pairs_of(2);
  const Posted mine = pairs.receive(0, 1, 8), other = pairs.receive(0, 1, 8, 6);
  other.transfer->waited = WaitedTime(60);
  pairs.world.host(0).hook = [&] {
    // Of a limit of 30 ms no step counts for more than 20.
    if (pairs.world.host(0).num_looks < 3) machine::time_us += 40000;
    if (pairs.world.host(0).num_looks != 3) return;
    pairs.send(1, 0, 8, 5, 3);
    machine::gone = {1};
  };
  const Seen seen = pairs.wait(0, mine);
  require_equal(seen.text, "no error", "a message that came at last");
  require_message(mine, 3);
  require_lost(pairs.wait(0, other), 1);
}

// A queued send is not offered to a rank that is gone, and no message of that rank ends it.
void lose_queued_sends() {
  Pairs pairs = pairs_of(2);
  std::vector<Posted> sent;
  for (uint32_t i = 0; i < PairChannel::kMessages; ++i) sent.push_back(pairs.send(0, 1, 8, i));
  const Posted queued = pairs.send(0, 1, 8, 99, 7), back = pairs.send(1, 0, 8, 99, 9);
  require(sent.back().transfer->done && !queued.transfer->done, "all places are in use");
  require(!pairs.engine(0).withdraw(*queued.transfer), "a send is not taken back");
  Posted taken;
  before_look(pairs, [&] {
    taken = pairs.receive(1, 0, 8, 0);
    machine::gone = {1};
  });
  require_lost(pairs.wait(0, queued), 1);
  require(queued.data[0] == std::byte{7}, "the bytes of a send");
}

// Half a message never comes, and nobody takes one.
void lose_messages() {
  Pairs half = pairs_of(2);
  const Posted offered = half.send(1, 0, kLarge);
  machine::gone = {1};
  const Posted rest = half.receive(0, 1, kLarge);
  require_lost(half.wait(0, rest), 1);
  Pairs fresh = pairs_of(2);
  machine::gone = {1};
  const Posted unsent = fresh.send(0, 1, kLarge);
  require_lost(fresh.wait(0, unsent), 1);
}

// Of any rank: while one of them is there, or others beside the group, it may come.
void lose_all_senders() {
  using Ranks = std::set<int>;
  for (const auto& [has_others, gone] :
       {std::pair{false, Ranks{1, 2}}, {true, Ranks{1, 2}}, {false, Ranks{1}}}) {
    Pairs pairs = pairs_of(3);
    const Posted mine = pairs.receive(0, kAnyPeer, 8);
    mine.transfer->has_other_senders = has_others;
    before_look(pairs, [gone = gone] { machine::gone = gone; });
    const Seen seen = pairs.wait(0, mine);
    if (has_others || gone.size() == 1)
      require_equal(seen.kind, ErrorKind::timeout, "one may still send");
    else
      require_verdict(seen,
                      "recv(int32, numel=2, src=any, tag=5)" + place(0, 3) + " lost rank 1" + kLost,
                      ErrorKind::peer_lost, 2);
  }
  Pairs lone = pairs_of(1);
  const Posted none = lone.receive(0, kAnyPeer, 8);
  require_equal(lone.wait(0, none).kind, ErrorKind::timeout, "a lone rank");
  // A rank does not lose itself.
  Pairs self = pairs_of(2);
  machine::gone = {0};
  const Posted own = self.receive(0, 0, 8);
  require_equal(self.wait(0, own).kind, ErrorKind::timeout, "from itself");
}

// The verdict of another rank ends all transfers at the next look.
void hear_verdicts() {
  Pairs pairs = pairs_of(3);
  const Posted mine = pairs.receive(0, 1, 8), other = pairs.receive(0, 2, 8);
  before_look(pairs, [&] { pairs.world.group(2).decide_verdict(ErrorKind::driver, "why", 4); });
  require_verdict(pairs.wait(0, mine), "why", ErrorKind::driver, 4);
  require_verdict(pairs.wait(0, other), "why", ErrorKind::driver, 4);
  require_equal(pairs.world.host(0).num_looks, 1, "looks");
}

// An error does not befall the transfers that are done.
void keep_what_is_done() {
  Pairs pairs = pairs_of(2);
  const Posted first = pairs.receive(0, 1, 8), second = pairs.receive(0, 1, 8, 6);
  pairs.send(1, 0, 8, 5, 3);
  const Posted odd = pairs.send(1, 0, 12, 6);
  require(pairs.wait(0, second).text.find("rank 1 sends 3 x int32") == 0, "a mismatch");
  require_equal(pairs.wait(0, first).text, "no error", "a message that had come");
  require_message(first, 3);
  require(!pairs.engine(0).withdraw(*second.transfer), "what has failed is not taken back");
}

// A group that is closed while a thread waits: its memory may be gone.
void close_in_wait() {
  for (const bool interrupts : {false, true}) {
    Pairs pairs = pairs_of(2);
    pairs.engine(0).allow_single_copy(true);
    const Posted mine = pairs.send(0, 1, kLarge);  // which the rank looks after: see `polling`
    before_look(pairs, [&] {
      pairs.engine(0).close();
      P::on_load =
          P::on_store = [](const uint64_t&) { require(false, "memory of a closed group"); };
      pairs.world.host(0).is_interrupted = interrupts;
    });
    const Seen seen = pairs.wait(0, mine);
    P::on_load = P::on_store = {};
    require_equal(
        seen.text,
        interrupts ? "interrupted" : "the group was destroyed before the transfer was complete",
        "a group that is closed");
    require(!pairs.world.group(0).is_broken(), "no verdict is written");
  }
}

// A program that ends leaves no thread in a wait for a peer that has not come. A moving message
// goes on.
void end_with_the_program() {
  Pairs pairs = pairs_of(2);
  for (const bool has_moving : {false, true}) {
    Posted sent, got;
    if (has_moving) {
      sent = pairs.send(1, 0, kLarge, 5, 3);
      got = pairs.receive(0, 1, kLarge);
    }
    const Posted unmet = pairs.receive(0, 1, 8, 6), offered = pairs.send(0, 1, kLarge, 7);
    pairs.engine(0).end_unmet();
    for (const Posted* one : {&unmet, &offered})
      require_equal(pairs.wait(0, *one).text, "the program ended before the transfer was complete",
                    "an unmet transfer");
    require(pairs.engine(0).has_open() == has_moving, "only what moves is open");
    if (!has_moving) continue;
    for (int i = 0; i < 8; ++i)
      for (const int rank : {1, 0}) pairs.look(rank, rank == 0 ? got : sent);
    require_message(got, 3);
  }
}

// The ranks that hold up a transfer, in a group of as many ranks as there can be. A process that is
// stopped is named if it is one of them.
void name_all_ranks() {
  Pairs pairs = pairs_of(kMaxWorld);
  machine::stopped = {100 + kMaxWorld - 1};
  const Posted any = pairs.receive(0, kAnyPeer, 8);
  const Seen seen = pairs.wait(0, any);
  require_equal(seen.ranks, ~uint64_t{1}, "all others");
  require_part(seen.text, "; process 163 is stopped");
  Pairs few = pairs_of(4);
  machine::stopped = {102};
  const Posted one = few.receive(0, 1, 8);
  require(few.wait(0, one).text.find("stopped") == std::string::npos, "a process beside it");
  Pairs chain = pairs_of(kMaxWorld);
  machine::stopped.clear();
  chain.world.all();
  chain.world.enter(1);
  chain.world.pad(1).ring[2].wait_began_us = 5;
  chain.world.pad(1).ring[2].timed_call = 2;
  for (int rank = 3; rank < kMaxWorld; ++rank) chain.world.enter(rank);
  const Posted late = chain.receive(0, 1, 8);
  const Seen found = chain.wait(0, late);
  require_part(found.text, ", which waits in a call for rank 2. If");
  require_equal(found.ranks, 4, "the one that has not come");
  // An entry that can't be read says of no call that its rank waits there.
  Pairs damaged = pairs_of(2);
  damaged.world.enter(1);
  damaged.world.pad(1).ring[1].words[0] = ~uint64_t{0};
  const Posted lone = damaged.receive(0, 1, 8);
  require_equal(damaged.wait(0, lone).ranks, 2, "a rank that did not send");
}

}  // namespace

int main() {
  leave_behind_parts();
  send_unreadable_memory();
  wake_peers();
  end_in_time();
  lose_queued_sends();
  lose_messages();
  lose_all_senders();
  hear_verdicts();
  keep_what_is_done();
  close_in_wait();
  end_with_the_program();
  name_all_ranks();
}
