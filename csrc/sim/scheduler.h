// SPDX-License-Identifier: Apache-2.0
// Runs the threads of all ranks' kernels as fibers in ONE operating-system thread, in an order
// drawn from a seed. The scheduler knows no kernel: a job is a function that every thread of a grid
// calls. Each rank's jobs run one after the other, as in a stream; those that allow it start early,
// as by programmatic dependent launch. For tests only.
//
// Why a simulator: GPU kernels are plain C++ over kernels/prim.cuh, which has a second body made of
// fibers (sim/prim.h). So the files that nvcc compiles also run on a CPU. All ranks run in one
// thread, some of them starved, under ThreadSanitizer. Tests plant bugs that the simulator must
// find (tests/protocol/sim).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fastcoll::sim {

struct Thread {
  int rank;
  uint32_t block, num_blocks, thread, num_threads;
};

// ---- for the running fiber

const Thread& self();
// Let other fibers run.
void yield();
// The same, from a wait that has just looked in vain; the numbers are for the report of a deadlock.
void spin(int peer, const char* what, uint64_t expected, uint64_t seen);
// A change has happened that other fibers may wait for.
void progress();
// Returns once every thread of the block is here: whether any of them voted true.
bool barrier(bool vote);
// Returns once the job before this one in the stream is over, and all that its threads awaited so.
void await_stream();
// The next job of the stream may start once every block has said so, or has ended.
void let_next_start();
// So many bytes that the threads of a block share, and the address that stands for its barrier.
inline constexpr size_t kBlockMemoryBytes = 1024;
void* block_memory();
int* block_sync();
uint64_t now_ns();
// It loads a pack, or stores one.
void count_load();
void count_store();

// ---- for the test

// uniform: any thread may be next. starving: also, now and then a rank, a block or a thread stands
// still for long. A uniform choice alone is too fair to find a buffer that is reused too early.
enum class Schedule { uniform, starving };

struct Job {
  int blocks, threads;
  std::function<void()> body;
  // It starts as soon as the job before lets it, and calls await_stream.
  bool starts_early = false;
};

// The loads of packs that threads have done before a store, all of which may be under way at once.
struct LoadRuns {
  uint64_t num_runs = 0, num_loads = 0, fewest = ~uint64_t{0};
};

class Simulator {
 public:
  Simulator(int world_size, Schedule schedule, uint64_t seed);
  ~Simulator();
  void enqueue(int rank, Job job);
  // All ranks are on one device with room for so many blocks at a time. A job's blocks start as
  // they find room, in any order. 0: there is room for all.
  void limit_blocks(int most);
  // Runs until all jobs are done. False if nothing moves any more: then each fiber's wait is on
  // stderr.
  bool run();
  // How long it took, by the virtual clock.
  uint64_t elapsed_ns() const;
  const LoadRuns& load_runs() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace fastcoll::sim
