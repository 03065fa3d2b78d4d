// SPDX-License-Identifier: Apache-2.0
// The error of a call that waited too long, word for word: the late ranks, and since when.
// All ranks are in one thread (lone_world.h).
//
//   test_timeouts
#include <thread>

#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

void require_timeout(World& world, const std::string& who, uint64_t ranks) {
  const Seen seen = wait_in_vain(world);
  const std::string call = std::to_string(world.group(0).call());
  require_verdict(seen, kName + call + place(0, world.size()) + " waited T s for " + who + kAdvice,
                  ErrorKind::timeout, ranks);
}

// ---- late ranks ---------------------------------------------------------------------------------

const std::string kLongAgo = "more than T s ago";

std::string never(int rank) { return "rank " + std::to_string(rank) + " (never called anything)"; }
// Of ranks that came to the first call, and to the first alone.
std::string unfinished(int rank, const std::string& when = kLongAgo) {
  return "rank " + std::to_string(rank) + " (entered barrier() #1, " + when +
         ", but did not finish its part)";
}
std::string missing(int rank, const std::string& state = "") {
  return "rank " + std::to_string(rank) + " (entered barrier() #1, not #2, " + kLongAgo + state +
         ")";
}
const std::string kHeldUp = "; rank 1 had to wait, too";

// Rank 0 waits after its peers, two of them or one, have come so far.
void require_late(const std::function<void(World&)>& come, const std::string& who, uint64_t ranks,
                  int size = 3, const std::function<void(GroupOptions&)>& change = {}) {
  World world(size, change);
  come(world);
  require_timeout(world, who, ranks);
}
void set_blocked(World& world, int rank) { P::store_relaxed(world.pad(rank).blocked.value, 1); }
void begin_wait(World& world, int rank) {  // in the first call
  world.pad(rank).ring[1].timed_call = 1;
  world.pad(rank).ring[1].wait_began_us = uint64_t(now_us());
}

void name_late_ranks() {
  const std::string nobody = never(1) + ", " + never(2);
  require_late([](World&) {}, nobody, 6);
  require_late([](World&) {}, nobody, 6, 3, [](GroupOptions& options) { options.first_call = 7; });
  require_late([](World& world) { world.all(), world.pass(2); }, missing(1), 2);
  // It came to the call, and gave nothing. Nor did a rank that is not awaited first.
  require_late([](World& world) { world.enter(1), world.pass(2); }, unfinished(1), 2);
  require_late([](World& world) { world.pass(1), world.enter(2); }, unfinished(2), 4);
  // A rank that gave its part may still wait for others.
  require_late([](World& world) { world.arrive(1), world.enter(2); },
               unfinished(1) + ", " + unfinished(2), 6);
}

void name_held_up_ranks() {
  // Rank 1 waits in a send, rank 2 does not. Where all of them wait, all late ranks are named.
  require_late([](World& world) { world.all(), set_blocked(world, 1); }, missing(2) + kHeldUp, 4);
  require_late([](World& world) { world.all(), set_blocked(world, 1), set_blocked(world, 2); },
               missing(1) + ", " + missing(2), 6);
  // The one awaited waits in its call, did so, or did so in the call before.
  for (const uint64_t ended_us : {0, 1})
    for (const uint64_t call : {1, 65}) {
      const bool waits = ended_us == 0 && call == 1;
      const auto come = [&](World& world) {
        world.enter(1), world.enter(2), begin_wait(world, 1);
        world.pad(1).ring[1].timed_call = call;
        world.pad(1).ring[1].wait_ended_us = ended_us;
      };
      const std::string first = unfinished(1, call == 1 ? "T s ago" : kLongAgo);
      require_late(come, waits ? unfinished(2) + kHeldUp : first + ", " + unfinished(2),
                   waits ? 4 : 6);
    }
  // All of them wait in the call: then the one awaited is named.
  const auto come = [](World& world) {
    for (const int rank : {1, 2}) world.enter(rank), begin_wait(world, rank);
  };
  require_late(come, unfinished(1, "T s ago") + "; rank 2 had to wait, too", 2);
}

void name_stopped_ranks() {
  const Stopped stopped;
  const auto link = [&](GroupOptions& options) { options.links[2].pid = stopped.pid; };
  const std::string is_stopped = "; process " + std::to_string(stopped.pid) + " is stopped";
  require_late([](World& world) { world.all(), set_blocked(world, 1), set_blocked(world, 2); },
               missing(2, is_stopped) + kHeldUp, 4, 3, link);
  // Through with the call, and stopped since.
  require_late([](World& world) { world.enter(1), world.pass(2), set_blocked(world, 1); },
               unfinished(2, kLongAgo + is_stopped) + kHeldUp, 4, 3, link);
}

