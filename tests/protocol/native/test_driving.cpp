// SPDX-License-Identifier: Apache-2.0
// The thread that moves transfers while the program waits for none. How often it looks, when it
// steps aside, and how long it stays. The operating system is lone_machine.h.
//
//   test_driving
#include "lone_machine.h"
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

// A message longer than the ring of its channel.
constexpr size_t kLong = (PairChannel::kChunks + 2) * PairChannel::kChunkBytes;

// The thread that drives is a guest: it naps, except while a message comes.
void drive() {
  machine::clear();
  Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
  std::vector<std::byte> data(kLong);
  const auto long_one = pairs.start(0, data, false);
  const Posted send = pairs.send(1, 0, kLong);
  std::string before;
  int num_naps = 0;
  Counter looks(P::on_load, channel_of(pairs, 1, 0).offered.value);
  machine::on_sleep = [&] {
    if (++num_naps == 1) pairs.look(1, send);  // the ring is full
    if (num_naps == 2) before = machine::take_steps();
    if (num_naps == 3) pairs.look(1, send);
  };
  pairs.engine(0).drive(pairs.world.host(0));
  require_message(send, 1);
  require(long_one->done && data[kLong - 1] == std::byte{1}, "a message that was driven");
  // It comes to rest again by spins and yields, as a part of the message has come.
  require_equal(before, "1 x nap of 250, 64 x yield, 1 x nap of 250", "how a thread drives");
  const std::string rest = machine::take_steps();
  require(rest.ends_with(" x nap of 250") && rest.find(',') == std::string::npos, rest);
  require_equal(pairs.world.pad(0).blocked.value, 0, "nobody waits");
}

// It leaves the transfers to a thread that waits, but for its sleeps.
void step_aside() {
  for (const bool is_asleep : {false, true}) {
    machine::clear();
    Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
    const Posted receive = pairs.receive(0, 1, 8);
    Counter looks(P::on_load, channel_of(pairs, 1, 0).offered.value);
    bool is_driving = false;
    int num_naps = 0, num_looks = 0;
    const auto drive = [&] {
      if (std::exchange(is_driving, true)) return;
      machine::take_steps();
      num_looks = looks.count;
      pairs.engine(0).drive(pairs.world.host(0));
      num_looks = looks.count - num_looks;
      require_equal(machine::take_steps(), "3 x nap of 250", "how a thread drives");
    };
    machine::on_yield = [&] {
      if (!is_asleep) drive();
    };
    machine::on_sleep = [&] {
      if (!is_driving) drive();
      else if (++num_naps == 3) pairs.engine(0).close();
    };
    const std::string text = pairs.wait(0, receive).text;
    require_part(text, "was destroyed");
    require_equal(num_looks, is_asleep ? 3 : 0, "looks of the thread that drives");
  }
}

// Drives on while a transfer is open, and then for 20 ms after the last start.
void linger() {
  for (const bool is_open : {false, true}) {
    machine::clear();
    Pairs pairs(2);
    auto one = transfer_of(false, 1, DType::uint8, {});
    require(pairs.engine(0).start({&one, 1}, pairs.world.host(0)), "somebody has to drive");
    const int64_t start_us = machine::time_us;
    const auto withdraw = [&] { require(pairs.engine(0).withdraw(*one), "a receive"); };
    if (!is_open) withdraw();
    machine::on_sleep = [&] {
      if (!one->done && machine::time_us - start_us >= 30000) withdraw();
    };
    pairs.engine(0).drive(pairs.world.host(0));
    require_equal(machine::time_us - start_us, is_open ? 30000 : 20000, "how long it drives");
  }
  machine::clear();
  Pairs closed(2);
  auto one = transfer_of(false, 1, DType::uint8, {});
  closed.engine(0).start({&one, 1}, closed.world.host(0));
  closed.engine(0).close();
  closed.engine(0).drive(closed.world.host(0));
  require_equal(machine::take_steps(), "", "a group that is closed");
}

// One thread at most is asked to drive: where a transfer is open, and nobody does.
void ask_for_a_driver() {
  machine::clear();
  Pairs pairs(2);
  const auto asks = [&](uint32_t tag) {
    auto one = transfer_of(false, 1, DType::int32, {});
    one->tag = tag;
    return pairs.engine(0).start({&one, 1}, pairs.world.host(0));
  };
  pairs.send(1, 0, 0, 1);
  require(!asks(1), "a transfer that is done at once");
  require(asks(2), "somebody has to drive");
  machine::on_sleep = once([&] {
    require(!asks(3), "somebody drives already");
    for (const uint32_t tag : {2, 3}) pairs.send(1, 0, 0, tag);
  });
  pairs.engine(0).drive(pairs.world.host(0));
  require(asks(4), "nobody drives any more");
}

}  // namespace

int main() {
  ask_for_a_driver();
  drive();
  step_aside();
  linger();
}
