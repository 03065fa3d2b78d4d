// SPDX-License-Identifier: Apache-2.0
// The operating system's part of a wait: time, the current CPU, futex sleep and wake, and the state
// of a peer's process. A sleep rests on membarrier: it gives the owner's store and load their
// order, so the fast path has no barrier.
//
// Ranks that share CPUs spread themselves (spread_out). A rank that waits by yielding is always
// ready to run. So for seconds the scheduler sees no imbalance in three such ranks on one CPU and
// one on another. Every rank knows from the arrival lines where the others run. In a long wait,
// every 50 ms at most, the last rank of a CPU with two more than another moves there. It narrows
// its affinity to that CPU and widens it again, so no rank stays pinned. One rank moves at a time,
// by a rule that all ranks evaluate alike.
//
// Tried without gain: fewer spins before a yield where ranks outnumber the CPUs (none in large
// calls). Polling without a pause was slower, and with a shorter pause there was no clear gain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "check.h"

namespace fastcoll {

// The program around a group, as far as a waiting rank has to know it.
class Host {
 public:
  virtual ~Host() = default;
  virtual void blocking() {}                         // a wait gets long: let others run (the GIL)
  virtual bool interrupted() { return false; }       // the program wants to stop (Ctrl-C)
  virtual std::string interruption() { return {}; }  // the error that was raised then
  virtual bool steps_out() { return false; }  // it leaves a wait that another thread goes on with
  virtual int64_t longest_sleep_us() { return INT64_MAX; }  // so as to step out in time
  virtual std::string call_site() { return {}; }  // where it made the call that runs, if noted
};

// Kept for the life of a group, so that the kernel reports a peer's end. -1: not there.
struct PeerLink {
  int socket = -1;
  int pidfd = -1;
  int pid = 0;
  int memory = -1;  // see open_memory in process_memory.h
};

int64_t now_us();
// The same clock at the kernel's last tick, up to 10 ms ago: it reads no counter.
int64_t tick_us();

// How long a thread has waited, less the time in which it did not run. A job that stands still as a
// whole (a paused container, a suspended machine) is no rank's fault. So the time between two looks
// counts for half a second at most, or a quarter of the limit if that is less. If one rank alone
// stands still, its peers go on counting and name it. A loaded machine that runs a waiting thread
// only every T seconds comes to the limit after T / 0.5 s times as long.
class WaitedTime {
 public:
  static constexpr double kAtOnceS = 1e-6;  // for a limit of 0 that is one
  // 0 and less are no limit.
  explicit WaitedTime(double limit_s, int64_t start_us = now_us())
      : limit_us_(limit_s > 0 ? int64_t(std::min(limit_s, kMostS) * 1e6) : INT64_MAX),
        most_us_(std::clamp(limit_us_ / 4, kLeastStepUs, kMostStepUs)),
        seen_us_(start_us) {}

  // Look, at this time: the microseconds that count so far.
  int64_t until(int64_t time_us) {
    // Several threads may have read the clock before one of them looks.
    if (time_us > seen_us_) waited_us_ += std::min(time_us - seen_us_, most_us_);
    seen_us_ = std::max(seen_us_, time_us);
    return waited_us_;
  }
  bool is_over(int64_t time_us = now_us()) { return until(time_us) >= limit_us_; }
  int64_t waited_us() const { return waited_us_; }  // as of the last look
  int64_t left_us() const { return limit_us_ - waited_us_; }

 private:
  static constexpr double kMostS = 1e9;           // more microseconds than fit otherwise
  static constexpr int64_t kLeastStepUs = 20000;  // the sleep of a waiting thread
  static constexpr int64_t kMostStepUs = 500000;
  int64_t limit_us_, most_us_, seen_us_, waited_us_ = 0;
};

uint32_t current_cpu();
bool is_main_thread();
// That this thread computes with; 1 where no OpenMP is loaded.
int num_openmp_threads();

// `cpus`: where each rank runs. If at least two more ranks run here than on another CPU that this
// thread may use, the last of them moves there. Returns whether this thread moved; its set of
// allowed CPUs stays the same.
bool spread_out(std::span<const uint32_t> cpus, int rank);
bool peer_is_gone(const PeerLink& link);

// The message that a rank which could not finish init leaves in its sockets
// (bootstrap/farewell.py). It names the ranks at fault. A rank that died leaves none.
inline constexpr uint64_t kFarewell = 0x6c6c657765726166ULL;  // "farewell"
inline constexpr size_t kMostFarewellBytes = 2048;
struct Farewell {
  uint64_t tag;
  uint64_t kind;  // ErrorKind
  uint64_t ranks;
};
void leave_farewell(int socket, ErrorKind kind, uint64_t ranks, const std::string& text);
bool read_farewell(const PeerLink& link, Farewell* farewell, std::string* text);

bool process_is_stopped(int pid);  // as by SIGSTOP; false where it can't be known

// The end of a peer that hung up, as text: "was killed by signal 9 (Killed)".
std::string fate(const PeerLink& link);

// The sleeper's store-load handshake: after this call every process that registered has executed a
// full barrier. False where the kernel can't; sleeps must then be short.
bool membarrier_everywhere();
bool register_membarrier();

void futex_wait(uint32_t* word, uint32_t seen, int64_t limit_us);
void futex_wake_all(uint32_t* word);

}  // namespace fastcoll
