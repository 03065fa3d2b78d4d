// SPDX-License-Identifier: Apache-2.0
// How many packs a thread has under way when it copies. A loop that stores each pack before it
// loads the next one waits for memory, or for a link, once for every pack.
#pragma once

#include <array>
#include <cstdio>

#include "draw.h"

namespace fastcoll::sim {

inline constexpr uint64_t kWantedLoads = 4;
inline constexpr int kCopyThreads = 4;

inline bool enough_loads(const LoadRuns& runs, const std::string& what) {
  if (runs.num_runs != 0 && runs.fewest >= kWantedLoads) return true;
  std::fprintf(stderr, "WRONG: %s: a store after %llu loads, not %llu\n", what.c_str(),
               static_cast<unsigned long long>(runs.num_runs == 0 ? 0 : runs.fewest),
               static_cast<unsigned long long>(kWantedLoads));
  return false;
}

// A call with private tensors, of three segments in which every tile is full.
inline Step full_step(const Choice& choice, int world, uint32_t tile_bytes) {
  constexpr uint64_t kSegments = 3;
  Random random(1);
  Step step = step_of(choice, world);
  step.blocks = 2;
  step.threads = kCopyThreads;
  step.tile_bytes = tile_bytes;
  const bool parts =
      choice.verb == Verb::all_reduce && splits_message(choice.algorithm, choice.verb);
  step.numel = kSegments * uint64_t(step.blocks) * tile_bytes / step.elem_bytes() *
               uint64_t(parts ? world : 1);
  step.splits = even_splits(step);
  draw_inputs(random, step);
  return step;
}

inline bool check_loads(const Choice& choice, int world, uint32_t tile_bytes) {
  const Step step = full_step(choice, world, tile_bytes);
  Machine machine(world, Schedule::uniform, 1, ~uint64_t{0});
  for (int rank = 0; rank < world; ++rank) machine.enqueue(step, rank, kernel_of<Protocol>(step));
  return machine.run() && enough_loads(machine.load_runs(), step.name());
}

inline bool check_pair_loads() {
  Step step = full_step({Algorithm::direct, Verb::send, false}, 2, kWantedLoads * kPackBytes);
  step.threads = 1;  // a machine's pairs have tiles of four packs
  Machine machine(2, Schedule::uniform, 1, ~uint64_t{0});
  machine.enqueue_pairs(step, {{0, 1, step.inputs[1], 0, false, 2}});
  return machine.run() && enough_loads(machine.load_runs(), "send");
}

inline int run_loads() {
  constexpr Choice kCopies[] = {
      {Algorithm::one_shot, Verb::all_reduce, false},
      {Algorithm::one_shot, Verb::reduce_scatter, false},
      {Algorithm::two_shot, Verb::all_reduce, false},
      {Algorithm::multimem, Verb::all_reduce, false},
      {Algorithm::multimem, Verb::reduce_scatter, false},
      {Algorithm::multimem, Verb::all_gather, false},
      {Algorithm::multimem, Verb::broadcast, false},
      {Algorithm::ring, Verb::all_reduce, false},
      {Algorithm::ring, Verb::reduce_scatter, false},
      {Algorithm::chain, Verb::all_reduce, false},
      {Algorithm::chain, Verb::reduce_scatter, false},
      {Algorithm::direct, Verb::reduce, false},
      {Algorithm::direct, Verb::all_gather, false},
      {Algorithm::direct, Verb::all_to_all, false},
      {Algorithm::direct, Verb::broadcast, false},
      {Algorithm::direct, Verb::gather, false},
      {Algorithm::direct, Verb::scatter, false},
  };
  constexpr uint32_t kRound = kCopyThreads * uint32_t{kPackBytes};
  for (const Choice& choice : kCopies)
    if (!check_loads(choice, 4, kWantedLoads * kRound)) return 1;
  if (!check_pair_loads()) return 1;
  // One pack for each thread in a tile: then the loads are of several ranks' parts.
  for (const Choice& choice : {kCopies[1], kCopies[2]})
    if (!check_loads(choice, 1 + int(kWantedLoads), kRound)) return 1;
  std::printf("ok\n");
  return 0;
}

// The bugs: a pack at a time, or a part at a time with one pack for each thread.
inline int run_few_loads(bool by_parts) {
  constexpr uint64_t kRound = kCopyThreads * kPackBytes;
  static std::array<Pack, kWantedLoads * kCopyThreads> source, target;
  auto* to = reinterpret_cast<std::byte*>(target.data());
  const auto* from = reinterpret_cast<const std::byte*>(source.data());
  Simulator simulator(1, Schedule::uniform, 1);
  simulator.enqueue(0, {1, kCopyThreads, [=] {
                          if (by_parts) {
                            for (uint64_t start = 0; start < sizeof source; start += kRound)
                              copy_tile(to + start, from + start, kRound);
                          } else {
                            for_packs(sizeof source, [&](uint64_t at, uint64_t left) {
                              store_any(to + at, load_any(from + at, left), left);
                            });
                          }
                        }});
  return simulator.run() && enough_loads(simulator.load_runs(), "a planted copy") ? 0 : 1;
}

}  // namespace fastcoll::sim
