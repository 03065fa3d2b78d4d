// SPDX-License-Identifier: Apache-2.0
// Each step of a wait in a call: how long a rank spins, and when it yields and sleeps. Also when it
// looks for the reason or for a better CPU. The operating system is lone_machine.h.
//
//   test_waits
#include "lone_machine.h"
#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

constexpr int64_t kPatrolUs = 1000;

// Rank 0 waits in its second call for rank 1, which was on this CPU or another one.
void wait_in_calls() {
  for (const bool is_crowded : {false, true})
    for (const uint32_t peer_cpu : {0u, 1u})
      for (const bool has_barrier : {true, false}) {
        machine::clear();
        machine::has_barrier = has_barrier;
        World world(2, [&](GroupOptions& options) { options.num_cpus = is_crowded ? 1 : 2; });
        machine::cpu = peer_cpu;
        world.arrive(1);
        machine::cpu = 0;
        run(world.group(0), kBarrier, nullptr, nullptr, world.host(0), kLimitS);
        world.pad(1).sleep.wake = 9;
        const bool is_here = peer_cpu == 0;
        const uint64_t& word = world.pad(1).arrive[2].slot;
        Counter looks(P::on_load, word);
        std::vector<int> seen;
        machine::on_yield = machine::on_sleep = [&] { seen.push_back(looks.count); };
        std::vector<int64_t> patrols;
        const int64_t start_us = machine::time_us;
        world.host(0).hook = [&] { patrols.push_back(machine::time_us - start_us); };
        require_equal(wait_in_vain(world).kind, ErrorKind::timeout, "a limit");
        const int num_spins = is_crowded ? P::kSpinsIfCrowded : P::kSpins;
        require_equal(seen[0], 1 + (is_here ? 0 : num_spins), "looks before the first yield");
        for (int i = 1; i <= P::kYields; ++i)
          require_equal(seen[size_t(i)] - seen[size_t(i - 1)],
                        1 + (is_here && i <= 4 ? 0 : P::kSpinsPerYield) + (i == P::kYields),
                        "looks from one yield to the next");
        const std::string sleep = has_barrier ? "20000" : "2000";
        const std::string steps = machine::take_steps();
        // 640 us of yields, then a sleep. Nobody ends it, so another sleep follows.
        const std::string slept = "1 x barrier, 1 x sleep of " + sleep + " at 9, ";
        require_start(steps, "64 x yield, " + slept + slept);
        require_equal(patrols[0], 640 + std::stoi(sleep), "the first look for the reason");
        require_equal(patrols[1] - patrols[0], std::stoi(sleep), "and the next one");
      }
}

// The reason is looked for exactly a millisecond after the wait got long, and after the last look.
void patrol_calls() {
  machine::clear();
  World world(2);
  std::vector<int64_t> patrols;
  const int64_t start_us = machine::time_us;
  machine::on_yield = [&] { machine::time_us += 1000 / P::kYields - machine::kYieldUs; };  // 15 us
  machine::on_barrier = [&, count = 0]() mutable {
    ++count;
    world.pad(1).sleep.wake += 1;  // a wake that comes first: no sleep
    if (count == 1) machine::time_us += 40;
  };
  world.host(0).hook = [&] { patrols.push_back(machine::time_us - start_us); };
  wait_in_vain(world);
  require(patrols.size() > 2 && patrols[0] == 1960, "the first look");
  require(patrols[1] == patrols[0] + 1920, "the second one");
  World exact(2);
  patrols.clear();
  machine::on_barrier = {};
  machine::on_yield = once([] { machine::time_us += 360; });  // 1000 us after 64 yields
  const int64_t begin_us = machine::time_us;
  exact.host(0).hook = [&] { patrols.push_back(machine::time_us - begin_us); };
  wait_in_vain(exact);
  require_equal(patrols[0], kPatrolUs, "a look");
}

// A word that has changed ends the wait before its next step.
void end_waits() {
  for (const int when : {0, 1, 2}) {
    machine::clear();
    World world(2);
    const auto come = once([&] { world.arrive(1); });
    if (when == 0) machine::on_yield = come;
    if (when == 1) machine::on_barrier = come;
    if (when == 2) machine::on_sleep = come;
    require_equal(wait_in_vain(world).text, "no error", "a rank that comes");
    const char* steps[] = {"1 x yield", "64 x yield, 1 x barrier, 1 x wake",
                           "64 x yield, 1 x barrier, 1 x sleep of 20000 at 0, 1 x wake"};
    require_equal(machine::take_steps(), steps[when], "the steps of a wait");
  }
}

// A peer that gives its part and ends the group, after this rank has looked, has given it. Without
// its part the verdict counts.
void take_last_parts() {
  for (const bool gives : {true, false}) {
    machine::clear();
    World world(2);
    const uint64_t& noted = world.pad(0).ring[1].wait_ended_us;  // written behind the last look
    P::on_store = [&, is_first = true](const uint64_t& word) mutable {
      if (&word != &noted || !std::exchange(is_first, false)) return;
      if (gives) world.pass(1);
      world.group(1).decide_verdict(ErrorKind::driver, "why", 2);
    };
    const Seen seen = wait_in_vain(world);
    P::on_store = {};
    if (gives) require_equal(seen.text, "no error", "a rank that gave its part");
    else require_verdict(seen, "why", ErrorKind::driver, 2);
  }
}

