// SPDX-License-Identifier: Apache-2.0
// Sends and receives one step at a time: their ends, and the text of errors, word for word. All
// ranks are in one thread (lone_world.h).
//
//   test_transfers
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kLarge = 128 << 10;  // bytes of a message that comes in chunks, or is copied
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
                  "send(int32, numel=32768, dst=2, tag=5) at a.py:1," + place(0, 3) +
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

// ---- ranks that left ----------------------------------------------------------------------------

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

}  // namespace

int main() {
  name_transfers();
  follow_chains();
  interrupt_waits();
  close_groups();
}
