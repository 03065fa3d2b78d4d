// SPDX-License-Identifier: Apache-2.0
// Sends and receives one step at a time: their ends, and the text of errors, word for word. All
// ranks are in one thread (lone_world.h).
//
//   test_transfers
#include <sys/socket.h>
#include <unistd.h>

#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kLarge = 64 << 10;  // bytes of a message that comes in chunks, or is copied
const std::string kSlow =
    ". If the ranks are only slow, raise the timeout (timeout_s=, FASTCOLL_TIMEOUT_S)";

// ---- ranks that wait for each other -------------------------------------------------------------

std::string recv_name(const std::string& src, int size) {
  return "recv(int32, numel=2, src=" + src + ", tag=5)" + place(0, size);
}

void name_transfers() {
  Pairs pairs(2);
  const Posted receive = pairs.receive(0, 1, 8);
  require_verdict(pairs.wait(0, receive),
                  recv_name("1", 2) + " waited T s for rank 1, which did not send it" + kSlow,
                  ErrorKind::timeout, 2);
  Pairs sites(3, [](GroupOptions& options) { options.traces = true; });
  sites.world.host(0).site = "a.py:1";
  const Posted send = sites.send(0, 2, kLarge);
  require_verdict(sites.wait(0, send),
                  "send(int32, numel=16384, dst=2, tag=5) at a.py:1," + place(0, 3) +
                      " waited T s for rank 2, which did not receive it" + kSlow,
                  ErrorKind::timeout, 4);
  Pairs any(3);
  const Posted all = any.receive(0, kAnyPeer, 8);
  require_verdict(any.wait(0, all),
                  recv_name("any", 3) + " waited T s for rank any, which did not send it" + kSlow,
                  ErrorKind::timeout, 6);
}

// Rank 0 receives from rank 1; `blocked`: the waits that the others show, from rank 1 on.
void require_chain(const std::vector<uint64_t>& blocked, const std::string& text, uint64_t ranks,
                   const std::function<void(World&)>& prepare = {},
                   const std::function<void(GroupOptions&)>& change = {}) {
  Pairs pairs(4, change);
  for (size_t i = 0; i < blocked.size(); ++i)
    P::store_relaxed(pairs.world.pad(int(i) + 1).blocked.value, blocked[i]);
  if (prepare) prepare(pairs.world);
  const Posted receive = pairs.receive(0, 1, 8);
  require_verdict(
      pairs.wait(0, receive),
      recv_name("1", 4) + " waited T s for rank 1, which did not send it" + text + kSlow,
      ErrorKind::timeout, ranks);
}

void follow_chains() {
  const auto sends = [](int peer) { return 1 | uint64_t(uint8_t(peer)) << 8; };
  const auto receives = [](int peer) { return 2 | uint64_t(uint8_t(peer)) << 8; };
  const std::string start = "; rank 0 receives from rank 1";
  require_chain({receives(2), sends(3), 0},
                start + ", which receives from rank 2, which sends to rank 3", 8);
  require_chain({receives(0)},
                start + ", which receives from rank 0: a cycle. Use isend, or batch_isend_irecv",
                2);
  require_chain({sends(2), receives(1)},
                start + ", which sends to rank 2, which receives from rank 1", 2);
  // Of any rank, or of one that is none.
  for (const int peer : {kAnyPeer, 4, 100}) {
    require_chain({receives(peer)}, "", 2);
    require_chain({receives(2), receives(peer)}, start + ", which receives from rank 2", 4);
  }
  require_chain({receives(3)}, start + ", which receives from rank 3", 8);
  const auto waits_in_call = [](World& world) {
    world.all();
    world.enter(1);
    world.pad(1).ring[2].wait_began_us = 5;
    world.pad(1).ring[2].timed_call = 2;
  };
  require_chain({}, start + ", which waits in a call for rank 2 3", 12, waits_in_call);
  const Stopped stopped;
  const auto link = [&](GroupOptions& options) { options.links[2].pid = stopped.pid; };
  require_chain({receives(2), sends(3)},
                start + ", which receives from rank 2; process " + std::to_string(stopped.pid) +
                    " is stopped",
                4, {}, link);
}

// A rank shows its wait as long as it waits, and no longer.
void say_blocked() {
  for (const bool sends : {true, false}) {
    Pairs pairs(3);
    Word& word = pairs.world.pad(0).blocked;
    int num_seen = 0;
    pairs.world.host(0).hook = [&] {
      require_equal(word.value, (sends ? 1 : 2) | 2 << 8, "what a rank waits in");
      ++num_seen;
    };
    const Posted one = sends ? pairs.send(0, 2, kLarge) : pairs.receive(0, 2, 8);
    one.transfer->waited = WaitedTime(60);  // a sleep and a late thread may take 30 ms
    require(pairs.engine(0).wait(*one.transfer, pairs.world.host(0), 0.01) == false,
            "a wait with a limit of its own");
    require(num_seen > 0 && word.value == 0 && !one.transfer->done, "it goes on");
  }
}

// ---- ranks that left ----------------------------------------------------------------------------

