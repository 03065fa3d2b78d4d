// SPDX-License-Identifier: Apache-2.0
// Other errors of a call, word for word: ranks that left, and ranks that called something else. And
// how a group keeps its verdict. All ranks are in one thread (lone_world.h).
//
//   test_verdicts
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <thread>

#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

// ---- calls that differ --------------------------------------------------------------------------

const std::string kIn = " in group \"lone\": ";
const std::string kUndefined = ". Outputs of this call are undefined";

void compare_calls() {
  for (const bool traces : {false, true})
    for (const uint64_t num_before : {0, 1, 63, 64, 200})
      for (const uint64_t num_after : {0, 1, 62, 63, 64}) {
        World world(2, [&](GroupOptions& options) { options.traces = traces; });
        const Plan plans[] = {plan_of(Verb::all_reduce, 3), plan_of(Verb::broadcast, 4)};
        const auto both = [&](bool differs) {
          for (const int rank : {0, 1}) {
            world.host(rank).site = rank ? "r1.py" : "r0.py";
            world.enter(rank, differs ? plans[rank] : kBarrier);
          }
          for (const int rank : {0, 1}) world.leave(rank);
        };
        for (uint64_t i = 0; i < num_before; ++i) both(false);
        both(true);
        for (uint64_t i = 0; i < num_after; ++i) both(false);
        world.enter(1);
        const Seen seen = wait_in_vain(world);
        // An entry is written again after 64 calls: then the oldest that there is.
        const uint64_t last = num_before + num_after + 2;
        const bool is_there = last - num_before - 1 < kRingEntries;
        const uint64_t first = is_there ? num_before + 1 : last - kRingEntries + 1;
        const std::string found =
            is_there ? "call #" + std::to_string(first) + kIn +
                           "verb differs: all_reduce(SUM, int32, numel=3) on rank 0, "
                           "broadcast(int32, numel=4, src=0) on rank 1"
                     : "barrier #" + std::to_string(first) + kIn +
                           "the ranks made different calls before this one. Rank 0 called "
                           "barrier()";
        require_verdict(seen,
                        found + (traces ? ". Called at r0.py on rank 0, at r1.py on rank 1" : "") +
                            ". Found by rank 0" +
                            (last != first ? " in barrier() #" + std::to_string(last) : "") +
                            kUndefined,
                        ErrorKind::desync, 3);
      }
}

// A call's stamp holds all calls before it, also where the same call is made twice.
void compare_repeated_calls() {
  World world(2);
  const Plan one = plan_of(Verb::all_reduce, 3), two = plan_of(Verb::broadcast, 4);
  for (const auto& [first, second] : {std::pair{&one, &one}, {&one, &two}, {&two, &two}}) {
    world.enter(0, *first);
    world.enter(1, *second);
    if (first != &two)
      for (const int rank : {0, 1}) world.leave(rank);
  }
  const Seen seen = error_of([&] { world.group(0).wait_arrival(1); });
  require(seen.text.find("call #2 in group") == 0, seen.text);
}

// Only where both ranks tell where they made their calls.
void tell_sites() {
  for (const int named : {0, 1}) {
    World world(2, [](GroupOptions& options) { options.traces = true; });
    world.host(named).site = "a.py";
    world.enter(0, plan_of(Verb::all_reduce, 3));
    world.enter(1, plan_of(Verb::all_reduce, 4));
    const Seen seen = error_of([&] { world.group(0).wait_arrival(1); });
    require_part(seen.text, " on rank 1. Rank 0 called all_reduce(SUM, int32, numel=3). Found by ");
  }
}

// Between calls there is none that it was found in.
void compare_between_calls() {
  World world(2);
  world.arrive(0, plan_of(Verb::all_reduce, 3));
  world.arrive(1, plan_of(Verb::all_reduce, 4));
  for (const int rank : {0, 1}) world.leave(rank);
  for (const int rank : {0, 1}) world.pass(rank);
  const Seen seen = error_of([&] { world.group(0).time_one_way_flag(1, world.host(0)); });
  require_start(seen.text, "all_reduce #1 in group");
  require_part(seen.text, ". Found by rank 0" + kUndefined);
}

// An entry that can't be read is passed over, whosever it is.
void pass_over_damaged_entries() {
  for (const int damaged : {0, 1}) {
    World world(2);
    world.arrive(0, plan_of(Verb::all_reduce, 3));
    world.arrive(1, plan_of(Verb::all_reduce, 4));
    for (const int rank : {0, 1}) world.leave(rank);
    for (const int rank : {0, 1}) world.pass(rank);
    world.pad(damaged).ring[1].words[0] = ~uint64_t{0};
    world.enter(1);
    const Seen seen = wait_in_vain(world);
    const std::string start = "barrier #2" + kIn + "the ranks made different calls before this one";
    require_start(seen.text, start);
  }
}

