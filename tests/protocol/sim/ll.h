// SPDX-License-Identifier: Apache-2.0
// The longest messages that travel in LL packs: all channels, and areas that are full.
#pragma once

#include <cstdio>

#include "draw.h"

namespace fastcoll::sim {

inline constexpr int kLlThreads = 8;  // each is a fiber, and has up to 64 packs
inline constexpr int kLlCalls = 3;    // the third one meets the first one's packs

constexpr Choice kLlChoices[] = {
    {Algorithm::one_shot, Verb::all_reduce, true},
    {Algorithm::one_shot, Verb::reduce_scatter, true},
    {Algorithm::direct, Verb::all_gather, true},
    {Algorithm::direct, Verb::all_to_all, true},
};

// A call of this size by the shape of a launch, with private tensors.
inline Step long_step(Random& random, const Choice& choice, int world, uint64_t num_bytes) {
  Step step = step_of(choice, world);
  step.numel = num_bytes / step.elem_bytes();
  const LaunchShape shape =
      shape_for(step.algorithm, step.verb, step.dtype, true, num_bytes, world, kMaxLlChannels);
  step.blocks = shape.blocks;
  step.threads = kLlThreads;
  step.tile_bytes = shape.tile_bytes;
  step.splits = even_splits(step);
  draw_inputs(random, step);
  return step;
}

// crowds: the planted bug, a full message with one channel less. A pack then lies in the area of
// the next rank's packs.
inline int run_ll(Schedule schedule, uint64_t num_seeds, bool crowds) {
  const uint64_t most = max_ll_bytes(kMaxLlChannels);
  return check_seeds(num_seeds, [&](Random& random, uint64_t seed) {
    const int world = seed == 1 ? 8 : 2 + int(pick(random, 7));
    Machine machine(world, schedule, random(), ~uint64_t{0}, kMaxLlChannels);
    if (seed % 4 == 0) machine.start_before_wrap();
    for (int call = 0; call < kLlCalls; ++call) {
      const uint64_t less = call == 1 && !crowds ? pick(random, most) / 4 * 4 : 0;
      Step step = long_step(random, kLlChoices[pick(random, 4)], world, most - less);
      if (crowds) --step.blocks;
      for (int rank = 0; rank < world; ++rank)
        machine.enqueue(step, rank, kernel_of<Protocol>(step));
    }
    return machine.run();
  });
}

}  // namespace fastcoll::sim
