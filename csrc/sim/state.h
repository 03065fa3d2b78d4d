// SPDX-License-Identifier: Apache-2.0
// What the scheduler knows of blocks, jobs, fibers and ranks.
#pragma once

#include <ucontext.h>

#include <array>
#include <deque>
#include <random>

#include "sim/scheduler.h"

namespace fastcoll::sim {

inline constexpr uint64_t kStepNs = 50;

// The place at which a flow of control continues. A run consists almost of switches alone, and
// swapcontext asks the kernel for the signal mask at each.
using Place = std::array<void*, 5>;

struct Block {
  int threads;  // that have not ended
  size_t first_fiber;
  bool lets_next = false;
  int waiting = 0;
  bool vote = false, result = false;
  int sync = 0;  // see block_sync
  alignas(64) std::byte memory[kBlockMemoryBytes] = {};
};

// A job that was started.
struct Grid {
  const Job* job;
  size_t first_fiber, num_fibers;
  size_t running;  // threads
  int held_back;   // blocks that do not let the next job start yet
  Grid* before;    // in the stream, or nullptr
  Grid* after = nullptr;
  bool awaits = false;  // some of its threads wait for that one
  int order = 0;        // its address stands for the order behind its end
};

struct Fiber {
  Thread id;
  Block* block;
  Grid* grid;
  Place place = {};
  ucontext_t beginning;
  bool begun = false;
  void* stack;
  void* tsan = nullptr;
  bool in_barrier = false, in_await = false, done = false;
  size_t ready_idx = 0;
  int peer = -1;  // of its last wait
  const char* what = "";
  uint64_t expected = 0, seen = 0;
  uint64_t loads = 0;  // since its last store
};

// A rank's memory is freed only after all ranks are done. A race detector would take an earlier
// free for a write that nothing orders after the fibers' accesses.
struct Rank {
  std::deque<Job> jobs;
  size_t next_job = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::deque<Grid> grids;  // by job
};

struct Unplaced {  // a block that finds no room on the device
  Rank* rank;
  Block* block;
};

struct Simulator::State {
  std::mt19937_64 random;
  Schedule schedule;
  std::vector<Rank> ranks;
  std::vector<Fiber*> ready;  // neither done nor in a barrier
  std::vector<void*> stacks;  // to be used again
  Fiber* current = nullptr;
  Place main = {};
  void* main_tsan = nullptr;
  uint64_t steps = 0, idle_steps = 0, leapt_ns = 0, live = 0;
  const Fiber* victim = nullptr;  // starving: it, its block or its rank stands still
  int victim_scope = 0;
  uint64_t frozen_until = 0;
  LoadRuns load_runs;
  int most_blocks = 0, blocks = 0;  // on the device; see limit_blocks
  std::vector<Unplaced> unplaced;
  int lets_start = -1;  // the rank whose next job may start
  int order = 0;        // its address stands for the order behind the test's preparations

  uint64_t now_ns() const { return steps * kStepNs + leapt_ns; }
  void launch_next(int rank_idx);
  void launch(int rank_idx);
  void place_blocks();
  void make_ready(Fiber* fiber);
  void remove_ready(Fiber* fiber);
  Fiber* next();
  bool frozen(const Fiber* fiber) const;
  void freeze();
  void switch_to(Fiber* fiber);
  void switch_to_main();
  void finish(Fiber* fiber);
  void report() const;
};

}  // namespace fastcoll::sim
