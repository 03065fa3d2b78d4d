// SPDX-License-Identifier: Apache-2.0
// Compiled WITHOUT -fsanitize=thread even where the kernels are compiled with it (then with
// -DFASTCOLL_SIM_TSAN). The scheduler's own reads and writes must not order the fibers.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "sim/state.h"

#ifdef FASTCOLL_SIM_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace fastcoll::sim {

namespace {

constexpr size_t kStackBytes = size_t{128} << 10;
// After so many idle steps, and so many per fiber, the clock starts to leap, so that a limited wait
// runs out. After kDead times as many it is a deadlock.
constexpr uint64_t kIdleSteps = 4000, kIdleStepsPerFiber = 50, kDead = 20;
constexpr uint64_t kLeapNs = 20000;

[[noreturn, gnu::noinline]] void go_to(Place& place) { __builtin_longjmp(place.data(), 1); }

}  // namespace

namespace {

Simulator::State* machine = nullptr;

void* map_stack() {
  void* stack =
      mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack == MAP_FAILED) {
    std::perror("stack of a fiber");
    std::exit(2);
  }
  return stack;
}

void fiber_main() {
  Fiber* fiber = machine->current;
#ifdef FASTCOLL_SIM_TSAN
  __tsan_acquire(&machine->order);
#endif
  if (!fiber->grid->job->starts_early) await_stream();
  fiber->grid->job->body();
#ifdef FASTCOLL_SIM_TSAN
  __tsan_release(&fiber->grid->order);
#endif
  fiber->done = true;
  progress();
  machine->switch_to_main();
}

void prepare(Fiber& fiber) {
  getcontext(&fiber.beginning);
  fiber.beginning.uc_stack = {fiber.stack, 0, kStackBytes};
  fiber.beginning.uc_link = nullptr;
  makecontext(&fiber.beginning, fiber_main, 0);
}

}  // namespace

const Thread& self() { return machine->current->id; }
void yield() { machine->switch_to_main(); }
void progress() { machine->idle_steps = 0; }
void* block_memory() { return machine->current->block->memory; }
int* block_sync() { return &machine->current->block->sync; }
uint64_t now_ns() { return machine->now_ns(); }
void count_load() { ++machine->current->loads; }
void count_store() {
  const uint64_t loads = std::exchange(machine->current->loads, 0);
  if (loads == 0) return;
  LoadRuns& runs = machine->load_runs;
  ++runs.num_runs;
  runs.num_loads += loads;
  runs.fewest = std::min(runs.fewest, loads);
}

void spin(int peer, const char* what, uint64_t expected, uint64_t seen) {
  Fiber& fiber = *machine->current;
  fiber.peer = peer;
  fiber.what = what;
  fiber.expected = expected;
  fiber.seen = seen;
  yield();
  fiber.peer = -1;
}

bool barrier(bool vote) {
  Fiber& fiber = *machine->current;
  Block& block = *fiber.block;
  block.vote |= vote;
  fiber.in_barrier = true;
  if (++block.waiting == int(fiber.id.num_threads)) {
    block.result = block.vote;
    block.vote = false;
    block.waiting = 0;
    progress();
    const Rank& rank = machine->ranks[size_t(fiber.id.rank)];
    for (size_t i = 0; i < fiber.id.num_threads; ++i) {
      Fiber* other = rank.fibers[block.first_fiber + i].get();
      if (!other->in_barrier) continue;
      other->in_barrier = false;
      if (other != &fiber) machine->make_ready(other);
    }
    yield();
  } else {
    machine->remove_ready(&fiber);
    yield();
  }
  // No thread can open the next barrier before this one has come to it: result is still ours.
  return block.result;
}

void await_stream() {
  Fiber& fiber = *machine->current;
  Grid* before = fiber.grid->before;
  if (!before) return;
  if (before->running > 0) {
    fiber.in_await = fiber.grid->awaits = true;
    machine->remove_ready(&fiber);
    yield();
  }
#ifdef FASTCOLL_SIM_TSAN
  __tsan_acquire(&before->order);
#endif
}

void let_next_start() {
  Fiber& fiber = *machine->current;
  if (std::exchange(fiber.block->lets_next, true)) return;
  if (--fiber.grid->held_back == 0) machine->lets_start = fiber.id.rank;
}

