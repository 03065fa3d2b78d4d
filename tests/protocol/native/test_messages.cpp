// SPDX-License-Identifier: Apache-2.0
// Which message a receive takes, one step at a time, and which messages are refused. All ranks are
// in one thread (lone_world.h).
//
//   test_messages
#include <cstring>

#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kLarge = 128 << 10;  // bytes of a message that comes in chunks, or is copied
constexpr size_t kBay = PairChannel::kBayBytes;

void take_of_any_rank() {
  Pairs pairs(3);
  for (const size_t num_bytes : {size_t{8}, kBay, kLarge}) {
    const Posted first = pairs.receive(0, kAnyPeer, num_bytes);
    require(!pairs.look(0, first), "nobody has sent");
    const Posted tagged = pairs.send(1, 0, num_bytes, 6, 7), sent = pairs.send(2, 0, num_bytes);
    const auto move = [&](const Posted& to) {
      for (int i = 0; i < 8; ++i) pairs.look(0, to), pairs.look(1, tagged), pairs.look(2, sent);
    };
    move(first);
    require_message(first, 1);
    require_equal(first.transfer->peer, 2, "whose message it was");
    const Posted second = pairs.receive(0, kAnyPeer, num_bytes, 6);
    move(second);
    require_message(second, 7);
    require_equal(second.transfer->peer, 1, "whose message it was");
  }
}

// Transfers that are started together make their progress then, each of them.
void start_together() {
  for (const bool is_busy : {false, true}) {
    Pairs pairs(2);
    const Posted open = is_busy ? pairs.receive(0, 1, 8, 9) : Posted{};
    std::vector<std::byte> data(8);
    std::vector<std::shared_ptr<Transfer>> sends;
    for (int i = 0; i < 2; ++i) sends.push_back(transfer_of(true, 1, DType::uint8, data));
    require(!pairs.engine(0).start(sends, pairs.world.host(0)), "nothing is left to be driven");
    require(sends[0]->done && sends[1]->done, "messages that have room");
  }
}

// A message that comes between the looks of two receives is the older one's.
void take_in_order() {
  Pairs pairs(2);
  const Posted first = pairs.receive(0, 1, 8), second = pairs.receive(0, 1, 8);
  Posted sent;
  const auto* channel = &channel_of(pairs, 1, 0);
  P::on_load = [&, num_loads = 0](const uint64_t& word) mutable {
    if (&word == &channel->messages[0].number && ++num_loads == 2) sent = pairs.send(1, 0, 8);
  };
  pairs.look(0, first);
  pairs.look(0, first);
  P::on_load = {};
  require(first.transfer->done && !second.transfer->done, "whose message it is");
  require_message(first, 1);
}

// Messages that were taken before an older one are not taken again.
void take_once() {
  Pairs pairs(2);
  std::vector<Posted> kept;
  kept.push_back(pairs.send(1, 0, 8, 6));
  for (int i = 1; i < PairChannel::kUsualPlaces; ++i) {
    kept.push_back(pairs.send(1, 0, 8, 5, i));
    kept.push_back(pairs.receive(0, 1, 8));
    require_message(kept.back(), i);
  }
  kept.push_back(pairs.receive(0, 1, 8, 6));
  require_message(kept.back(), 1);
  const Posted late = pairs.receive(0, 1, 8);
  require(!pairs.look(0, late), "a message that was taken");
  kept.push_back(pairs.send(1, 0, 8, 5, 9));
  require(pairs.look(0, late), "the message behind them");
  require_message(late, 9);
}

void refuse_mismatches() {
  for (const bool traces : {false, true}) {
    Pairs pairs(2, [&](GroupOptions& options) { options.traces = traces; });
    pairs.world.host(1).site = traces ? "b.py:2" : "";
    const Posted send = pairs.send(1, 0, 12);
    pairs.world.host(0).site = traces ? "a.py:1" : "";
    const Posted receive = pairs.receive(0, 1, 8);
    require_verdict(pairs.wait(0, receive),
                    std::string("rank 1 sends 3 x int32 to rank 0") + (traces ? " at b.py:2" : "") +
                        ", which receives 2 x int32 (tag 5, group \"lone\")" +
                        (traces ? " at a.py:1" : ""),
                    ErrorKind::desync, 3);
  }
  for (const uint64_t dtype : {uint64_t(DType::float32), uint64_t(kNumDTypes), uint64_t{0xff}}) {
    Pairs pairs(2);
    const Posted send = pairs.send(1, 0, 8);
    auto* channel = &channel_of(pairs, 1, 0);
    channel->messages[0].tag_and_dtype = 5 | dtype << 32;
    const Posted receive = pairs.receive(0, 1, 8);
    const std::string text = pairs.wait(0, receive).text;
    const std::string expected =
        dtype < kNumDTypes ? "rank 1 sends 2 x float32 to rank 0, which receives 2 x int32"
                           : "rank 1 published a message of a type that there is not";
    require_part(text, expected);
  }
}

