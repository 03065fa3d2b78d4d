// SPDX-License-Identifier: Apache-2.0
#include "relacy_machine.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/process_memory.h"
#include "cpu/wait.h"

// relacy's headers define the global operators of memory, inline, for its own bookkeeping;
// test_relacy.cpp has ordinary ones, which the linker prefers. And they make macros of words.
__attribute__((noinline)) void* operator new(std::size_t);
__attribute__((noinline)) void* operator new[](std::size_t);
__attribute__((noinline)) void operator delete(void*) noexcept;
__attribute__((noinline)) void operator delete[](void*) noexcept;
#include <relacy/relacy.hpp>
#undef new
#undef delete
#undef malloc
#undef free
#undef assert
#undef sched_yield

namespace machine {

namespace {

// A word as relacy knows it. An atomic of relacy has to be made anew in every iteration, before its
// threads start. Else its first value could not be seen once there is another. So the first
// iterations, in which a load sees the last store, learn which words there are.
using Atomic = rl::generic_atomic<uint64_t, true>;
struct Shadow {
  const void* word = nullptr;
  bool is_live = false;
  alignas(Atomic) std::byte storage[sizeof(Atomic)];
  Atomic& atomic() { return *reinterpret_cast<Atomic*>(storage); }
  void begin() {
    new (storage) Atomic();
    is_live = true;
  }
  void end() {
    if (is_live) atomic().~Atomic();
    is_live = false;
  }
};
constexpr size_t kMostWords = 1 << 14;
Shadow shadows[kMostWords];  // open hashing: no iteration may allocate
size_t known[kMostWords];
size_t num_known = 0;
bool is_learning = true;

Atomic& atomic_of(const void* word) {
  size_t at = uintptr_t(word) / sizeof(uint32_t) * 2654435761u % kMostWords;
  while (shadows[at].word && shadows[at].word != word) at = (at + 1) % kMostWords;
  Shadow& shadow = shadows[at];
  if (!shadow.word) {
    shadow.word = word;
    known[num_known++] = at;
    if (num_known == kMostWords / 2) std::abort();
  }
  if (!shadow.is_live) shadow.begin();
  return shadow.atomic();
}

rl::memory_order order_of(Order order) {
  if (is_learning) return rl::mo_seq_cst;
  constexpr rl::memory_order kOrders[] = {rl::mo_relaxed, rl::mo_acquire, rl::mo_release,
                                          rl::mo_acq_rel, rl::mo_seq_cst};
  return kOrders[int(order)];
}

// ---- plain memory -------------------------------------------------------------------------------

constexpr int kMostThreads = 3;
constexpr size_t kCellBytes = 8;

struct Cell {  // by thread: its clock at its last access in this iteration
  uint64_t iteration = 0;
  rl::timestamp_t loads[kMostThreads], stores[kMostThreads];
};
struct Watched {
  const std::byte* begin;
  size_t num_bytes;
  std::vector<Cell> cells;
};
std::vector<Watched> watched;
uint64_t iteration = 0;
bool is_running = false;  // between `before` and the end of the last thread
int num_threads = 0;

void touch(const void* ptr, size_t num_bytes, bool writes) {
  if (!is_running || num_bytes == 0 || is_learning) return;
  const auto* at = static_cast<const std::byte*>(ptr);
  for (Watched& range : watched) {
    if (at < range.begin || at >= range.begin + range.num_bytes) continue;
    rl::thread_info_base& thread = *rl::ctx().threadx_;
    const auto* seen = thread.acq_rel_order_;
    const auto now = thread.own_acq_rel_order_ += 1;
    const size_t first = size_t(at - range.begin) / kCellBytes;
    const size_t last = size_t(at - range.begin + num_bytes - 1) / kCellBytes;
    for (size_t i = first; i <= last; ++i) {
      Cell& cell = range.cells[i];
      if (cell.iteration != iteration) cell = {iteration, {}, {}};
      for (int other = 0; other < num_threads; ++other)
        if (seen[other] < cell.stores[other] || (writes && seen[other] < cell.loads[other]))
          rl::ctx().fail_test("of plain memory", rl::test_result_data_race, RL_INFO);
      (writes ? cell.stores : cell.loads)[thread.index_] = now;
    }
    return;
  }
}

int64_t time_us = 0;

// ---- a test of relacy's -------------------------------------------------------------------------

const Scenario* scenario = nullptr;

template <int kThreads>
struct Test : rl::test_suite<Test<kThreads>, kThreads> {
  void before() {
    for (size_t i = 0; i < num_known; ++i) {
      shadows[known[i]].begin();
      shadows[known[i]].atomic().store(0, rl::mo_relaxed, RL_INFO);
    }
    ++iteration;
    time_us = 0;
    scenario->before();
    is_running = true;
  }
  void thread(unsigned index) { scenario->thread(int(index)); }
  void after() {
    is_running = false;
    for (size_t i = 0; i < num_known; ++i) shadows[known[i]].end();
  }
};

template <int kThreads>
bool run(uint64_t num_iterations) {
  rl::test_params params;
  std::ostringstream history;
  params.iteration_count = num_iterations;
  params.execution_depth_limit = 200000;
  params.output_stream = params.progress_stream = &history;
  const bool is_right = rl::simulate<Test<kThreads>>(params);
  if (is_right) return true;
  std::string text = history.str();
  constexpr size_t kShown = 6000;  // the end says where each thread came to
  if (text.size() > kShown) text = "..." + text.substr(text.size() - kShown);
  std::fprintf(stderr, "%s\nRELACY: %s in iteration %llu\n", text.c_str(),
               rl::test_result_str(params.test_result),
               static_cast<unsigned long long>(params.stop_iteration));
  return false;
}

}  // namespace

uint64_t load(const void* word, Order order) {
  auto& atomic = atomic_of(word);
  if (is_learning) return atomic.fetch_add(0, rl::mo_seq_cst, RL_INFO);
  return atomic.load(order_of(order), RL_INFO);
}
void store(uint64_t* word, uint64_t value, Order order) {
  atomic_of(word).store(value, order_of(order), RL_INFO);
  *word = value;
}
void store(uint32_t* word, uint32_t value, Order order) {
  atomic_of(word).store(value, order_of(order), RL_INFO);
  *word = value;
}
uint64_t set_once(uint64_t* word, uint64_t value, Order order) {
  uint64_t seen = 0;
  if (!atomic_of(word).compare_exchange_strong(seen, value, order_of(order), RL_INFO)) return seen;
  return *word = value;
}
void increment(uint32_t* word, Order order) {
  *word = uint32_t(atomic_of(word).fetch_add(1, order_of(order), RL_INFO)) + 1;
}

void watch(const void* begin, size_t num_bytes) {
  for (const Watched& range : watched)
    if (range.begin == begin) return;
  watched.push_back({static_cast<const std::byte*>(begin), num_bytes,
                     std::vector<Cell>(num_bytes / kCellBytes + 1)});
}

uint64_t draw(uint64_t limit) { return rl::ctx().rand(unsigned(limit), rl::sched_type_user); }

void require(bool right, const char* what) {
  if (!right) rl::ctx().fail_test(what, rl::test_result_user_assert_failed, RL_INFO);
}

bool simulate(const Scenario& chosen) {
  scenario = &chosen;
  num_threads = chosen.num_threads;
  const auto run_it = num_threads == 2 ? &run<2> : &run<3>;
  is_learning = true;
  if (!run_it(std::min<uint64_t>(chosen.num_iterations, 50))) return false;
  is_learning = false;
  return run_it(chosen.num_iterations);
}

}  // namespace machine