void Simulator::State::launch_next(int rank_idx) {
  Rank& rank = ranks[size_t(rank_idx)];
  if (rank.next_job == rank.jobs.size()) return;
  if (!rank.grids.empty()) {
    const Grid& last = rank.grids.back();
    if (rank.jobs[rank.next_job].starts_early ? last.held_back > 0 : last.running > 0) return;
  }
  launch(rank_idx);
}

void Simulator::State::launch(int rank_idx) {
  Rank& rank = ranks[size_t(rank_idx)];
  Grid* before = rank.grids.empty() ? nullptr : &rank.grids.back();
  const Job& job = rank.jobs[rank.next_job++];
  const size_t num_fibers = size_t(job.blocks) * size_t(job.threads);
  rank.grids.push_back({&job, rank.fibers.size(), num_fibers, num_fibers, job.blocks, before});
  if (before) before->after = &rank.grids.back();
  live += num_fibers;
  ready.reserve(live);  // here, as fibers must not call into the C++ library: it is instrumented
  for (int b = 0; b < job.blocks; ++b) {
    rank.blocks.push_back(std::make_unique<Block>());
    Block* block = rank.blocks.back().get();
    block->threads = job.threads;
    block->first_fiber = rank.fibers.size();
    for (int t = 0; t < job.threads; ++t) {
      rank.fibers.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *rank.fibers.back();
      fiber.id = {rank_idx, uint32_t(b), uint32_t(job.blocks), uint32_t(t), uint32_t(job.threads)};
      fiber.block = block;
      fiber.grid = &rank.grids.back();
      if (stacks.empty()) {
        fiber.stack = map_stack();
      } else {
        fiber.stack = stacks.back();
        stacks.pop_back();
      }
      prepare(fiber);
#ifdef FASTCOLL_SIM_TSAN
      fiber.tsan = __tsan_create_fiber(0);
#endif
    }
    unplaced.push_back({&rank, block});
  }
  place_blocks();
}

void Simulator::State::place_blocks() {
  while (!unplaced.empty() && (most_blocks == 0 || blocks < most_blocks)) {
    const size_t i = most_blocks == 0 ? 0 : random() % unplaced.size();
    const Unplaced one = unplaced[i];
    unplaced.erase(unplaced.begin() + long(i));
    ++blocks;
    progress();
    for (int t = 0; t < one.block->threads; ++t)
      make_ready(one.rank->fibers[one.block->first_fiber + size_t(t)].get());
  }
}

void Simulator::State::make_ready(Fiber* fiber) {
  fiber->ready_idx = ready.size();
  ready.push_back(fiber);
}

void Simulator::State::remove_ready(Fiber* fiber) {
  ready[fiber->ready_idx] = ready.back();
  ready[fiber->ready_idx]->ready_idx = fiber->ready_idx;
  ready.pop_back();
}

