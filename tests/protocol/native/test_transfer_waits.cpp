// SPDX-License-Identifier: Apache-2.0
// Each step of a wait for a send or a receive: when a rank yields and sleeps. Also when it looks
// for the reason, and the words it shows meanwhile. The operating system is lone_machine.h.
//
//   test_transfer_waits
#include <atomic>
#include <thread>

#include "lone_machine.h"
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr size_t kLarge = 128 << 10;
constexpr int64_t kPatrolUs = 1000;
// A message longer than the ring of its channel.
constexpr size_t kLong = (PairChannel::kChunks + 2) * PairChannel::kChunkBytes;

// ---- sends and receives -------------------------------------------------------------------------

// A receive in vain for so long.
void wait_for_message(bool has_barrier, uint32_t wake, int num_open) {
  machine::clear();
  machine::has_barrier = has_barrier;
  Pairs pairs(2);
  pairs.world.pad(1).sleep.wake = wake;
  std::vector<Posted> open;
  for (int i = 0; i < num_open; ++i) open.push_back(pairs.receive(0, 1, 8));
  Counter looks(P::on_load, channel_of(pairs, 1, 0).offered.value);
  int looks_before_yield = 0;
  machine::on_yield = [&] {
    if (looks_before_yield == 0) looks_before_yield = looks.count;
    require(pairs.world.host(0).num_waits > 0, "the program is told that a wait gets long");
  };
  std::vector<int64_t> patrols;
  pairs.world.host(0).hook = [&] { patrols.push_back(machine::time_us); };
  const int64_t start_us = machine::time_us;
  require(!pairs.engine(0).wait(*open[0].transfer, pairs.world.host(0), 0.0015), "nobody sends");
  require_equal(looks_before_yield, P::kTransferSpins + 1, "looks before the first yield");
  // 64 yields take 640 us; then it sleeps until the limit is over.
  std::string expected = "64 x yield, 9 x nap of 100";
  int64_t first_us = 1040;
  if (num_open == 1) {
    const int64_t sleep_us = has_barrier ? 20000 : 2000;
    expected = "64 x yield, 1 x barrier, 1 x sleep of " + std::to_string(sleep_us) + " at " +
               std::to_string(wake);
    first_us = 640 + sleep_us;
  }
  require_equal(P::load_sleepers(pairs.world.pad(1).sleep), num_open == 1, "who sleeps shows it");
  require_equal(machine::take_steps(), expected, "the steps of a wait");
  require(patrols.size() == 1 && patrols[0] == start_us + first_us, "one look for the reason");
}

// Looks for the reason: each millisecond, from the first yield on.
void patrol_transfers() {
  machine::clear();
  Pairs pairs(2);
  const Posted one = pairs.receive(0, 1, 8), other = pairs.receive(0, 1, 8);
  std::vector<int64_t> patrols;
  const int64_t start_us = machine::time_us;
  pairs.world.host(0).hook = [&] { patrols.push_back(machine::time_us - start_us); };
  pairs.engine(0).wait(*one.transfer, pairs.world.host(0), 0.0045);
  // Naps of 100 us from 640 us on.
  require(patrols == std::vector<int64_t>({1040, 2040, 3040, 4040}), "a look each millisecond");
  machine::clear();
  Pairs exact(2);
  const Posted first = exact.receive(0, 1, 8), second = exact.receive(0, 1, 8);
  // 700 us after 64 yields, 1000 later
  machine::on_yield = once([] { machine::time_us += 60 - machine::kYieldUs; });
  std::vector<int64_t> times;
  const int64_t begin_us = machine::time_us;
  exact.world.host(0).hook = [&] { times.push_back(machine::time_us - begin_us); };
  machine::on_sleep = [&, naps = 0]() mutable {
    if (++naps == 1) machine::time_us += 10;
  };
  exact.engine(0).wait(*first.transfer, exact.world.host(0), 0.0012);
  require(!times.empty() && times[0] == kPatrolUs, "exactly a millisecond after the first yield");
}

