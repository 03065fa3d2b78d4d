// SPDX-License-Identifier: Apache-2.0
// Kernels when a rank is missing, calls something else, or is in two calls at the same time. Every
// wait ends, every rank gets a verdict, outputs are NaN, and later kernels end at once.
#pragma once

#include "draw.h"

namespace fastcoll::sim {

inline constexpr uint64_t kLimitNs = 100000000, kLimitOfManyNs = 20 * kLimitNs;
inline constexpr int kWorld = 3;
inline constexpr uint64_t kMostDelayBits = 13;  // in the simulator's steps: longer than a call
inline constexpr int kLaterCalls = 20;
using Checks = Machine::Checks;
// A meeting of a call by copy engines: it moves nothing, but has the call's output.
inline constexpr Choice kMeeting{Algorithm::copy_engine, Verb::all_reduce, false};

[[noreturn]] inline void fail(const Step& step, const std::string& what) {
  std::fprintf(stderr, "WRONG: %s: %s\n", step.name().c_str(), what.c_str());
  std::exit(1);
}

[[noreturn]] inline void fail_verdict(const Step& step, int rank, const DeviceVerdict& verdict) {
  fail(step, "rank " + std::to_string(rank) + " has the verdict " + Machine::describe(verdict));
}

inline Step with_inputs(Step step, Random& random) {
  if (step.verb == Verb::all_to_all && step.even) step.splits = even_splits(step);
  draw_inputs(random, step);
  return step;
}

inline Step plain_step(const Choice& choice, Random& random, int world = kWorld) {
  Step step = step_of(choice, world);
  step.numel = 50;
  step.threads = 3;
  return with_inputs(step, random);
}

template <class P = Protocol>
void enqueue(Machine& machine, const Step& step, int rank, Checks checks) {
  machine.enqueue(step, rank, kernel_of<P>(step), checks);
}

// The verdict that every rank but `missing` must have; missing < 0: any rank may be named.
inline void check_verdicts(Machine& machine, const Step& step, DeviceError kind, int missing) {
  for (int rank = 0; rank < step.world(); ++rank) {
    if (rank == missing) continue;
    const DeviceVerdict& verdict = machine.verdict(rank);
    if (verdict.kind != uint32_t(kind) || (missing >= 0 && verdict.rank != missing))
      fail_verdict(step, rank, verdict);
    if (verdict.raiser != rank) continue;
    const bool differ = verdict.expected_stamp != verdict.seen_stamp;
    const Phase phase = Phase(verdict.phase);
    if (!differ && phase != Phase::count && phase != Phase::place)
      fail(step, "the verdict shows no stamps");
  }
}

// The rank `missing` makes the first call only. Before the limit is over, the hosts of those that
// wait for it have been told.
template <class P>
void absent(const Choice& choice, Random& random, int world, int missing) {
  const uint64_t limit_ns = world > kWorld ? kLimitOfManyNs : kLimitNs;
  Machine machine(world, Schedule::uniform, random(), limit_ns);
  Step step = plain_step(choice, random, world);
  step.root = int(pick(random, uint64_t(world)));
  for (int rank = 0; rank < world; ++rank)
    draw_apart(random, step, rank, step.places[size_t(rank)]);
  step = with_inputs(step, random);
  const bool has_result = step.algorithm != Algorithm::copy_engine;
  for (int rank = 0; rank < world; ++rank)
    enqueue<P>(machine, step, rank, has_result ? Checks::output : Checks::nothing);
  for (int rank = 0; rank < world; ++rank)
    for (int call = 0; call < kLaterCalls && rank != missing; ++call)
      enqueue<P>(machine, step, rank, Checks::nothing);
  if (!machine.run()) fail(step, "a wait without a limit");
  check_verdicts(machine, step, DeviceError::timeout, missing);
  for (int rank = 0; rank < world; ++rank) {
    if (machine.verdict(rank).raiser == rank && rank != missing && !machine.is_late(rank, missing))
      fail(step, "rank " + std::to_string(rank) + " did not tell its host of a long wait");
    for (int peer = 0; peer < world; ++peer)
      if (peer != missing && machine.is_late(rank, peer))
        fail(step, "rank " + std::to_string(peer) + " was called late, but waited itself");
  }
  // Two limits where a root does not wait: it finds out in its next call.
  if (machine.elapsed_ns() > limit_ns * 5 / 4)
    fail(step, "took " + std::to_string(machine.elapsed_ns()) + " ns");
  for (int rank = 0; rank < world; ++rank) {
    if (rank == missing || (step.verb == Verb::broadcast && rank == step.root)) continue;
    const reference::Bytes& output = machine.output(rank);
    for (size_t i = 0; i + 4 <= output.size(); i += 4) {
      uint32_t code;
      std::memcpy(&code, &output[i], 4);
      if (code != 0x7fc00000) fail(step, "an output that is not NaN");
    }
  }
}

// One rank makes the first call only. There is no limit: the hosts of the others give up. Every
// kernel ends, a later one at its start, and tells of the rank that its host has lost.
template <class P>
void aborted(const Choice& choice, Random& random) {
  const int missing = int(pick(random, kWorld));
  Machine machine(kWorld, Schedule::uniform, random(), ~uint64_t{0});
  const Step step = plain_step(choice, random);
  for (int call = 0; call <= kLaterCalls; ++call)
    for (int rank = 0; rank < kWorld; ++rank)
      if (call == 0 || rank != missing)
        machine.enqueue(step, rank, kernel_of<P>(step), Checks::nothing);
  for (int rank = 0; rank < kWorld; ++rank) {
    if (rank == missing) continue;
    machine.delay(rank, 1, pick(random, uint64_t{1} << kMostDelayBits));
    machine.give_up(rank, 1, missing);
  }
  if (!machine.run()) fail(step, "a wait that did not end when its host gave up");
  for (int rank = 0; rank < kWorld; ++rank) {
    const DeviceVerdict& verdict = machine.verdict(rank);
    const bool told = verdict.kind == uint32_t(DeviceError::peer_lost) && verdict.rank == missing &&
                      verdict.raiser == missing;
    if (rank == missing ? verdict.kind != 0 : !told) fail_verdict(step, rank, verdict);
  }
}

// One rank calls `other`, then all repeat the call of the rest twice. No limit: it must be seen.
inline void mismatch(const Step& step, const Step& other, Random& random) {
  Machine machine(kWorld, Schedule::uniform, random(), ~uint64_t{0});
  const int odd = int(pick(random, kWorld));
  for (int call = 0; call < 3; ++call)
    for (int rank = 0; rank < kWorld; ++rank)
      enqueue(machine, call == 0 && rank == odd ? other : step, rank, Checks::nothing);
  if (!machine.run()) fail(step, "a difference that nobody saw: " + other.name());
  check_verdicts(machine, step, DeviceError::desync, -1);
}

// One rank gives its tensor a place that is partly outside of its region. Every rank that would use
// the place must see that, and no rank may read there.
template <class P>
void misplaced(const Choice& choice, bool is_output, Random& random) {
  Step step = plain_step(choice, random);
  const int liar = int(pick(random, kWorld));
  const bool to_root = choice.verb == Verb::reduce || choice.verb == Verb::gather;
  step.root = to_root ? (liar + 1) % kWorld : liar;
  step = with_inputs(step, random);
  Machine machine(kWorld, Schedule::uniform, random(), ~uint64_t{0});
  const std::function<void(DeviceCall&)> lie = [&](DeviceCall& call) {
    (is_output ? call.output_location : call.input_location) =
        GpuLocation::encode(kHeapBytes - kPackBytes);
  };
  for (int rank = 0; rank < kWorld; ++rank) {
    const std::function<void(DeviceCall&)> none;
    machine.enqueue(step, rank, kernel_of<P>(step), Checks::nothing, rank == liar ? lie : none);
  }
  if (!machine.run()) fail(step, "a wait without a limit");
  for (int rank = 0; rank < kWorld; ++rank) {
    const DeviceVerdict& verdict = machine.verdict(rank);
    // A rank that needs no data of its peers may be through before they see it.
    if (verdict.kind == 0 && (rank == liar || (to_root && rank != step.root))) continue;
    if (verdict.kind != uint32_t(DeviceError::desync) || verdict.rank != liar ||
        (verdict.raiser == rank && Phase(verdict.phase) != Phase::place))
      fail_verdict(step, rank, verdict);
  }
}

// One rank's second call is in a stream that does not wait for the first. Whether both run at the
// same time is chance: then all must get the error, else both must be right. All its calls are
// alike, so that their order does not matter. True: they did.
template <class P>
bool overlap(const Choice& choice, Random& random) {
  const Step step = plain_step(choice, random);
  const int odd = int(pick(random, kWorld));
  Machine machine(kWorld, Schedule::uniform, random(), ~uint64_t{0});
  machine.delay(odd, 1, pick(random, uint64_t{1} << pick(random, kMostDelayBits)));
  for (int call = 0; call < 2; ++call)
    for (int rank = 0; rank < kWorld; ++rank)
      machine.enqueue(step, rank, kernel_of<P>(step), Checks::unless_failed, nullptr,
                      rank == odd ? call : 0);
  if (!machine.run()) fail(step, "two calls at the same time, which nobody saw");
  bool seen = false;
  for (int rank = 0; rank < kWorld; ++rank) {
    const DeviceVerdict& verdict = machine.verdict(rank);
    if (verdict.kind == 0) continue;
    seen = true;
    if (verdict.kind != uint32_t(DeviceError::usage) || verdict.rank != odd ||
        verdict.raiser != odd || (rank == odd && Phase(verdict.phase) != Phase::turn))
      fail_verdict(step, rank, verdict);
  }
  return seen;
}

template <class P>
int run_overlaps(uint64_t num_seeds) {
  for (const Choice& choice : kChoices) {
    uint64_t seen = 0;
    for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
      Random random(seed);
      seen += overlap<P>(choice, random);
    }
    if (seen == 0 || seen == num_seeds) {
      std::fprintf(stderr, "WRONG: %s %s%s: %llu of %llu calls met another one\n",
                   algorithm_name(choice.algorithm), choice.ll ? "ll " : "", verb_name(choice.verb),
                   static_cast<unsigned long long>(seen),
                   static_cast<unsigned long long>(num_seeds));
      return 1;
    }
  }
  std::printf("ok\n");
  return 0;
}