// The text names every field that differs, and is the same whichever rank finds it.
void name_fields() {
  const auto changed = [](Verb verb, const std::function<void(Plan&)>& change) {
    Plan plan = plan_of(verb, 3);
    change(plan);
    return make_plan(plan);
  };
  const auto none = [](Plan&) {};
  const struct {
    Verb verb;
    std::function<void(Plan&)> one, other;
    const char *text, *call;
  } kCases[] = {
      {Verb::all_reduce, none, [](Plan& plan) { plan.numel = 4; },
       "numel differs: 3 on rank 0, 4 on rank 1", "all_reduce(SUM, int32, numel=3)"},
      {Verb::all_reduce, [](Plan& plan) { plan.op = Op::max; },
       [](Plan& plan) { plan.dtype = DType::float32; },
       "op differs: MAX on rank 0, SUM on rank 1; dtype differs: int32 on rank 0, float32 on rank "
       "1",
       "all_reduce(MAX, int32, numel=3)"},
      {Verb::broadcast, none, [](Plan& plan) { plan.root = 1; },
       "src differs: 0 on rank 0, 1 on rank 1", "broadcast(int32, numel=3, src=0)"},
      {Verb::reduce, [](Plan& plan) { plan.root = 1; }, none,
       "dst differs: 1 on rank 0, 0 on rank 1", "reduce(SUM, int32, numel=3, dst=1)"},
      {Verb::all_to_all, none, [](Plan& plan) { plan.splits = kCountedSplits; },
       "sizes of parts differ: equal on rank 0, split sizes given on rank 1",
       "all_to_all(int32, numel=3)"},
      {Verb::all_reduce, none,
       [](Plan& plan) { plan.splits = uint64_t{1} << kListHashBits | 12, plan.inlined = false; },
       "lists differ: no list on rank 0, 1 tensor with sizes #27788 on rank 1",
       "all_reduce(SUM, int32, numel=3)"},
      {Verb::all_reduce, none, [](Plan& plan) { plan.fast_numerics = true; },
       "numerics differ: same_bits on rank 0, fast on rank 1", "all_reduce(SUM, int32, numel=3)"},
      {Verb::all_reduce, none, [](Plan& plan) { plan.algorithm = Algorithm::two_shot; },
       "algorithm differs: one_shot on rank 0, two_shot on rank 1",
       "all_reduce(SUM, int32, numel=3)"},
      {Verb::all_reduce, none, [](Plan& plan) { plan.inlined = false; },
       "plan differs: one_shot inlined, numerics=same_bits on rank 0, one_shot in segments of "
       "32768 "
       "bytes, numerics=same_bits on rank 1",
       "all_reduce(SUM, int32, numel=3)"},
  };
  for (const auto& one : kCases)
    for (const int finder : {0, 1}) {
      World world(2);
      world.enter(1 - finder, changed(one.verb, finder ? one.one : one.other));
      world.enter(finder, changed(one.verb, finder ? one.other : one.one));
      const Seen seen = error_of([&] { world.group(finder).wait_arrival(1 - finder); });
      require_verdict(seen,
                      std::string(verb_name(one.verb)) + " #1" + kIn + one.text +
                          ". Rank 0 called " + one.call + ". Found by rank " +
                          std::to_string(finder) + kUndefined,
                      ErrorKind::desync, 3);
    }
}

// ---- ranks that left ----------------------------------------------------------------------------

void name_lost_ranks() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "sockets");
  for (const int pid : {0, 1 << 30}) {
    World world(2, [&](GroupOptions& options) {
      options.links[1].socket = ends[0];
      options.links[1].pid = pid;
    });
    world.all();
    if (ends[1] >= 0) close(ends[1]);
    ends[1] = -1;
    const std::string process =
        pid ? "process " + std::to_string(pid) : "its process, in another namespace,";
    require_verdict(
        wait_in_vain(world),
        "barrier() #2" + place(0, 2) + " lost rank 1: " + process +
            " ended or left the group; it had entered barrier() #1, not #2, more than T "
            "s ago",
        ErrorKind::peer_lost, 2);
    // It did its part first.
    World after(2, [&](GroupOptions& options) { options.links[1].socket = ends[0]; });
    after.host(0).hook = once([&] { after.arrive(1); });
    require_equal(wait_in_vain(after).text, "no error", "a rank that left behind its part");
    // It had told why.
    World broken(2, [&](GroupOptions& options) { options.links[1].socket = ends[0]; });
    broken.host(0).hook = [&] { broken.group(1).decide_verdict(ErrorKind::driver, "why", 2); };
    require_verdict(wait_in_vain(broken), "why", ErrorKind::driver, 2);
  }
  close(ends[0]);
}