// Rank 0 waits for rank 1, which comes from a CPU so many looks after the wait got long. A look
// takes 1 us. Returns whether rank 0 gave its CPU away.
bool await_late(World& world, int64_t late_us, uint32_t peer_cpu = 1) {
  world.enter(0);
  const LoneHost& host = world.host(0);
  const uint64_t& word = world.pad(1).arrive[world.group(0).call() % P::kLines].slot;
  P::on_load = [&, seen = host.num_waits, left_us = late_us](const uint64_t& touched) mutable {
    if (&touched != &word || host.num_waits == seen) return;
    ++machine::time_us;
    if (--left_us != 0) return;
    machine::cpu = peer_cpu;
    world.arrive(1);
    machine::cpu = 0;
  };
  world.group(0).wait_arrival(1);
  P::on_load = {};
  for (const int rank : {0, 1}) world.leave(rank);
  const std::string steps = machine::take_steps();
  return steps.find("yield") != std::string::npos || steps.find("barrier") != std::string::npos;
}

// A rank spins for a millisecond before it yields. A thread beside the main one does not, nor
// does a rank beside other programs. Nor does one on its peer's CPU, nor one whose group has fewer
// CPUs than ranks. OpenMP's threads do not count.
void spin_on() {
  struct Case {
    bool is_main_thread;
    int num_cpus, num_threads;
    bool is_busy;
    uint32_t peer_cpu;
    bool is_patient;
  };
  for (const Case& one : {Case{true, 2, 1, false, 1, true}, Case{true, 4, 2, false, 1, true},
                          Case{false, 2, 1, false, 1, false}, Case{true, 1, 1, false, 1, false},
                          Case{true, 2, 2, false, 1, true}, Case{true, 2, 1, true, 1, false},
                          Case{true, 2, 1, false, 0, false}}) {
    machine::clear();
    World world(2, [&](GroupOptions& options) { options.num_cpus = one.num_cpus; });
    machine::is_main_thread = one.is_main_thread;
    machine::num_threads = one.num_threads;
    await_late(world, 1, one.peer_cpu);  // so rank 0 knows rank 1's CPU
    // A rank that sleeps looks once.
    const int64_t most_us = one.is_busy ? 1 : Patience::kSpinUs;
    if (one.is_busy)
      world.group(0).company().note_pause(machine::time_us - 100000, machine::time_us);
    require_equal(await_late(world, most_us, one.peer_cpu), !one.is_patient,
                  "a peer within a millisecond");
    if (!one.is_busy) require(await_late(world, most_us + 1, one.peer_cpu), "a later one");
  }
}

// A rank that others hold up while it spins gives its CPU away, and does not yield.
void stop_spinning() {
  machine::clear();
  World world(2, [](GroupOptions& options) { options.num_cpus = 2; });
  machine::is_main_thread = true;
  await_late(world, 1);
  world.enter(0);
  const LoneHost& host = world.host(0);
  P::on_load = [&, seen = host.num_waits, is_first = true](const uint64_t&) mutable {
    if (host.num_waits != seen && std::exchange(is_first, false))
      machine::time_us += 2 * Company::kBurstUs;
  };
  machine::on_sleep = [&] { world.arrive(1); };
  world.group(0).wait_arrival(1);
  P::on_load = {};
  require_start(machine::take_steps(), "1 x barrier");
}

// Once most of the last waits were longer, a rank yields at once, and once they are not, it spins.
void lose_patience() {
  machine::clear();
  World world(2, [](GroupOptions& options) { options.num_cpus = 2; });
  machine::is_main_thread = true;
  await_late(world, 1);
  const auto spins = [&] { return !await_late(world, 500); };
  constexpr int64_t kLateUs = Patience::kSpinUs + 1;
  for (int i = 0; i < Patience::kMost / 2; ++i) await_late(world, kLateUs);
  require(spins(), "as many long waits as short ones");
  for (int i = 0; i < 2; ++i) await_late(world, kLateUs);
  require(!spins() && spins(), "one more, and then a short one");
  for (int i = 0; i < 3 * Patience::kMost; ++i) await_late(world, kLateUs);
  for (int i = 0; i < Patience::kMost / 2; ++i) require(!spins(), "a peer that was always late");
  require(spins(), "and has come in time as often");
}

// In long waits of calls, every 50 ms at most, ranks look whether to move to another CPU.
void spread_ranks() {
  machine::clear();
  World world(3);
  const auto wait_long = [&] {
    machine::cpu = 4;
    world.enter(0);
    machine::on_yield = once([&] {
      for (const int rank : {1, 2}) {
        machine::cpu = uint32_t(4 + rank);
        world.arrive(rank);
      }
      machine::cpu = 4;
    });
    for (const int peer : {1, 2}) world.group(0).wait_arrival(peer);
    for (const int rank : {0, 1, 2}) world.leave(rank);
    return machine::take_steps();
  };
  const int64_t start_us = machine::time_us;
  for (int i = 0; i < 2; ++i) require_equal(wait_long(), "1 x yield", "too soon");
  machine::time_us = start_us + 50000;
  require_equal(wait_long(), "1 x spread of rank 0: 4 5 6, 1 x yield", "50 ms later");
  require_equal(wait_long(), "1 x yield", "not again");
}

}  // namespace

int main() {
  wait_in_calls();
  patrol_calls();
  end_waits();
  take_last_parts();
  spin_on();
  stop_spinning();
  lose_patience();
  spread_ranks();
}