// A message that comes in between ends the wait before its next step.
void stop_waiting() {
  for (const int when : {0, 1, 2, 3}) {
    machine::clear();
    Pairs pairs(2);
    const Posted receive = pairs.receive(0, 1, 8);
    auto send = once([&] { pairs.send(1, 0, 8); });
    if (when == 1) machine::on_yield = send;
    if (when == 2) machine::on_barrier = send;
    if (when == 3) machine::on_sleep = send;
    if (when == 0) send();
    require_equal(pairs.wait(0, receive).text, "no error", "a message that comes");
    const char* steps[] = {"", "1 x yield", "64 x yield, 1 x barrier, 1 x wake",
                           "64 x yield, 1 x barrier, 1 x sleep of 20000 at 0, 1 x wake"};
    require_equal(machine::take_steps(), steps[when], "the steps of a wait");
    require_equal(pairs.world.host(0).num_waits > 0, when > 0, "whether it was a long one");
    require_equal(pairs.world.host(0).num_looks, when == 3, "looks for the reason");
  }
}

// A rank that moved something spins and yields anew; one that a stranger held up rests.
void yield_again() {
  for (const bool has_stranger : {false, true}) {
    machine::clear();
    Pairs pairs(2);
    const Posted awaited = pairs.receive(0, 1, 8), other = pairs.receive(0, 1, 8, 6);
    machine::on_yield = once([&] {
      if (has_stranger) machine::time_us += 2 * Company::kBurstUs;
      else pairs.send(1, 0, 8, 6);
    });
    const double limit_s = 1e-6 * (2 * Company::kBurstUs + 600);
    require(!pairs.engine(0).wait(*awaited.transfer, pairs.world.host(0), limit_s), "no message");
    const std::string start = has_stranger ? "1 x yield, 6 x nap" : "65 x yield, 1 x barrier";
    require_start(machine::take_steps(), start);
  }
}

// Another thread may end the transfer that this one waits for, just before it would rest.
void rest_for_others() {
  machine::clear();
  Pairs pairs(3);
  const Posted awaited = pairs.receive(0, 1, 8), other = pairs.receive(0, 2, 8);
  // The last look before the rest; then the message comes, and another thread takes it.
  int num_yields = 0;
  machine::on_yield = [&] { ++num_yields; };
  struct Seeing : LoneHost {
    void blocking() override {
      if (on_blocking) on_blocking();
    }
    std::function<void()> on_blocking;
  } host;
  host.on_blocking = [&] {
    if (num_yields < P::kYields || awaited.transfer->done) return;
    pairs.send(1, 0, 8);
    require(pairs.look(0, awaited), "the other thread");
  };
  pairs.engine(0).wait(*awaited.transfer, host, 0);
  require_equal(machine::take_steps(), "64 x yield, 1 x nap of 100",
                "it does not sleep for rank 2");
}

// A thread that finds another one at work tells its program that it waits.
void tell_of_others() {
  machine::clear();
  Pairs pairs(2);
  const Posted receive = pairs.receive(0, 1, 8);
  struct Told : Host {
    void blocking() override { is_told = true; }
    std::atomic<bool> is_told{false};
  } host;
  auto one = transfer_of(false, 1, DType::uint8, {});
  std::thread other;
  P::on_load = once([&] {  // in the middle of a look
    other = std::thread([&] { pairs.engine(0).start({&one, 1}, host); });
    while (!host.is_told) std::this_thread::yield();
  });
  pairs.look(0, receive);
  other.join();
  P::on_load = {};
  require(pairs.engine(0).withdraw(*one), "a receive that was started");
}

// A rank shows what it waits in, from its first yield to the end of the wait.
void show_blocked_waits() {
  for (const bool sends : {true, false}) {
    machine::clear();
    Pairs pairs(3);
    const uint64_t& word = pairs.world.pad(0).blocked.value;
    const Posted one = sends ? pairs.send(0, 2, kLarge) : pairs.receive(0, 2, 8);
    Counter stores(P::on_store, word);
    LoneHost& host = pairs.world.host(0);
    host.hook = [&] { require_equal(word, (sends ? 1 : 2) | 2 << 8, "what a rank waits in"); };
    require(!pairs.engine(0).wait(*one.transfer, host, 0.02), "a wait with a limit of its own");
    require(host.num_looks > 0 && word == 0 && !one.transfer->done, "it goes on");
    require_equal(stores.count, 2, "set once, and taken back");
  }
}

