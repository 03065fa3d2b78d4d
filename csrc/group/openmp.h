// SPDX-License-Identifier: Apache-2.0
// How long OpenMP's threads spin, where ranks have more of them than CPUs.
//
// torch computes with OpenMP's threads. Those of GNU's libgomp that wait for their next work spin
// first: some 15 ms, and minutes under OMP_WAIT_POLICY=active. Where ranks share CPUs, they spin on
// CPUs that peers need. Two ranks of two threads on two CPUs made 65 steps a second instead of 394
// (512 x 512 matmul, all_reduce of 1 MiB; Xeon).
//
// libgomp spins 100 to 1000 times only while the process has more of its threads than CPUs. So a
// thread of ours makes a team by an empty parallel region, and rests: the team counts. No variable
// of the environment has to be set before torch is loaded. Once the thread has ended, OpenMP waits
// as before.
//
// Tried with less gain: a rank's own workers asleep in a parallel region while the rank waits (1.3
// to 1.6 of Gloo's steps against 2.1).
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastcoll {

// The size of the team that has to rest. With it, a process whose main thread has a team of
// `threads` has more threads than the CPUs that it may use. The first thread of a further team does
// not count in libgomp. 0: the ranks' CPUs suffice for all their threads, or no thread waits.
constexpr int resting_threads(int threads, int ranks, int ranks_cpus, int process_cpus) {
  if (threads < 2 || int64_t(threads) * ranks <= ranks_cpus) return 0;
  return std::max(2, process_cpus - threads + 2);
}
static_assert(resting_threads(1, 8, 2, 2) == 0);
static_assert(resting_threads(2, 4, 8, 8) == 0);
static_assert(resting_threads(2, 2, 2, 2) == 2);  // 2 + 1 are more than 2
static_assert(resting_threads(2, 5, 8, 8) == 8);  // 2 + 7 are more than 8
static_assert(resting_threads(4, 2, 8, 4) == 0 && resting_threads(4, 2, 6, 4) == 2);
static_assert(resting_threads(64, 2, 2, 2) == 2);

class RestingThread;

// Held by a group. While any group holds it, OpenMP's waits in this process are short.
class ShortOpenMpWaits {
 public:
  ShortOpenMpWaits() = default;
  ~ShortOpenMpWaits();
  ShortOpenMpWaits(const ShortOpenMpWaits&) = delete;
  ShortOpenMpWaits& operator=(const ShortOpenMpWaits&) = delete;

  // Look at the number of threads that this thread computes with. True: this makes waits short. Not
  // without libgomp, nor in a thread other than the main one: that computes with other numbers.
  bool hold_if_crowded(int ranks, int ranks_cpus);
  void release();

 private:
  RestingThread* held_ = nullptr;
};

}  // namespace fastcoll