template <class P>
int run_misplaced(uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    for (const Choice& choice : kChoices) {
      const bool by_switch = choice.algorithm == Algorithm::multimem;
      const bool only_pushes = by_switch && !verb_reduces(choice.verb);
      const bool pushes = only_pushes || (choice.verb == Verb::all_reduce &&
                                          (choice.algorithm == Algorithm::two_shot || by_switch));
      if (choice.ll || choice.verb == Verb::barrier || choice.algorithm == Algorithm::ring ||
          choice.algorithm == Algorithm::chain)
        continue;  // they say no place
      if (!only_pushes) misplaced<P>(choice, false, random);
      if (pushes) misplaced<P>(choice, true, random);
    }
    return true;
  });
}

template <class P>
int run_aborted(uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    for (const Choice& choice : kChoices) aborted<P>(choice, random);
    return true;
  });
}

template <class P>
int run_absent(uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    for (const Choice& choice : kChoices)
      absent<P>(choice, random, kWorld, int(pick(random, kWorld)));
    absent<P>(kMeeting, random, kWorld, int(pick(random, kWorld)));
    return true;
  });
}

inline int run_mismatch(uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    Step shorter = plain_step(kMeeting, random);
    shorter.numel /= 2;
    mismatch(plain_step(kMeeting, random), with_inputs(shorter, random), random);
    for (const Choice& choice : kChoices) {
      const Step step = plain_step(choice, random);
      Step longer = step;
      longer.numel = choice.verb == Verb::barrier ? 1 : step.numel / 2;
      mismatch(step, with_inputs(longer, random), random);
      Step wider = step;
      wider.blocks = 2;
      mismatch(step, wider, random);
      // LL against staged: they wait on words where no stamps meet.
      mismatch(step, plain_step(kChoices[step.ll ? 1 : 0], random), random);
      if (choice.verb == Verb::broadcast) {
        Step rooted = step;
        rooted.root = 1;
        mismatch(step, with_inputs(rooted, random), random);
      }
      if (choice.verb == Verb::all_to_all && !choice.ll) {
        // The same plan on all ranks, but one has other counts for ranks 0 and 1.
        Step counted = step, miscounted = step;
        counted.even = miscounted.even = false;
        for (auto& row : miscounted.splits) {
          --row[0];
          ++row[1];
        }
        mismatch(counted, with_inputs(miscounted, random), random);
      }
    }
    return true;
  });
}

}  // namespace fastcoll::sim