// ---- the operating system -----------------------------------------------------------------------

namespace fastcoll {

int64_t now_us() { return machine::time_us += 2000; }  // so every wait that gets long patrols
int64_t tick_us() { return machine::time_us; }
uint32_t current_cpu() { return 0; }
bool is_main_thread() { return false; }  // no rank spins on: time is no order of events
int num_openmp_threads() { return 1; }
bool spread_out(std::span<const uint32_t>, int) { return false; }
bool peer_is_gone(const PeerLink&) { return false; }
bool read_farewell(const PeerLink&, Farewell*, std::string*) { return false; }
bool process_is_stopped(int) { return false; }
std::string fate(const PeerLink&) { return "is gone"; }
bool register_membarrier() { return true; }
bool membarrier_everywhere() {
  const machine::Scenario& scenario = *machine::scenario;
  if (scenario.wakes_all && scenario.has_barrier && !machine::is_learning)
    rl::systemwide_fence(RL_INFO);
  return scenario.wakes_all;
}

void futex_wait(uint32_t* word, uint32_t seen, int64_t) {
  if (*word == seen)
    machine::atomic_of(word).wait(rl::ctx(), !machine::scenario->wakes_all, false, RL_INFO);
}
void futex_wake_all(uint32_t* word) {
  machine::atomic_of(word).wake(rl::ctx(), machine::kMostThreads, RL_INFO);
}

int read_process(int, uint64_t address, void* dst, size_t num_bytes, int) {
  const void* from = reinterpret_cast<const void*>(uintptr_t(address));
  machine::touch(from, num_bytes, false);
  std::memmove(dst, from, num_bytes);
  return 0;
}
bool Readable::covers(const void*, size_t) { return true; }

}  // namespace fastcoll

