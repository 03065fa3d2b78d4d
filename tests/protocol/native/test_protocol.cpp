// SPDX-License-Identifier: Apache-2.0
// The protocol under stress: random sequences of verbs, algorithms, sizes and placements, and
// random pauses at every shared word. Ranks are threads on ONE shared mapping. ThreadSanitizer
// shadows virtual addresses: with a mapping per rank it would see no race.
//
//   test_protocol VARIANT [num_seeds [timeout_s [first_call]]]
//
// `correct` must pass. The other variants have one planted bug each (planted.h) and must not: they
// show that this test can see such a bug.
#include <sched.h>

#include <random>

#include "cpu/halves.h"
#include "hand_programs.h"
#include "random_steps.h"
#include "step_data.h"
#include "thread_ranks.h"

using namespace fastcoll;
using namespace steps;

namespace {

thread_local std::minstd_rand pause_random;

template <class Base>
struct Perturbed : Base {
  static void pause() {
    const auto dice = pause_random() % 256;
    if (dice < 8) sched_yield();
    else if (dice == 8)
      std::this_thread::sleep_for(std::chrono::microseconds(pause_random() % 200));
  }
  static void arrive(uint64_t& word, uint64_t value) {
    const Which which = word_of(&word);
    const bool only_grows = which == Which::staged || which == Which::reduced ||
                            which == Which::done || which == Which::signals;
    if (only_grows && int64_t(value - word) < 0) {
      std::fprintf(stderr, "WRONG: a word shrinks: %s\n", kWordNames[int(which)]);
      std::exit(1);
    }
    pause();
    Base::arrive(word, value);
    pause();
  }
  static uint64_t load_acquire(const uint64_t& word) {
    const uint64_t value = Base::load_acquire(word);
    pause();
    return value;
  }
  // Copies into staging memory go past the caches after some calls, on every machine.
  static bool is_slow(uint64_t, uint64_t) { return pause_random() % 2 == 0; }
};

constexpr int kCallsPerSeed = 40;

// Memory of all ranks, shared by the threads.
struct Machine {
  explicit Machine(int world_size)
      : memory(zeroed_pages(size_t(world_size) * kRegionBytes)),
        regions(regions_in(memory, world_size, kRegionBytes)),
        arenas(world_size, kArenaBytes) {
    set_words(regions[0], kRegionBytes);
  }
  const Memory memory;
  const std::vector<std::byte*> regions;
  const Pieces arenas;
};

const std::string kReason = "reason of rank ";

template <class P>
std::string verdict_of(const Group<P>& group) {
  try {
    group.check();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

// Some ranks fail at once, each for a reason of its own and in two threads; the others wait. All
// get one verdict.
template <class P>
void break_together(Group<P>& group, uint64_t seed, Host& host) {
  const uint64_t rank = uint64_t(group.rank());
  if (mix64(seed + rank) % 2 || seed % uint64_t(group.world_size()) == rank) {
    const std::string reason = kReason + std::to_string(rank);
    const auto decide = [&] { group.decide_verdict(ErrorKind::peer_lost, reason, 0); };
    std::thread other(decide);
    decide();
    const std::string verdict = verdict_of(group);
    other.join();
    if (verdict.starts_with(kReason)) group.check();
    std::fprintf(stderr, "WRONG: the verdict is \"%s\"\n", verdict.c_str());
    std::exit(1);
  }
  Plan plan;
  plan.inlined = true;
  plan.segment_bytes = uint32_t(kLeastSegmentBytes);
  run(group, make_plan(plan), nullptr, nullptr, host);
}

// Where nothing may have to be waited for.
class NoWait : public Host {
  void blocking() override {
    std::fprintf(stderr, "WRONG: a wait in what needs none\n");
    std::exit(1);
  }
};

// In two halves, where there are two, or at once; each rank as it likes.
template <class P>
void run_somehow(Call<P>& call, Host& host, std::minstd_rand& random) {
  NoWait no_wait;
  if (random() % 2 || !begin_half(call, no_wait, -1)) return run(call, host, -1);
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  finish(call, may_finish(call) ? no_wait : host);
}

template <class P>
void run_rank(const Machine& machine, int world_size, int rank, const std::vector<Step>& steps,
              uint64_t seed, double timeout_s, uint64_t first_call, std::string& verdict) {
  std::minstd_rand random(uint32_t(mix64(seed * 64 + uint64_t(rank))));
  pause_random.seed(random());
  GroupOptions options = options_of(rank, machine.regions, timeout_s);
  options.first_call = first_call;
  Group<Perturbed<P>> group(options);
  group.arenas().push_back(arena_of(machine.arenas.bases, kArenaBytes));

  Host host;
  Buffers buffers;
  std::vector<int32_t> apart;
  try {
    for (const Step& step : steps) {
      place(buffers, step, world_size, rank, machine.arenas.bases[size_t(rank)], random);
      apart.assign(random() % 2 ? (step.plan.numel + 16) * size_t(world_size) : 0, 0);
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      if (step.plan.splits == kCountedSplits || !step.numels.empty()) {
        const Parts parts = parts_of(step, world_size, rank, buffers, apart);
        Call<Perturbed<P>> call{group, step.plan, nullptr, nullptr, &parts};
        run_somehow(call, host, random);
      } else if (num_tensors(step.plan.splits) != 0) {
        const Tensors tensors(step, world_size, buffers);
        Call<Perturbed<P>> call{group, step.plan, nullptr, nullptr, nullptr, &tensors.list};
        run_somehow(call, host, random);
        tensors.put_together(buffers.output);
      } else if (step.plan.numel != 0 && takes_strided(step.plan) && random() % 3 == 0) {
        const size_t in = step.plan.numel * num_input_parts(step.plan.verb, world_size);
        const size_t out = step.plan.numel * num_output_parts(step.plan.verb, world_size);
        const Apart input(buffers.input, in, random() % 2),
            output(buffers.output, out, random() % 2);
        const Apart& result = buffers.input == buffers.output ? input : output;
        const StridedPair pair{input.strided, result.strided};
        Call<Perturbed<P>> call{group, step.plan, nullptr, nullptr, nullptr, nullptr, &pair};
        run_somehow(call, host, random);
        result.put_together(buffers.output);
        require(input.gaps_are_whole() && output.gaps_are_whole(), step, world_size, rank, 0);
      } else {
        Call<Perturbed<P>> call{group, step.plan, reinterpret_cast<std::byte*>(buffers.input),
                                reinterpret_cast<std::byte*>(buffers.output)};
        const Parts parts = parts_of(step, world_size, rank, buffers, apart);
        if (takes_parts(step.plan) && random() % 2) {
          call.input = nullptr;
          if (!verb_reduces(step.plan.verb)) call.output = nullptr;
          call.parts = &parts;
        }
        const Program program = program_of(step.plan.verb, world_size, rank, step.plan.root);
        call.program = &program;
        run_somehow(call, host, random);
      }
      verify(step, world_size, rank, buffers.output);
    }
    if (seed % 4 == 0) break_together(group, seed, host);
  } catch (const Failure& failure) {
    verdict = failure.what();
    if (verdict.starts_with(kReason)) return;  // perhaps while still in the last call
    std::fprintf(stderr, "FAILED: rank %d: %s\n", rank, failure.what());
    std::exit(1);
  }
}

template <class P>
int run_all(uint64_t num_seeds, double timeout_s, uint64_t first_call) {
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    copy_ways.answers_in_place = seed % 4 != 3;
    copy_ways.in_long_rings = seed % 8 < 4;
    std::mt19937_64 random(seed);
    constexpr int kWorlds[] = {2, 3, 4, 7, 1};
    const int world_size = kWorlds[random() % 32 == 0 ? 4 : random() % 4];
    std::vector<Step> steps;
    for (int i = 0; i < kCallsPerSeed; ++i) steps.push_back(draw_step(random, world_size));
    Machine machine(world_size);
    std::vector<std::string> verdicts(static_cast<size_t>(world_size));
    run_ranks(world_size, [&](int rank) {
      run_rank<P>(machine, world_size, rank, steps, seed, timeout_s, first_call,
                  verdicts[size_t(rank)]);
    });
    for (const std::string& verdict : verdicts)
      if (verdict != verdicts[0] || (seed % 4 == 0 && verdict.empty())) {
        std::fprintf(stderr, "WRONG: one rank raised \"%s\", another \"%s\"\n", verdicts[0].c_str(),
                     verdict.c_str());
        return 1;
      }
  }
  std::printf("ok: %d calls on each of %d seeds\n", kCallsPerSeed, int(num_seeds));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_stress(argc, argv, []<class P>(P, auto... limits) { return run_all<P>(limits...); });
}