// ---- large messages: in chunks, or copied out of the sender's memory ----------------------------

struct Large : Pairs {
  explicit Large(bool is_crowded, bool copies_always)
      : Pairs(2, [&](GroupOptions& options) { options.num_cpus = is_crowded ? 1 : 2; }) {
    machine::clear();
    for (const int rank : {0, 1}) engine(rank).allow_single_copy(copies_always);
  }
};

// Whether the receiver copies alone: not if the sender is about to wait, and so can copy its half.
void choose_copies() {
  for (const bool is_crowded : {false, true})
    for (const bool always : {false, true})
      for (const bool is_awaited : {false, true}) {
        Large large(is_crowded, always);
        std::vector<std::byte> data(kLarge, std::byte{3}), got(kLarge);
        const bool copies = is_crowded || always || !is_awaited;
        Posted send;
        std::shared_ptr<Transfer> started;
        if (is_awaited) send = large.send(1, 0, kLarge, 5, 3);
        else started = large.start(1, data, true);
        const auto receive = large.start(0, got, false);
        for (int i = 0; i < 4; ++i) {
          large.engine(0).look(*receive);
          machine::time_us += 1;
        }
        require_equal(bool(receive->done), copies, "whether the receiver copies alone");
        const uint64_t kinds = channel_of(large, 1, 0).messages[0].tag_and_dtype;
        require_equal((kinds & fastcoll::Message::kWaited) != 0, is_awaited, "a sender that waits");
      }
}

// A receiver that sends as large a message copies alone, and at once, though the sender waits.
void copy_exchanged_messages() {
  constexpr size_t kLeast = 2 * kLarge;
  const size_t usual = std::exchange(fastcoll::copy_ways.exchanged, kLeast);
  using Bytes = std::pair<size_t, size_t>;
  for (const auto& [sent, received] :
       {Bytes{kLeast, kLeast}, {kLeast - 4, kLeast}, {0, kLeast}, {kLeast, kLeast - 4}}) {
    Large large(false, false);
    std::vector<std::byte> got(received), data(sent);
    const Posted send = large.send(1, 0, received, 5, 3);
    if (sent != 0) large.start(0, data, true);
    const auto receive = large.start(0, got, false);
    const bool copies = sent == kLeast && received == kLeast;
    require_equal(bool(receive->done), copies, "whether the receiver copies alone");
  }
  fastcoll::copy_ways.exchanged = usual;
}

// A peer that does its part, and ends the group while this rank sleeps, has done it. All other
// transfers fail.
void end_broken_transfers() {
  const auto wait_broken = [](Pairs& pairs, const Transfer& one, const std::function<void()>& act) {
    machine::on_sleep = once([&] {
      act();
      machine::time_us += kPatrolUs;
      pairs.world.group(1).decide_verdict(ErrorKind::driver, "why", 2);
    });
    return error_of(
        [&] { pairs.engine(0).wait(const_cast<Transfer&>(one), pairs.world.host(0), 0); });
  };
  for (const size_t num_bytes : {size_t{8}, kLong}) {  // at once, and in chunks
    machine::clear();
    Pairs pairs(2);
    const Posted receive = pairs.receive(0, 1, num_bytes), missing = pairs.receive(0, 1, 8, 6);
    Posted send;
    if (num_bytes == kLong) send = pairs.send(1, 0, num_bytes, 5, 3);
    pairs.look(0, receive);  // asks for its chunks
    const auto give = [&] {
      if (num_bytes != kLong) send = pairs.send(1, 0, num_bytes, 5, 3);
      pairs.look(1, send);
      pairs.look(0, receive);
      pairs.look(1, send);
    };
    require_equal(wait_broken(pairs, *receive.transfer, give).text, "no error", "it was sent");
    require_message(receive, 3);
    require_verdict(pairs.wait(0, missing), "why", ErrorKind::driver, 2);
  }
  for (const bool takes : {true, false}) {
    Large large(false, true);
    std::vector<std::byte> data(kLarge), got(kLarge);
    const auto send = large.start(0, data, true);
    const Seen seen = wait_broken(large, *send, [&] {
      if (!takes) return;
      const auto receive = large.start(1, got, false);
      machine::time_us += kPatrolUs;  // its patience
      large.engine(1).look(*receive);
    });
    require_equal(seen.text, takes ? "no error" : "why" + kOver, "a message that was copied");
  }
  machine::clear();
  Pairs pairs(2);
  std::vector<Posted> sends, taken;
  for (int i = 0; i <= PairChannel::kMessages; ++i) sends.push_back(pairs.send(0, 1, 8));
  const Seen seen = wait_broken(pairs, *sends.back().transfer, [&] {
    for (int i = 0; i < PairChannel::kMessages; ++i) taken.push_back(pairs.receive(1, 0, 8));
  });
  require_verdict(seen, "why", ErrorKind::driver, 2);  // it was never offered
}

