// SPDX-License-Identifier: Apache-2.0
// How a rank waits for a late message: whether it spins on (patience.h), and what it does when it
// wakes up. The operating system is lone_machine.h.
//
//   test_transfer_spins
#include "lone_machine.h"
#include "lone_pairs.h"

using namespace fastcoll;
using namespace lone;

namespace {

// Rank 0 receives from rank 1, which sends so many looks after the wait got long. A look takes
// 1 us. Returns the steps of its wait, none if it spins on.
std::string receive_late(Pairs& pairs, int64_t late_us) {
  const Posted receive = pairs.receive(0, 1, 8);
  const LoneHost& host = pairs.world.host(0);
  const uint64_t& word = channel_of(pairs, 1, 0).offered.value;
  P::on_load = [&, seen = host.num_waits, left_us = late_us](const uint64_t& touched) mutable {
    if (&touched != &word || host.num_waits == seen) return;
    ++machine::time_us;
    if (--left_us == 0) pairs.send(1, 0, 8);
  };
  require_equal(pairs.wait(0, receive).text, "no error", "a late message");
  P::on_load = {};
  require_message(receive, 1);
  return machine::take_steps();
}

// A rank spins for a millisecond for a message. A thread beside the main one does not, nor does a
// rank beside other programs, nor one whose group has more OpenMP threads than CPUs.
void spin_on() {
  struct Case {
    bool is_main_thread;
    int num_threads;
    bool is_busy, is_patient;
  };
  for (const Case& one : {Case{true, 1, false, true}, Case{false, 1, false, false},
                          Case{true, 2, false, false}, Case{true, 1, true, false}}) {
    machine::clear();
    Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
    machine::is_main_thread = one.is_main_thread;
    machine::num_threads = one.num_threads;
    if (one.is_busy)
      pairs.world.group(0).company().note_pause(machine::time_us - 100000, machine::time_us);
    if (!one.is_patient) {
      require(!receive_late(pairs, 1).empty(), "the next look finds the message");
      if (one.is_main_thread) continue;
      for (int i = 0; i < Patience::kMost; ++i) receive_late(pairs, P::kYields + 2);
      machine::is_main_thread = true;
      require_equal(receive_late(pairs, 500), "", "the main thread has not waited yet");
      continue;
    }
    constexpr int64_t kLateUs = Patience::kSpinUs + 1;
    require_equal(receive_late(pairs, Patience::kSpinUs), "", "a message within a millisecond");
    for (int i = 0; i < Patience::kMost / 2; ++i)
      require(receive_late(pairs, kLateUs).ends_with(" x yield"), "a later one");
    require_equal(receive_late(pairs, 1), "1 x yield", "a peer that was late mostly");
    require_equal(receive_late(pairs, 500), "", "and has come in time since");
  }
}

// A rank that others hold up while it spins rests, and does not yield.
void stop_spinning() {
  machine::clear();
  Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
  machine::is_main_thread = true;
  const Posted receive = pairs.receive(0, 1, 8);
  const LoneHost& host = pairs.world.host(0);
  P::on_load = [&, num_looks = 0](const uint64_t&) mutable {
    if (host.num_waits != 0 && ++num_looks == 3) machine::time_us += 2 * Company::kBurstUs;
  };
  machine::on_sleep = [&] { pairs.send(1, 0, 8); };
  require_equal(pairs.wait(0, receive).text, "no error", "a late message");
  P::on_load = {};
  require_start(machine::take_steps(), "1 x barrier");
}

// A rank that slept until a large message came gives its sender a moment to begin its wait. It does
// not sleep meanwhile, as a sender that does something else wakes nobody.
void wake_up_for_a_large_message() {
  constexpr size_t kNumBytes = size_t{4} << 20;
  machine::clear();
  Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
  for (const int rank : {0, 1}) pairs.engine(rank).allow_single_copy(false);
  const Posted receive = pairs.receive(0, 1, kNumBytes);
  std::vector<std::byte> data(kNumBytes, std::byte{3});
  machine::on_sleep = once([&] { pairs.start(1, data, true); });
  require_equal(pairs.wait(0, receive).text, "no error", "a large message");
  require_message(receive, 3);
  require_equal(machine::take_steps(),
                "64 x yield, 1 x barrier, 1 x sleep of 20000 at 0, 1 x wake, 1 x barrier, "
                "1 x nap of 100",
                "the steps of its wait");
}

// A wait for a small message moves a large one as well. Meanwhile other threads run, and the
// program may stop the wait.
void be_interrupted_in_a_large_message() {
  constexpr size_t kNumBytes = size_t{16} << 20;
  machine::clear();
  Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
  for (const int rank : {0, 1}) pairs.engine(rank).allow_single_copy(true);
  const Posted send = pairs.send(1, 0, kNumBytes, 5, 3);
  const Posted large = pairs.receive(0, 1, kNumBytes, 5), small = pairs.receive(0, 1, 8, 6);
  P::on_load = [&](const uint64_t& word) {  // behind the copy of each piece
    if (&word == &pairs.world.pad(0).poison.value) machine::time_us += 500;
  };
  LoneHost& host = pairs.world.host(0);
  host.is_interrupted = true;
  host.hook = [&] { require(host.num_waits > 0, "other threads of the program run"); };
  require_equal(pairs.wait(0, small).text, "interrupted", "a wait that moves a large message");
  P::on_load = {};
  require(large.transfer->moved_bytes < kNumBytes, "it is heard before all of that has come");
}

// No limit ends a message that moves.
void move_beyond_the_limit() {
  constexpr size_t kNumBytes = size_t{16} << 20;
  machine::clear();
  Pairs pairs(2, [](GroupOptions& options) { options.num_cpus = 2; });
  for (const int rank : {0, 1}) pairs.engine(rank).allow_single_copy(true);
  const Posted send = pairs.send(1, 0, kNumBytes, 5, 3), receive = pairs.receive(0, 1, kNumBytes);
  P::on_load = [&](const uint64_t& word) {
    if (&word == &pairs.world.pad(0).poison.value) machine::time_us += int64_t(kLimitS * 1e6);
  };
  require_equal(pairs.wait(0, receive).text, "no error", "a message that moves");
  P::on_load = {};
  require_message(receive, 3);
}

}  // namespace

int main() {
  spin_on();
  stop_spinning();
  be_interrupted_in_a_large_message();
  move_beyond_the_limit();
  wake_up_for_a_large_message();
}
