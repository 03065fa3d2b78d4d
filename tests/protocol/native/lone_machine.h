// SPDX-License-Identifier: Apache-2.0
// An operating system for the ranks of a lone_world.h: its clock goes on by sleeps and yields
// alone. So a test knows each step of a wait. Programs with it link neither wait.cpp nor
// process_memory.cpp.
#pragma once

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cpu/process_memory.h"
#include "cpu/wait.h"

namespace machine {

constexpr int64_t kYieldUs = 10;

inline int64_t time_us = 1000000;
inline uint32_t cpu = 0;
inline bool has_barrier = true, is_readable = true, is_main_thread = false;
inline int num_threads = 1;    // of OpenMP
inline int read_error = 0;     // of each copy from another process
inline std::set<int> gone;     // links, by the number of their sockets
inline std::set<int> stopped;  // processes
inline std::function<void()> on_yield, on_barrier, on_sleep;
inline std::vector<std::string> steps;

// On until main() ended. AddressSanitizer yields when it looks for leaks after that.
inline bool is_on = false;
struct Switch {
  Switch() { is_on = true; }
  ~Switch() { is_on = false; }
};
inline Switch power;

// Notes a step; the same again is counted.
inline void note(const std::string& step) {
  const size_t space = steps.empty() ? 0 : steps.back().find(" x ");
  if (!steps.empty() && space != std::string::npos && steps.back().substr(space + 3) == step)
    steps.back() = std::to_string(std::stoi(steps.back()) + 1) + " x " + step;
  else steps.push_back("1 x " + step);
}
inline std::string take_steps() {
  std::string text;
  for (const std::string& step : steps) text += (text.empty() ? "" : ", ") + step;
  steps.clear();
  return text;
}
inline void call(const std::function<void()>& hook) {
  if (hook) hook();
}
// As at first, but for the time.
inline void clear() {
  on_yield = on_barrier = on_sleep = {};
  has_barrier = is_readable = true;
  is_main_thread = false;
  num_threads = 1;
  read_error = 0;
  gone.clear();
  stopped.clear();
  steps.clear();
}
inline void nap(const timespec& time) {
  const int64_t us = time.tv_sec * 1000000 + time.tv_nsec / 1000;
  note("nap of " + std::to_string(us));
  time_us += us;
  call(on_sleep);
}

}  // namespace machine

namespace fastcoll {

int64_t now_us() { return machine::time_us; }
int64_t tick_us() { return machine::time_us; }
uint32_t current_cpu() { return machine::cpu; }
bool is_main_thread() { return machine::is_main_thread; }
int num_openmp_threads() { return machine::num_threads; }
bool spread_out(std::span<const uint32_t> cpus, int rank) {
  std::string text = "spread of rank " + std::to_string(rank) + ":";
  for (const uint32_t cpu : cpus) text.append(" ").append(std::to_string(cpu));
  machine::note(text);
  return false;
}
bool peer_is_gone(const PeerLink& link) { return machine::gone.contains(link.socket); }
bool read_farewell(const PeerLink&, Farewell*, std::string*) { return false; }
bool process_is_stopped(int pid) { return machine::stopped.contains(pid); }
std::string fate(const PeerLink&) { return "is gone"; }
bool register_membarrier() { return machine::has_barrier; }
bool membarrier_everywhere() {
  machine::note("barrier");
  machine::call(machine::on_barrier);
  return machine::has_barrier;
}
void futex_wait(uint32_t* word, uint32_t seen, int64_t limit_us) {
  machine::note("sleep of " + std::to_string(limit_us) + " at " + std::to_string(seen));
  if (*word == seen) machine::time_us += limit_us;
  machine::call(machine::on_sleep);
}
void futex_wake_all(uint32_t*) { machine::note("wake"); }
int read_process(int, uint64_t address, void* dst, size_t num_bytes, int) {
  if (machine::read_error != 0) return machine::read_error;
  std::memcpy(dst, reinterpret_cast<const void*>(uintptr_t(address)), num_bytes);
  return 0;
}
bool Readable::covers(const void*, size_t) { return machine::is_readable; }

}  // namespace fastcoll

extern "C" {
int sched_yield() noexcept {
  if (!machine::is_on) return int(syscall(SYS_sched_yield));
  machine::note("yield");
  machine::time_us += machine::kYieldUs;
  machine::call(machine::on_yield);
  return 0;
}
int nanosleep(const timespec* time, timespec*) {
  machine::nap(*time);
  return 0;
}
int clock_nanosleep(clockid_t, int, const timespec* time, timespec*) {
  machine::nap(*time);
  return 0;
}
}