extern "C" {

int sched_yield() noexcept {
  rl::ctx().sched();  // rl::yield() would show the latest values from here on
  return 0;
}
int clock_nanosleep(clockid_t, int, const timespec*, timespec*) { return sched_yield(); }
int nanosleep(const timespec*, timespec*) { return sched_yield(); }

void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
void* __wrap_memcpy(void* dst, const void* src, size_t num_bytes) {
  machine::touch(src, num_bytes, false);
  machine::touch(dst, num_bytes, true);
  return __real_memcpy(dst, src, num_bytes);
}
void* __wrap_memmove(void* dst, const void* src, size_t num_bytes) {
  machine::touch(src, num_bytes, false);
  machine::touch(dst, num_bytes, true);
  return __real_memmove(dst, src, num_bytes);
}
void* __wrap_memset(void* dst, int value, size_t num_bytes) {
  machine::touch(dst, num_bytes, true);
  return __real_memset(dst, value, num_bytes);
}

// The calls that -fsanitize=thread makes of plain accesses.
#define FASTCOLL_ACCESSES(bytes)                                                      \
  void __tsan_read##bytes(void* ptr) { machine::touch(ptr, bytes, false); }           \
  void __tsan_write##bytes(void* ptr) { machine::touch(ptr, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* ptr) { machine::touch(ptr, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* ptr) { machine::touch(ptr, bytes, true); }
FASTCOLL_ACCESSES(1)
FASTCOLL_ACCESSES(2)
FASTCOLL_ACCESSES(4)
FASTCOLL_ACCESSES(8)
FASTCOLL_ACCESSES(16)
void __tsan_read_range(void* ptr, unsigned long bytes) { machine::touch(ptr, bytes, false); }
void __tsan_write_range(void* ptr, unsigned long bytes) { machine::touch(ptr, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// std::atomic inside one rank: the fibers never run at once.
#define FASTCOLL_ATOMICS(bits)                                                                \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* ptr, int) {        \
    return *ptr;                                                                              \
  }                                                                                           \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* ptr, uint##bits##_t value, int) { \
    *ptr = value;                                                                             \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* ptr,                \
                                                 uint##bits##_t value, int) {                 \
    const uint##bits##_t seen = *ptr;                                                         \
    *ptr = uint##bits##_t(seen + value);                                                      \
    return seen;                                                                              \
  }                                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(                                          \
      volatile uint##bits##_t* ptr, uint##bits##_t* seen, uint##bits##_t value, int, int) {   \
    const bool is_equal = *ptr == *seen;                                                      \
    if (is_equal) *ptr = value;                                                               \
    else *seen = *ptr;                                                                        \
    return is_equal;                                                                          \
  }
FASTCOLL_ATOMICS(8)
FASTCOLL_ATOMICS(32)
FASTCOLL_ATOMICS(64)

}  // extern "C"