// A message is there as soon as its sender has counted it, and no sooner. The next one of a pair is
// there once its number is in its place.
void take_counted_messages() {
  for (const bool is_next : {true, false}) {
    Pairs pairs(2);
    const Posted older = is_next ? Posted{} : pairs.send(1, 0, 8, 6);
    const Posted receive = pairs.receive(0, kAnyPeer, 8);
    const int place = is_next ? 0 : 1;
    const auto* channel = &channel_of(pairs, 1, 0);
    int num_looks = 0;
    P::on_arrive = [&](const uint64_t& word) {
      const bool is_number = &word == &channel->messages[place].number;
      if (!is_number && &word != &channel->offered.value) return;
      ++num_looks;
      require_equal(pairs.look(0, receive), is_next && !is_number, "a message that comes");
    };
    pairs.send(1, 0, 8);
    P::on_arrive = {};
    require_equal(num_looks, 2, "looks at a message that comes");
    require_equal(channel->messages[place].number, place + 1, "its number");
    require(pairs.look(0, receive), "a message");
    require_message(receive, 1);
  }
}

// A sender may count no more chunks than the message has left.
void refuse_chunks() {
  for (const size_t num_chunks : {3, 4})
    for (const size_t rest : {size_t{1}, size_t{4}, PairChannel::kChunkBytes})
      for (const uint64_t more : {0, 1}) {
        const size_t num_bytes = (num_chunks - 1) * PairChannel::kChunkBytes + rest;
        Pairs pairs(2);
        const Posted send = pairs.send(1, 0, num_bytes);
        const Posted receive = pairs.receive(0, 1, num_bytes);
        pairs.look(0, receive);
        pairs.look(1, send);
        auto* channel = &channel_of(pairs, 1, 0);
        require_equal(channel->sent.value, num_chunks, "chunks");
        channel->sent.value += more;
        const std::string text = pairs.wait(0, receive).text;
        if (more == 0) require_message(receive, 1);
        else require_part(text, "chunks that it was not asked for");
      }
}

// Nor may a receiver count more than were sent.
void refuse_receipts() {
  Pairs pairs(2);
  const Posted send = pairs.send(1, 0, kLarge), receive = pairs.receive(0, 1, kLarge);
  channel_of(pairs, 0, 1).received.value = 1;
  const std::string text = pairs.wait(1, send).text;
  require_part(text, "rank 0 published that it has chunks nobody sent");
}

// A sender takes the usual places in turn; once none is left, those whose messages were taken.
// Bays are taken alike: a message without one waits for its chunks.
void take_places_in_turn() {
  Pairs pairs(2);
  const auto require_number = [&](int place, int number) {
    const Message& message = channel_of(pairs, 1, 0).messages[place];
    require_equal(message.number, number, "the number in a place");
  };
  static_assert(PairChannel::kBays == PairChannel::kUsualPlaces);
  for (int i = 0; i < PairChannel::kBays; ++i) {
    pairs.send(1, 0, kBay, uint32_t(i), i);
    require_number(i, i + 1);
    if (i == 0 || i == 3) require_message(pairs.receive(0, 1, kBay, uint32_t(i)), i);
  }
  pairs.send(1, 0, 8), pairs.send(1, 0, kBay);
  require_number(0, PairChannel::kBays + 1), require_number(3, PairChannel::kBays + 2);
  const Posted last = pairs.send(1, 0, kBay), waiting = pairs.send(1, 0, kBay);
  require(last.transfer->done, "a message in the bay of the first one");
  require(!waiting.transfer->done, "a message without a bay waits");
}

