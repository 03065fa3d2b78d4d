// SPDX-License-Identifier: Apache-2.0
// Bays that change hands between two ranks (p2p_bays.h), one step at a time. All ranks are in one
// thread (lone_world.h).
//
//   test_bays
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kBay = PairChannel::kBayBytes;

uint64_t last_location(Pairs& pairs, int rank, int peer) {
  const auto& messages = channel_of(pairs, rank, peer).messages;
  return std::max_element(std::begin(messages), std::end(messages),
                          [](const Message& a, const Message& b) { return a.number < b.number; })
      ->location;
}
void pass_on(Pairs& pairs, int rank, int peer, size_t num_bytes, int value) {
  const Posted sent = pairs.send(rank, peer, num_bytes, 5, value);
  require_message(pairs.receive(peer, rank, num_bytes), value);
}

// An answer lies where the message did, as does the answer to that. The first answer does not: its
// sender had sent nothing so far.
void answer_in_place() {
  for (const size_t num_bytes : {size_t{300}, kBay}) {
    Pairs pairs(2);
    pass_on(pairs, 0, 1, num_bytes, 1);
    pass_on(pairs, 1, 0, num_bytes, 2);
    const uint64_t place = last_location(pairs, 1, 0);
    require_equal(Bays::kAnyBay & place, Message::kInBay, "a bay of one's own");
    for (int round = 0; round < 3 * PairChannel::kMessages; ++round) {
      pass_on(pairs, 0, 1, num_bytes, round);
      require_equal(last_location(pairs, 0, 1), place ^ Bays::kAnyBay, "where an answer lies");
      pass_on(pairs, 1, 0, num_bytes, round + 1);
      require_equal(last_location(pairs, 1, 0), place, "where the answer to it lies");
    }
  }
}

// Two ranks that send before they receive write where they have read, in either's bays by turns.
void exchange_in_place() {
  Pairs pairs(2);
  uint64_t places[2] = {};
  for (int round = 0; round < 3 * PairChannel::kMessages; ++round) {
    const Posted sent[] = {pairs.send(0, 1, kBay, 5, round), pairs.send(1, 0, kBay, 5, round + 1)};
    for (const int rank : {0, 1}) {
      const uint64_t place = last_location(pairs, rank, 1 - rank);
      if (round > 0)
        require_equal(place, places[1 - rank] ^ Bays::kAnyBay, "a place that was read");
      else require_equal(place & Bays::kAnyBay, Message::kInBay, "a bay of one's own");
    }
    for (const int rank : {0, 1}) {
      places[rank] = last_location(pairs, rank, 1 - rank);
      require_message(pairs.receive(rank, 1 - rank, kBay), round + 1 - rank);
    }
  }
}

// A bay that the receiver keeps is not written by its owner, until a message comes in it.
void leave_kept_bays() {
  for (const bool answers : {true, false}) {
    copy_ways.answers_in_place = answers;
    Pairs pairs(2);
    pass_on(pairs, 1, 0, kBay, 1);
    pass_on(pairs, 0, 1, kBay, 2);
    std::vector<Posted> sends;
    for (int i = 0; i < PairChannel::kBays; ++i) {
      sends.push_back(pairs.send(0, 1, kBay, 6, i));
      require_equal(bool(sends.back().transfer->done), i < PairChannel::kBays - answers, "a bay");
    }
    pass_on(pairs, 1, 0, kBay, 9);
    for (int i = 0; i < PairChannel::kBays; ++i) {
      const Posted got = pairs.receive(1, 0, kBay, 6);
      while (!pairs.look(1, got)) pairs.look(0, sends.back());
      require_message(got, i);
    }
    for (int i = 0; i < PairChannel::kBays - answers; ++i)  // rank 1 keeps the next one
      require(pairs.send(0, 1, kBay, 7).transfer->done, "a bay that is back");
  }
  copy_ways.answers_in_place = true;
}

