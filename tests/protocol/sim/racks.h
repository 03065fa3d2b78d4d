// SPDX-License-Identifier: Apache-2.0
// Groups of as many ranks as there can be. Every verb by every algorithm runs on them, with sends
// and receives. A rank that is missing is one of the last, which no word of 64 bits has a bit for.
#pragma once

#include <algorithm>

#include "failures.h"

namespace fastcoll::sim {

inline constexpr int kRack = kMaxGpuWorld;
inline constexpr int kBeyondBits = kRack - 64;  // ranks
static_assert(kBeyondBits > 0);
inline constexpr int kRackThreads = 3;  // few: each is a fiber; see for_own_ranks
static_assert(32 * kRackThreads >= kRack);

template <class P>
Step draw_rack_step(Random& random, const Choice& choice) {
  Step step;
  draw_kind<P>(random, step, choice);
  step.blocks = 1 + int(pick(random, 2));
  step.threads = kRackThreads;
  step.root = int(pick(random, kRack));
  // Where each rank has a part of the message, three segments; else more than there are slots.
  const bool splits =
      choice.verb == Verb::all_reduce && splits_message(choice.algorithm, choice.verb);
  const uint64_t most_tiles = splits ? 3 * uint64_t(kRack * step.blocks) : kSlots + 4;
  step.numel = pick(random, most_tiles * step.tile_bytes / step.elem_bytes());
  draw_tensors(random, step, kRack);
  return step;
}

// Some pairs, in both directions, far and near.
inline std::vector<Transfer> draw_rack_transfers(Random& random, const Step& step) {
  std::vector<Transfer> transfers;
  for (const int distance : {1 + int(pick(random, 3)), 30 + int(pick(random, 3)), kRack - 5})
    for (int from = 0; from < kRack; ++from)
      transfers.push_back(draw_transfer(random, step, from, (from + distance) % kRack));
  return transfers;
}

template <class P>
int run_racks(Schedule schedule, uint64_t num_seeds) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t seed) {
    Machine machine(kRack, schedule, random(), ~uint64_t{0});
    if (seed % 2 == 0) machine.start_before_wrap();
    std::vector<Choice> choices(std::begin(kChoices), std::end(kChoices));
    choices.push_back(kMeeting);
    std::shuffle(choices.begin(), choices.end(), random);
    for (const Choice& choice : choices) {
      const Step step = draw_rack_step<P>(random, choice);
      const bool has_result = step.algorithm != Algorithm::copy_engine;
      for (int rank = 0; rank < kRack; ++rank)
        enqueue<P>(machine, step, rank, has_result ? Checks::output : Checks::nothing);
    }
    if (std::is_same_v<P, Protocol>) {
      const Step step = draw_rack_step<P>(random, {Algorithm::direct, Verb::barrier, false});
      machine.enqueue_pairs(step, draw_rack_transfers(random, step));
    }
    return machine.run();
  });
}

template <class P>
int run_racks_absent(uint64_t num_seeds) {
  constexpr Choice kTried[] = {
      {Algorithm::one_shot, Verb::all_reduce, true}, {Algorithm::two_shot, Verb::all_reduce, false},
      {Algorithm::ring, Verb::all_reduce, false},    {Algorithm::direct, Verb::all_gather, false},
      {Algorithm::direct, Verb::broadcast, false},   kMeeting,
  };
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    const auto one_of_the_last = [&] { return kRack - 1 - int(pick(random, kBeyondBits)); };
    for (const Choice& choice : kTried) absent<P>(choice, random, kRack, one_of_the_last());
    return true;
  });
}

}  // namespace fastcoll::sim