[[gnu::noinline]] void Simulator::State::switch_to(Fiber* fiber) {
  current = fiber;
#ifdef FASTCOLL_SIM_TSAN
  __tsan_switch_to_fiber(fiber->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  if (__builtin_setjmp(main.data()) != 0) return;
  if (std::exchange(fiber->begun, true)) go_to(fiber->place);
  setcontext(&fiber->beginning);
}

[[gnu::noinline]] void Simulator::State::switch_to_main() {
  Fiber* fiber = current;
#ifdef FASTCOLL_SIM_TSAN
  __tsan_switch_to_fiber(main_tsan, __tsan_switch_to_fiber_no_sync);
#endif
  if (__builtin_setjmp(fiber->place.data()) == 0) go_to(main);
}

void Simulator::State::finish(Fiber* fiber) {
  remove_ready(fiber);
  --live;
  if (victim == fiber) victim = nullptr;
  // A race detector would take the next user of a stack for the last one's rival.
#ifdef FASTCOLL_SIM_TSAN
  __tsan_destroy_fiber(fiber->tsan);
  munmap(fiber->stack, kStackBytes);
#else
  stacks.push_back(fiber->stack);
#endif
  Rank& rank = ranks[size_t(fiber->id.rank)];
  Grid& grid = *fiber->grid;
  if (--fiber->block->threads == 0) {
    --blocks;
    if (!std::exchange(fiber->block->lets_next, true)) --grid.held_back;
    place_blocks();
  }
  if (--grid.running == 0) {
    if (victim && victim->id.rank == fiber->id.rank) victim = nullptr;
    if (grid.after && grid.after->awaits)
      for (size_t i = 0; i < grid.after->num_fibers; ++i) {
        Fiber* other = rank.fibers[grid.after->first_fiber + i].get();
        if (std::exchange(other->in_await, false)) make_ready(other);
      }
  }
  launch_next(fiber->id.rank);
}

bool Simulator::State::frozen(const Fiber* fiber) const {
  if (!victim || fiber->id.rank != victim->id.rank) return false;
  if (victim_scope == 0) return true;
  if (victim_scope == 1) return fiber->block == victim->block;
  return fiber == victim;
}

void Simulator::State::freeze() {
  if (victim && steps >= frozen_until) victim = nullptr;
  if (victim || random() % 256 != 0) return;
  victim = ready[random() % ready.size()];
  victim_scope = int(random() % 3);
  frozen_until = steps + (uint64_t{16} << (random() % 10));
}

Fiber* Simulator::State::next() {
  if (schedule == Schedule::starving) freeze();
  const size_t first = random() % ready.size();
  for (size_t i = 0; i < ready.size(); ++i) {
    Fiber* fiber = ready[(first + i) % ready.size()];
    if (!frozen(fiber)) return fiber;
  }
  victim = nullptr;
  return ready[first];
}

void Simulator::State::report() const {
  std::fprintf(stderr, "DEADLOCK: nothing has happened for %llu steps\n",
               static_cast<unsigned long long>(idle_steps));
  int lines = 0;
  for (const Fiber* fiber : ready) {
    if (fiber->peer < 0 || ++lines > 16) continue;
    std::fprintf(stderr,
                 "  rank %d, block %u, thread %u waits for rank %d (%s): expected %#llx, seen "
                 "%#llx\n",
                 fiber->id.rank, fiber->id.block, fiber->id.thread, fiber->peer, fiber->what,
                 static_cast<unsigned long long>(fiber->expected),
                 static_cast<unsigned long long>(fiber->seen));
  }
}

Simulator::Simulator(int world_size, Schedule schedule, uint64_t seed)
    : state_(std::make_unique<State>()) {
  state_->random.seed(seed);
  state_->schedule = schedule;
  state_->ranks = std::vector<Rank>(size_t(world_size));
}

Simulator::~Simulator() {
  for (void* stack : state_->stacks) munmap(stack, kStackBytes);
}

void Simulator::enqueue(int rank, Job job) {
  state_->ranks[size_t(rank)].jobs.push_back(std::move(job));
}

void Simulator::limit_blocks(int most) { state_->most_blocks = most; }

uint64_t Simulator::elapsed_ns() const { return state_->now_ns(); }
const LoadRuns& Simulator::load_runs() const { return state_->load_runs; }

bool Simulator::run() {
  State& state = *state_;
  machine = &state;
#ifdef FASTCOLL_SIM_TSAN
  state.main_tsan = __tsan_get_current_fiber();
  // The test's preparations come before every rank's first job.
  __tsan_release(&state.order);
#endif
  for (int rank = 0; rank < int(state.ranks.size()); ++rank) state.launch_next(rank);
  while (state.live > 0) {
    ++state.steps;
    const uint64_t idle = ++state.idle_steps;
    const uint64_t patience = std::max(kIdleSteps, kIdleStepsPerFiber * state.live);
    if (idle > patience) state.leapt_ns += kLeapNs;
    if (state.ready.empty() || idle > kDead * patience) {
      state.report();
      return false;
    }
    Fiber* fiber = state.next();
    state.switch_to(fiber);
    if (const int rank = std::exchange(state.lets_start, -1); rank >= 0) state.launch_next(rank);
    if (fiber->done) state.finish(fiber);
  }
#ifdef FASTCOLL_SIM_TSAN
  for (Rank& rank : state.ranks)
    for (Grid& grid : rank.grids) __tsan_acquire(&grid.order);
#endif
  return true;
}

}  // namespace fastcoll::sim