void tell_when_ranks_came() {
  // While rank 0 waited.
  const auto come_late = [](World& world) { world.host(0).hook = once([&] { world.enter(1); }); };
  require_late(come_late, unfinished(1, "T s ago"), 2, 2);
  // In an earlier wait rank 0 saw it come, in this one not.
  const auto come_before = [](World& world) {
    world.host(0).hook = [&, num_looks = 0]() mutable {
      ++num_looks;
      if (num_looks == 1) world.enter(1);
      if (num_looks == 2) world.group(1).arrive_inlined(nullptr, 0);
    };
    run(world.group(0), kBarrier, nullptr, nullptr, world.host(0), 60);
    world.leave(1);
    world.host(0).hook = {};
  };
  require_late(come_before, missing(1), 2, 2);
  // A group that traces notes the time and the site.
  World traced(2, [](GroupOptions& options) { options.traces = true; });
  traced.host(1).site = "b.py:2";
  traced.enter(1);
  traced.host(0).site = "a.py:1";
  require_verdict(wait_in_vain(traced),
                  "barrier() #1" + place(0, 2) +
                      ", called at a.py:1, waited T s for rank 1 (entered barrier() #1 at b.py:2, "
                      "T s ago, but did not finish its part)" +
                      kAdvice,
                  ErrorKind::timeout, 2);
  // After the last look at it: the time is unknown.
  World hasty(2);
  hasty.host(0).hook = [&] { hasty.enter(1); };
  const Seen seen =
      error_of([&] { run(hasty.group(0), kBarrier, nullptr, nullptr, hasty.host(0), 0); });
  require_part(without_times(seen.text), "rank 1 (entered barrier() #1, but did not finish");
  // An entry that can't be read; and one that is written just now does not count.
  require_late([](World& world) { world.enter(1), world.pad(1).ring[1].words[0] = ~uint64_t{0}; },
               "rank 1 (entered call #1, more than T s ago, but did not finish its part)", 2, 2);
  require_late([](World& world) { world.enter(1), world.pad(1).ring[1].sequence = 1; }, never(1), 2,
               2);
}

// "entered barrier() #1, 0.2 s ago": since it came, not since rank 0 waits for it.
void tell_how_long_ago() {
  World world(2);
  const int64_t start_us = now_us();
  int64_t came_us = 0;
  world.host(0).hook = [&] {
    if (came_us != 0 || now_us() - start_us < 200000) return;
    came_us = now_us();
    world.enter(1);
  };
  const std::string text =
      error_of([&] { run(world.group(0), kBarrier, nullptr, nullptr, world.host(0), 0.4); }).text;
  const double most_s = double(now_us() - came_us) * 1e-6 + 0.01;
  const std::string start = "(entered barrier() #1, ";
  const size_t at = text.find(start);
  require(came_us != 0 && at != std::string::npos, text);
  require(std::stod(text.substr(at + start.size())) <= most_s, text);
  require(world.host(0).num_waits > 0, "the program is told that a wait gets long");
}

// A rank's notes of its own waits.
void note_waits() {
  World world(2);
  const auto entry = [&](uint64_t call) { return *read_operation<P>(world.pad(0), call); };
  int64_t came_us = 0;
  world.host(0).hook = [&] {
    if (came_us == 0) world.arrive(1);
    came_us = now_us();
  };
  const int64_t began_us = now_us();
  run(world.group(0), kBarrier, nullptr, nullptr, world.host(0), 60);
  const Operation first = entry(1);
  require(int64_t(first.wait_began_us) >= began_us && int64_t(first.wait_began_us) < came_us,
          "since when a rank waits");
  require(int64_t(first.wait_ended_us) >= came_us, "until when it waited");
  world.leave(1);
  // A second wait in one call has begun with the first.
  world.enter(0);
  for (uint64_t count = 1; count <= 2; ++count) {
    world.host(0).hook = [&, is_first = true]() mutable {
      const Operation waits = entry(2);
      require(waits.wait_began_us != 0 && waits.wait_ended_us == 0, "a rank that waits");
      if (is_first && count == 1) world.enter(1);
      if (is_first) world.group(1).publish_staged(count);
      is_first = false;
    };
    const uint64_t before_us = count == 2 ? entry(2).wait_began_us : 0;
    world.group(0).wait_staged(1, count);
    require(entry(2).wait_ended_us >= entry(2).wait_began_us, "a wait that is over");
    require(before_us == 0 || entry(2).wait_began_us == before_us, "a second wait");
  }
  require_equal(world.group(0).awaited_by(0), 0, "of a rank whose wait is over");
}