// One rank is awaited, and another one that can't finish the call is gone.
void name_others_that_are_lost() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "sockets");
  close(ends[1]);
  const auto gone = [&](GroupOptions& options) { options.links[2].socket = ends[0]; };
  for (const bool enters : {false, true}) {
    World world(3, gone);
    world.all();
    if (enters) world.arrive(2);
    require_verdict(wait_in_vain(world),
                    "barrier() #2" + place(0, 3) +
                        " lost rank 2: its process, in another namespace, ended or left the "
                        "group; it had entered barrier() #" +
                        (enters ? "2," : "1, not #2,") + " more than T s ago",
                    ErrorKind::peer_lost, 4);
  }
  // It did its part first, so the call is one of the others.
  World after(3, gone);
  after.pass(2);
  const Seen late = wait_in_vain(after);
  require(late.kind == ErrorKind::timeout && late.ranks == 2, late.text);
  close(ends[0]);
}

// A rank that leaves a broken group sends a farewell to those that go on: shrink() reads it.
void keep_messages() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "sockets");
  World world(2, [&](GroupOptions& options) { options.links[1].socket = ends[0]; });
  world.host(0).hook = [&] { world.group(1).decide_verdict(ErrorKind::driver, "why", 2); };
  require(send(ends[1], "parts", 5, 0) == 5, "a message");
  close(ends[1]);
  require_verdict(wait_in_vain(world), "why", ErrorKind::driver, 2);
  char message[8];
  require(recv(ends[0], message, sizeof message, MSG_DONTWAIT) == 5, "it is there still");
  close(ends[0]);
}

void hear_farewells() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "sockets");
  World world(2, [&](GroupOptions& options) { options.links[1].socket = ends[0]; });
  leave_farewell(ends[1], ErrorKind::driver, 1, "no memory");
  close(ends[1]);
  require_verdict(
      wait_in_vain(world),
      "barrier() #1" + place(0, 2) + " lost rank 1, which could not finish init: no memory",
      ErrorKind::driver, 1);
  close(ends[0]);
}

void leave_calls() {
  World world(2);
  world.host(0).leaves = true;
  require_equal(wait_in_vain(world).text, "stepped out", "a host that leaves a wait");
  world.host(0).leaves = false;
  world.host(0).is_interrupted = true;
  require_equal(error_of([&] { world.group(0).wait_arrival(1); }).text, "interrupted", "a host");
  require(world.group(0).is_broken() && world.group(1).is_broken(), "an interrupted call");
  require_verdict(error_of([&] { world.group(1).check(); }),
                  "between calls, after #1" + place(0, 2) +
                      ": rank 0 was interrupted (a test) and left the call",
                  ErrorKind::peer_lost, 1);
}

// Interrupted before its line is free, a call is no longer the one that runs.
void leave_before_a_call() {
  World world(2);
  for (int i = 0; i < kDepth; ++i) world.pass(0);
  world.host(0).is_interrupted = true;
  require_equal(wait_in_vain(world).text, "interrupted", "a call that has not begun");
  require_equal(world.group(0).call_name(), "between calls, after #5" + place(0, 2), "its name");
}

// Messages that are refused before any word is shared.
void refuse_long_messages() {
  World world(2);
  std::vector<int32_t> data(kInlineMaxBytes);
  for (const uint64_t numel : {kInlineMaxBytes / 4 + 1, kInlineMaxBytes / 4}) {
    const Plan plan = plan_of(Verb::all_reduce, numel);
    const Seen seen = error_of(
        [&] { run(world.group(0), plan, data.data(), data.data(), world.host(0), kLimitS); });
    const bool fits = numel * 4 <= kInlineMaxBytes;
    require_equal(seen.kind, fits ? ErrorKind::timeout : ErrorKind::usage, seen.text);
    require_equal(world.group(0).call(), fits ? 1 : 0, "calls that began");
  }
}

// ---- verdicts -----------------------------------------------------------------------------------

