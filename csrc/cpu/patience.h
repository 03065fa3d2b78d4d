// SPDX-License-Identifier: Apache-2.0
// How long a rank spins for a late peer before it gives its CPU away: a millisecond, while most
// late peers come within one.
//
// A thread that yields or sleeps gets its CPU back late, often another one, and with cold caches.
// Workers of vLLM wait for each other where its engine has interrupted one of them, mostly for less
// than 400 us. On a Zen 4 sleeps made their decode steps up to 16 % longer (bench/vllm_turns.py). A
// sleeper comes late to the next call and lets its peer wait in turn. A peer that always comes
// later, as one that computes longer, is not worth the CPU time. So the last waits decide.
//
// Only a process's main thread spins on. Behind another thread, as that of an asynchronous call,
// the program computes and wants the CPU. Where ranks have more of OpenMP's threads than CPUs, the
// sender of a late message computes with threads that want the waiting rank's CPU. On a Zen 4 two
// ranks on two CPUs sent to each other between products of 256 x 256, with two threads each. A step
// took 1040 us where the waiting rank spun on, and 800 us where it slept. In collectives all ranks
// compute at a time, and vLLM's workers have such threads: there a rank spins on all the same.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/wait.h"

namespace fastcoll {

class Patience {
 public:
  static constexpr int64_t kSpinUs = 1000;
  static constexpr int kMost = 8;  // waits that are remembered

  Patience(int num_ranks, int num_cpus) : num_ranks_(num_ranks), num_cpus_(num_cpus) {}

  bool is_there() const {
    return 2 * score_ >= kMost && is_main_thread() && num_ranks_ <= num_cpus_;
  }
  // Whether all threads with which the ranks compute have CPUs.
  bool has_cpus_for_threads() const {
    return int64_t(num_ranks_) * num_openmp_threads() <= num_cpus_;
  }
  void note_wait(int64_t waited_us) {
    score_ = std::clamp(score_ + (waited_us < kSpinUs ? 1 : -1), 0, kMost);
  }

 private:
  const int num_ranks_, num_cpus_;
  int score_ = kMost;  // up by a wait that spinning would have covered, down by a longer one
};

}  // namespace fastcoll