// A rank shows that it looks after its large sends while one of its threads waits, and no longer.
void show_polling() {
  for (const bool waits_for_other : {true, false}) {
    Large large(true, true);
    const uint64_t& polling = large.world.pad(0).polling.value;
    std::vector<std::byte> data(kLarge);
    std::shared_ptr<Transfer> started = large.start(0, data, true);
    require_equal(polling, 0, "nobody waits");
    Posted other = waits_for_other ? large.receive(0, 1, 8) : Posted{};
    require_equal(polling, waits_for_other, "its starter waits for it next");
    const Transfer& awaited = waits_for_other ? *other.transfer : *started;
    Counter stores(P::on_store, polling);
    int num_seen = 0;
    machine::on_yield = [&] { num_seen += polling == 1; };
    require(!large.engine(0).wait(const_cast<Transfer&>(awaited), large.world.host(0), 0.001),
            "nobody takes it");
    require(num_seen > 0 && polling == 0, "as long as it waits");
    require_equal(stores.count, waits_for_other ? 1 : 2, "no more stores than changes");
    // Small ones need no look after them.
    Pairs small(2);
    const Posted receive = small.receive(0, 1, 8);
    machine::on_yield = [&] { require_equal(small.world.pad(0).polling.value, 0, "small"); };
    small.engine(0).wait(*receive.transfer, small.world.host(0), 0.001);
  }
  // A thread that drives does not look all the time.
  Large large(true, true);
  std::vector<std::byte> data(kLarge);
  const std::shared_ptr<Transfer> one = large.start(0, data, true);
  Posted receive;
  machine::on_sleep = [&, naps = 0]() mutable {
    require_equal(large.world.pad(0).polling.value, 0, "a thread that drives");
    if (++naps == 3) receive = large.receive(1, 0, kLarge);
    if (naps > 3) large.look(1, receive);
  };
  large.engine(0).drive(large.world.host(0));
  require(one->done, "a message that was copied");
}

// A receiver gives a sender that has just sent a moment to begin its wait; but not where nobody
// looks again soon.
void be_patient() {
  for (const bool drives : {false, true}) {
    Large large(false, false);
    std::vector<std::byte> data(kLarge, std::byte{3}), got(kLarge);
    const auto send = large.start(1, data, true);
    const auto receive = large.start(0, got, false);
    require(!receive->done, "a moment");
    if (drives) {
      large.engine(0).drive(large.world.host(0));
      require_start(machine::take_steps(), "80 x nap of 250");
    }
    machine::time_us += 2;
    require_equal(large.engine(0).look(*receive), drives, "the moment is not over");
    machine::time_us += 1;
    require(large.engine(0).look(*receive), "it is over");
  }
  Large large(false, false);
  std::vector<std::byte> data(kLarge, std::byte{3}), got(kLarge);
  const auto send = large.start(1, data, true);
  const auto receive = large.start(0, got, false);
  large.engine(0).wait(*receive, large.world.host(0), 0);
  require_equal(machine::take_steps(), "1 x yield", "a rank that waits is patient");
}

}  // namespace

int main() {
  for (const bool has_barrier : {true, false})
    for (const int num_open : {1, 2}) wait_for_message(has_barrier, 7, num_open);
  patrol_transfers();
  stop_waiting();
  yield_again();
  rest_for_others();
  tell_of_others();
  show_blocked_waits();
  choose_copies();
  copy_exchanged_messages();
  end_broken_transfers();
  show_polling();
  be_patient();
}