// Ranks that send several messages at a time lose no bay, whichever they read last.
void lose_no_bays() {
  Pairs pairs(2);
  for (int round = 0; round < 3 * PairChannel::kMessages; ++round) {
    std::vector<Posted> sends;
    for (const int value : {1, 2, 3}) {
      sends.push_back(pairs.send(0, 1, kBay, 5, value));
      sends.push_back(pairs.send(1, 0, kBay, 5, value));
      for (const Posted& sent : sends) require(sent.transfer->done, "a message in a bay");
    }
    for (const int value : {1, 2, 3})
      for (const int rank : {0, 1}) require_message(pairs.receive(rank, 1 - rank, kBay), value);
  }
}

// A bay that comes back to a rank with one of the peer's is free at once.
void free_bays_that_come_back() {
  Pairs pairs(2);
  const Posted sent[] = {pairs.send(0, 1, kBay), pairs.send(1, 0, kBay)};
  for (const int rank : {0, 1}) require_message(pairs.receive(rank, 1 - rank, kBay), 1);
  pass_on(pairs, 1, 0, kBay, 2);
  for (int i = 0; i < 1 + PairChannel::kBays; ++i)
    require(pairs.send(0, 1, kBay).transfer->done, "a message in a bay");
}

// An answer that has no room behind the message's start begins where the bay does.
void answer_longer() {
  Pairs pairs(9);
  constexpr size_t kBayBytes = PairChannel::span_bytes(9) / PairChannel::kBays;
  constexpr int kLast = kBayBytes / 4096 * PairChannel::kBays - 1;  // the last turn in a bay
  for (int i = 1; i < kLast; ++i) pass_on(pairs, 0, 1, 300, i);
  const Posted other = pairs.send(1, 0, 300, 6);  // from here on it keeps bays
  pass_on(pairs, 0, 1, 300, 2);
  const uint64_t place = last_location(pairs, 0, 1), start = place % kBayBytes;
  require_equal(start, kBayBytes - 4096, "the end of a bay");
  pass_on(pairs, 1, 0, 4096, 3);
  require_equal(last_location(pairs, 1, 0), place ^ Bays::kAnyBay, "an answer that has room");
  pass_on(pairs, 0, 1, 300, 4);
  pass_on(pairs, 1, 0, 4097, 5);
  require_equal(last_location(pairs, 1, 0), (place - start) ^ Bays::kAnyBay, "its start");
}

// A message to oneself has no peer that could answer.
void send_to_oneself() {
  Pairs pairs(2);
  for (int round = 0; round < 3 * PairChannel::kMessages; ++round) {
    pass_on(pairs, 0, 0, kBay, round);
    require_equal(last_location(pairs, 0, 0) & Bays::kAnyBay, Message::kInBay, "a bay");
  }
}

void refuse_places() {
  constexpr size_t kSpan = PairChannel::span_bytes(2), kBytes = 300;
  for (const uint64_t owner : {Message::kInBay, Message::kInPeersBay, Bays::kAnyBay})
    for (const uint64_t offset : {kSpan - kBytes, kSpan - kBytes + 1, ~Bays::kAnyBay}) {
      Pairs pairs(2);
      pairs.send(1, 0, kBytes);
      channel_of(pairs, 1, 0).messages[0].location = owner | offset;
      const Posted receive = pairs.receive(0, 1, kBytes);
      const std::string text = pairs.wait(0, receive).text;
      if (offset + kBytes > kSpan) require_part(text, "rank 1 published a message in no bay");
      else require(receive.transfer->done && !receive.transfer->error, "a message in a bay");
    }
  for (const size_t num_bytes : {kBay + 4, 2 * kSpan}) {  // in no bay, whatever its sender says
    Pairs pairs(2);
    const Posted send = pairs.send(1, 0, num_bytes);
    channel_of(pairs, 1, 0).messages[0].location = Message::kInBay;
    const Posted receive = pairs.receive(0, 1, num_bytes);
    require_part(pairs.wait(0, receive).text, "a message in no bay");
  }
}

}  // namespace

int main() {
  copy_ways.answers_in_place = true;  // on every CPU
  answer_in_place();
  exchange_in_place();
  leave_kept_bays();
  lose_no_bays();
  free_bays_that_come_back();
  answer_longer();
  send_to_oneself();
  refuse_places();
}