void keep_verdicts() {
  World world(3);
  const auto verdict = [&](int rank) { return error_of([&] { world.group(rank).check(); }); };
  require_equal(verdict(0).text, "no error", "a group that is whole");
  P::set_sleepers(world.pad(1).sleep);
  require_equal(world.group(1).decide_verdict(ErrorKind::timeout, "first", 4), 2, "whose");
  require_equal(P::load_sleepers(world.pad(1).sleep), 0, "who sleeps is told");
  require_equal(P::load_wake(world.pad(1).sleep), 1, "who sleeps is woken");
  require_equal(world.group(2).decide_verdict(ErrorKind::driver, "second", 1), 2, "whose");
  require_equal(world.group(1).decide_verdict(ErrorKind::driver, "third", 1), 2, "whose");
  for (const int rank : {0, 1, 2}) {
    require(world.group(rank).is_broken(), "every rank of a broken group");
    require_verdict(verdict(rank), "first", ErrorKind::timeout, 4);
    require_verdict(error_of([&] { world.enter(rank); }), "first", ErrorKind::timeout, 4);
  }
  // A peer may write anything there.
  VerdictPage& page = world.pad(1).verdict;
  page.ranks = ~uint64_t{0};
  page.text[0] = '\n';
  for (const auto& [kind, shown] : {std::pair{0u, ErrorKind::usage}, {99u, kLastKind}}) {
    page.kind = kind;
    require_error(verdict(0), "\\nirst" + kOver, shown, 7);
  }
  page.length = ~0u;
  require_equal(int64_t(verdict(0).text.size()) >= int64_t(sizeof page.text), true, "a long text");
  P::store_relaxed(world.pad(0).poison.value, 1);  // of a rank that has written none
  require_error(verdict(0), "", ErrorKind::usage, 0);
  P::store_relaxed(world.pad(0).poison.value, 4);
  require_error(verdict(0), "group \"lone\": a poison word is damaged", ErrorKind::desync, 0);

  World waiting(2);  // is told at once, not when its time is over
  waiting.host(0).hook = [&] { waiting.group(1).decide_verdict(ErrorKind::driver, "why", 2); };
  const int64_t start_us = now_us();
  require_verdict(
      error_of([&] { run(waiting.group(0), kBarrier, nullptr, nullptr, waiting.host(0), 40); }),
      "why", ErrorKind::driver, 2);
  require(now_us() - start_us < 20000000, "a verdict that comes at once");

  World full(1);
  const std::string tale(3000, 't');
  full.group(0).decide_verdict(ErrorKind::driver, tale, 1);
  require_verdict(error_of([&] { full.group(0).check(); }),
                  tale.substr(0, sizeof page.text - kOver.size()), ErrorKind::driver, 1);
  World quoted(1);  // one that holds another verdict at its end
  quoted.group(0).decide_verdict(ErrorKind::driver, "no heap: why" + kOver, 1);
  require_verdict(error_of([&] { quoted.group(0).check(); }), "no heap: why", ErrorKind::driver, 1);
  World odd(2);
  require_verdict(error_of([&] { odd.group(0).fail_damaged("A test", 1, "nonsense"); }),
                  "A test: rank 1 published nonsense: its memory is damaged, or it runs another "
                  "build of fastcoll",
                  ErrorKind::desync, 2);
}

// The page of a verdict, which a thread is held up in writing for the first time.
struct HeldPage {
  static inline std::atomic<void*> page{nullptr};
  static inline std::atomic<bool> is_touched{false}, is_over{false};
  static void touch(int) {
    is_touched = true;
    for (int ms = 0; ms < 100 && !is_over; ++ms) usleep(1000);
    mprotect(page, 4096, PROT_READ | PROT_WRITE);
  }
};

// Two threads of a rank find an error at once: the second one waits until the text is whole.
void decide_in_two_threads() {
  static_assert(offsetof(Pad, verdict) / 4096 != offsetof(Pad, poison) / 4096);
  static_assert(offsetof(Pad, verdict) / 4096 != offsetof(Pad, sleep) / 4096);
  World world(1);
  HeldPage::page =
      reinterpret_cast<std::byte*>(&world.pad(0)) + offsetof(Pad, verdict) / 4096 * 4096;
  require(mprotect(HeldPage::page, 4096, PROT_NONE) == 0, "a page that is held");
  struct sigaction holds{}, before;
  holds.sa_handler = HeldPage::touch;
  sigaction(SIGSEGV, &holds, &before);
  std::thread first([&] { world.group(0).decide_verdict(ErrorKind::driver, "a text", 1); });
  while (!HeldPage::is_touched) usleep(1000);
  world.group(0).decide_verdict(ErrorKind::driver, "another one", 1);
  HeldPage::is_over = true;
  const Seen seen = error_of([&] { world.group(0).check(); });
  first.join();
  sigaction(SIGSEGV, &before, nullptr);
  require_verdict(seen, "a text", ErrorKind::driver, 1);
}

}  // namespace

int main() {
  compare_calls();
  compare_repeated_calls();
  tell_sites();
  compare_between_calls();
  pass_over_damaged_entries();
  name_fields();
  name_lost_ranks();
  name_others_that_are_lost();
  keep_messages();
  hear_farewells();
  leave_calls();
  leave_before_a_call();
  refuse_long_messages();
  keep_verdicts();
  decide_in_two_threads();
}