void lose_ranks() {
  int ends[3][2];
  for (auto& pair : ends) require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "sockets");
  const auto links = [&](GroupOptions& options) {
    if (options.rank == 0)
      for (size_t peer = 1; peer < 3; ++peer) options.links[peer].socket = ends[peer][0];
  };
  const std::string lost = ": its process ended or left the group";
  Pairs pairs(3, links), sent(3, links), any(3, links), received(3, links), fresh(3, links);
  const Posted message = sent.send(1, 0, 8, 5, 3), half = sent.send(1, 0, kLarge, 7, 4);
  const Posted chunks = received.send(0, 1, kLarge, 5, 6), to = received.receive(1, 0, kLarge);
  close(ends[1][1]);
  // Of all ranks, one is there.
  const Posted receive = any.receive(0, kAnyPeer, 8);
  require_equal(any.wait(0, receive).kind == ErrorKind::timeout, true, "one may still send");
  close(ends[2][1]);
  const Posted lone = pairs.receive(0, 2, 8);
  require_verdict(pairs.wait(0, lone),
                  "recv(int32, numel=2, src=2, tag=5)" + place(0, 3) + " lost rank 2" + lost,
                  ErrorKind::peer_lost, 4);
  Pairs none(3, links);
  const Posted nobody = none.receive(0, kAnyPeer, 8);
  require_verdict(none.wait(0, nobody), recv_name("any", 3) + " lost rank 1" + lost,
                  ErrorKind::peer_lost, 2);
  // Messages that it sent before are there.
  const Posted last = sent.receive(0, 1, 8);
  require_equal(sent.wait(0, last).text, "no error", "a message of a rank that left");
  require_message(last, 3);
  const Posted rest = sent.receive(0, 1, kLarge, 7);
  require_equal(sent.wait(0, rest).kind == ErrorKind::peer_lost, true, "half a message");
  // And messages that it took before are done.
  for (int i = 0; i < 8; ++i) received.look(0, chunks), received.look(1, to);
  require_equal(received.wait(0, chunks).text, "no error", "a message that was taken");
  require_message(to, 6);
  const Posted unsent = fresh.send(0, 1, kLarge);
  require_equal(fresh.wait(0, unsent).kind == ErrorKind::peer_lost, true, "nobody takes it");
  for (auto& pair : ends) close(pair[0]);
  close(ends[0][1]);
}

void interrupt_waits() {
  Pairs pairs(2);
  pairs.world.host(0).is_interrupted = true;
  const Posted receive = pairs.receive(0, 1, 8), other = pairs.receive(0, 1, 8, 9);
  require_equal(pairs.wait(0, receive).text, "interrupted", "a wait");
  const std::string text =
      "rank 0 was interrupted (a test) and left a send or receive in group \"lone\"";
  require_verdict(pairs.wait(0, other), text, ErrorKind::peer_lost, 1);
  require_verdict(error_of([&] { pairs.receive(1, 0, 8); }), text, ErrorKind::peer_lost, 1);
}

void close_groups() {
  Pairs pairs(2);
  const Posted receive = pairs.receive(0, 1, 8);
  require(pairs.engine(0).has_open(), "a receive that is open");
  pairs.engine(0).close();
  require(!pairs.engine(0).has_open(), "none is open");
  require_error(pairs.wait(0, receive), "the group was destroyed before the transfer was complete",
                ErrorKind::usage, 0);
  require_error(error_of([&] { pairs.receive(0, 1, 8); }), "the group was destroyed",
                ErrorKind::usage, 0);
  pairs.engine(0).drive(pairs.world.host(0));
}

// ---- the thread that drives ---------------------------------------------------------------------

void drive() {
  Pairs pairs(2);
  LoneHost& host = pairs.world.host(0);
  const auto start = [&](uint32_t tag) {
    auto one = transfer_of(false, 1, DType::uint8, {});
    one->tag = tag;
    return std::pair{one, pairs.engine(0).start({&one, 1}, host)};
  };
  const Posted early = pairs.send(1, 0, 0, 1);
  auto* channel =
      reinterpret_cast<PairChannel*>(pairs.world.group(0).options().regions[1] + kRegionBytes);
  channel->messages[0].tag_and_dtype = 1 | uint64_t(DType::uint8) << 32;
  const auto [done, needs_none] = start(1);
  require(done->done && !needs_none, "a transfer that is done at once");
  const auto [open, needs_driver] = start(2);
  require(!open->done && needs_driver, "somebody has to drive");
  int num_looks = 0;
  std::shared_ptr<Transfer> late;
  host.hook = [&] {
    if (++num_looks == 1) {
      const auto [more, needs_more] = start(3);
      late = more;
      require(!needs_more, "somebody drives already");
    }
    if (num_looks == 3) {
      require(pairs.engine(0).withdraw(*open), "a receive");
      require(pairs.engine(0).withdraw(*late), "a receive");
    }
  };
  const int64_t start_us = now_us();
  pairs.engine(0).drive(host);
  require(num_looks >= 3, "as long as something is open");
  require(now_us() - start_us >= 15000, "and for a while after that");
  const auto [last, needs_again] = start(4);
  require(needs_again, "nobody drives any more");
}

}  // namespace

int main() {
  name_transfers();
  follow_chains();
  say_blocked();
  lose_ranks();
  interrupt_waits();
  close_groups();
  drive();
}