// Messages use all of a pair's memory by turns, less of it in a large group; then it comes round.
void take_memory_in_turn() {
  static_assert(PairChannel::span_bytes(kMaxWorld) == PairChannel::kLeastSpanBytes);
  for (const auto& [world_size, span_bytes] :
       {std::pair{4, size_t{2} << 20}, {5, size_t{1} << 20}, {9, size_t{512} << 10}}) {
    for (const size_t num_bytes :
         {size_t{300}, size_t{4} << 10, kBay / 2, kBay, size_t{256} << 10}) {
      Pairs pairs(world_size);
      // The bays lie first, one behind the other.
      std::byte* spans = reinterpret_cast<std::byte*>(&channel_of(pairs, 1, 0) + 1);
      const size_t bay_bytes = span_bytes / PairChannel::kBays;
      const bool in_bays = num_bytes <= std::min(kBay, bay_bytes / 2);  // two turns at least
      std::byte* memory = in_bays ? spans : spans + span_bytes;
      const size_t turn_bytes = std::max(num_bytes, size_t{4} << 10);
      const size_t num_messages = span_bytes / turn_bytes;
      for (size_t i = 0; i < 2 * num_messages; ++i) {
        if (i == num_messages) std::memset(memory, 0, span_bytes);
        const Posted sent = pairs.send(1, 0, num_bytes), got = pairs.receive(0, 1, num_bytes);
        while (!pairs.look(0, got)) pairs.look(1, sent);
        require_message(got, 1);
        if ((i + 1) % num_messages != 0) continue;
        for (size_t at = 0; at < span_bytes; at += turn_bytes)
          require(memory[at] == std::byte{1}, "memory is used by turns");
        require(in_bays || memory[span_bytes - 1] == std::byte{1}, "all of it");
      }
    }
  }
}

// A message that is longer than a pair's memory goes round in a part of it.
void go_round_in_a_ring() {
  constexpr size_t kMiB = size_t{1} << 20, kChunk = PairChannel::kChunkBytes;
  const struct {
    int world_size;
    size_t span_bytes, num_bytes, ring_bytes;
    bool in_long_rings;
  } cases[] = {{2, 2 * kMiB, 2 * kMiB, 2 * kMiB, false},
               {2, 2 * kMiB, 2 * kMiB + kChunk, kMiB / 2, false},
               {2, 2 * kMiB, 2 * kMiB + kChunk, kMiB, true},
               {9, kMiB / 2, kMiB, kMiB / 2, true}};
  for (const auto& one : cases) {
    const bool usual = std::exchange(copy_ways.in_long_rings, one.in_long_rings);
    Pairs pairs(one.world_size);
    const std::byte* memory =
        reinterpret_cast<std::byte*>(&channel_of(pairs, 1, 0) + 1) + one.span_bytes;
    const Posted sent = pairs.send(1, 0, one.num_bytes), got = pairs.receive(0, 1, one.num_bytes);
    while (!pairs.look(0, got)) pairs.look(1, sent);
    require_message(got, 1);
    for (size_t at = 0; at < one.span_bytes; at += kChunk)
      require_equal(int(memory[at]), at < one.ring_bytes ? 1 : 0, "a place of a chunk");
    copy_ways.in_long_rings = usual;
  }
}

void withdraw() {
  Pairs pairs(2);
  const Posted receive = pairs.receive(0, 1, 8), other = pairs.receive(0, 1, 8);
  require(pairs.engine(0).withdraw(*receive.transfer), "a receive without a message");
  require_equal(pairs.wait(0, receive).text, "no error", "what was taken back");
  require(pairs.engine(0).has_open(), "the other one");
  const Posted send = pairs.send(1, 0, 8), large = pairs.send(1, 0, kLarge, 7);
  require(pairs.look(0, other), "a message");
  require(!pairs.engine(0).withdraw(*other.transfer), "a receive that is done");
  require_message(other, 1);
  require(!pairs.engine(1).withdraw(*large.transfer), "a send");
  const Posted half = pairs.receive(0, 1, kLarge, 7);
  require(!pairs.engine(0).withdraw(*half.transfer), "a receive that has a message");
}

// A message that finds no bay free may be copied, if it has so many bytes.
void use_bays() {
  Pairs pairs(2);
  pairs.engine(0).allow_single_copy(true);
  constexpr size_t kLeastCopied = 64 << 10;
  std::vector<Posted> sends;
  for (int i = 0; i < PairChannel::kBays; ++i)
    sends.push_back(pairs.send(0, 1, kBay, uint32_t(i), i + 1));
  for (const size_t num_bytes : {kLeastCopied, kLeastCopied - 4})
    sends.push_back(pairs.send(0, 1, num_bytes));
  for (size_t i = 0; i < sends.size(); ++i) {
    require_equal(bool(sends[i].transfer->done), i < PairChannel::kBays, "in a bay");
    const uint64_t location = channel_of(pairs, 0, 1).messages[i].location;
    const bool may_be_copied = location != 0 && (location & Bays::kAnyBay) == 0;
    require_equal(may_be_copied, i == PairChannel::kBays, "a message that may be copied");
  }
}

}  // namespace

int main() {
  take_of_any_rank();
  start_together();
  take_in_order();
  take_once();
  refuse_mismatches();
  refuse_chunks();
  refuse_receipts();
  take_counted_messages();
  take_places_in_turn();
  take_memory_in_turn();
  go_round_in_a_ring();
  withdraw();
  use_bays();
}