void find_awaited_ranks() {
  World world(4);
  world.all();
  world.enter(0);
  world.arrive(3);
  require_equal(world.group(3).awaited_by(0), 0, "of a rank that does not wait");
  Descriptor& entry = world.pad(0).ring[2];
  entry.wait_began_us = 5;
  entry.timed_call = 2;
  P::store_relaxed(world.pad(1).blocked.value, 1);
  require_equal(world.group(3).awaited_by(0), 4, "but for those that wait elsewhere");
  world.arrive(2);
  require_equal(world.group(3).awaited_by(0), 0, "all came, or wait elsewhere");
  P::store_relaxed(world.pad(1).blocked.value, 0);
  require_equal(world.group(3).awaited_by(0), 2, "the last one");
  entry.wait_ended_us = 6;
  require_equal(world.group(3).awaited_by(0), 0, "of a rank whose wait is over");
  entry.wait_ended_us = 0;
  entry.words[0] = ~uint64_t{0};
  require_equal(world.group(3).awaited_by(0), 0, "of an entry that can't be read");
}

// ---- between calls ------------------------------------------------------------------------------

struct Died {};

void wait_between_calls() {
  World world(2);
  world.all();
  // A call that ended by an exception of the host is no call that runs.
  world.host(0).hook = [] { throw Died{}; };
  try {
    wait_in_vain(world);
    require(false, "an exception of the host");
  } catch (const Died&) {
  }
  world.host(0).hook = {};
  const Seen seen = error_of([&] { world.group(0).time_one_way_flag(1, world.host(0)); });
  const std::string start = "between calls, after #2" + place(0, 2) + " waited T s for rank 1";
  require_start(without_times(seen.text), start);
  require_part(seen.text, ". Plan: none. If");
}

// A call that ran whole is over.
void wait_behind_a_call() {
  World world(2);
  world.pass(1);
  run(world.group(0), kBarrier, nullptr, nullptr, world.host(0), 60);
  const Seen seen = error_of([&] { world.group(0).time_one_way_flag(1, world.host(0)); });
  const std::string start = "between calls, after #1" + place(0, 2) + " waited T s for rank 1";
  require_start(without_times(seen.text), start);
}

// A step outside of calls has the group's limit, which may change.
void keep_limits() {
  const std::function<void(World&)> steps[] = {
      [](World& world) { world.group(0).time_one_way_flag(1, world.host(0)); },
      [](World& world) { world.group(0).try_single_copy(true, world.host(0)); }};
  for (const auto& step : steps) {
    for (const bool changes : {false, true}) {
      World world(2, [&](GroupOptions& options) { options.timeout_s = changes ? kLimitS : 0.2; });
      if (changes) world.group(0).set_limit(0.2);
      const int64_t start_us = now_us();
      const Seen seen = error_of([&] { step(world); });
      require(now_us() - start_us >= 200000, "the limit of the group");
      const std::string start = "between calls, after #0" + place(0, 2) + " waited T s for rank 1";
      require_start(without_times(seen.text), start);
    }
  }
}

void time_flags() {
  for (const int size : {1, 3}) {
    World world(size, [](GroupOptions& options) { options.timeout_s = 60; });
    for (int round = 0; round < 2; ++round) {
      double seconds[2] = {};
      std::thread other([&] {
        if (size > 1) seconds[1] = world.group(1).time_one_way_flag(50, world.host(1));
      });
      const int64_t start_us = now_us();
      seconds[0] = world.group(0).time_one_way_flag(50, world.host(0));
      const double took = double(now_us() - start_us) * 1e-6;
      other.join();
      require(size == 1 ? seconds[0] == 0 : seconds[0] > 0 && seconds[1] > 0, "a time");
      require(seconds[0] * 100 <= took * 1.01 + 1e-5, "no more than it took");
      for (int rank = 0; rank < std::min(size, 2); ++rank)
        require_equal(world.pad(rank).ping.value, size == 1 ? 0 : 50 * (round + 1), "flags");
    }
    if (size == 3)
      require(world.group(2).time_one_way_flag(50, world.host(2)) == 0, "a rank that has no part");
  }
}

}  // namespace

int main() {
  name_late_ranks();
  name_held_up_ranks();
  name_stopped_ranks();
  tell_when_ranks_came();
  tell_how_long_ago();
  note_waits();
  find_awaited_ranks();
  wait_between_calls();
  wait_behind_a_call();
  keep_limits();
  time_flags();
}
