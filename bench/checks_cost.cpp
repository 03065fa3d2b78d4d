// SPDX-License-Identifier: Apache-2.0
// The cost of the checks to a small call. Two ranks are pinned processes and make two groups on the
// same kind of memory. One group runs the code that ships; the other the same code without
// descriptor, stamp and look at the verdict. A third, the first one's twin, shows the effect of
// chance: how the compiler and the caches treat one of several copies. Windows take turns.
//
//   checks_cost NUM_WINDOWS CALLS_PER_WINDOW CPU_OF_RANK_0 CPU_OF_RANK_1
//
// Prints one line a window, from rank 0: nanoseconds a call with checks, without, and the twin's.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "cpu/run.h"

using namespace fastcoll;

namespace {

// All of this file only, or the compiler would take more care of some than of others.
struct Checked : StdAtomics {};
struct Twin : StdAtomics {};
struct Unchecked : StdAtomics {
  static constexpr bool kChecksCalls = false;
};

double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) * 1e9 + double(time.tv_nsec);
}

template <class P>
class Rank {
 public:
  Rank(std::byte* memory, int rank) : group_(options(memory, rank)) {
    Plan plan;
    plan.verb = Verb::all_reduce;
    plan.dtype = DType::float32;
    plan.algorithm = Algorithm::one_shot;
    plan.inlined = true;
    plan.numel = 2;
    plan.segment_bytes = kSlotBytes;
    plan_ = make_plan(plan);
  }

  double window(int calls) {
    const double start = now_ns();
    for (int i = 0; i < calls; ++i) run(group_, plan_, data_, data_, host_, 30);
    return (now_ns() - start) / calls;
  }

 private:
  static GroupOptions options(std::byte* memory, int rank) {
    GroupOptions options;
    options.rank = rank;
    options.world_size = 2;
    options.regions[0] = memory;
    options.regions[1] = memory + mapped_bytes(2);
    return options;
  }

  Group<P> group_;
  Plan plan_;
  Host host_;
  alignas(64) float data_[2] = {0, 0};
};

std::byte* shared_memory() {
  void* ptr =
      mmap(nullptr, 2 * mapped_bytes(2), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (ptr == MAP_FAILED) std::exit(2);
  return static_cast<std::byte*>(ptr);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int num_windows = std::atoi(argv[1]), calls = std::atoi(argv[2]);
  std::byte* memory[] = {shared_memory(), shared_memory(), shared_memory()};
  const pid_t child = fork();
  const int rank = child == 0 ? 1 : 0;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(std::atoi(argv[3 + rank]), &cpus);
  if (sched_setaffinity(0, sizeof cpus, &cpus) != 0) return 2;
  Rank<Checked> checked(memory[0], rank);
  Rank<Unchecked> unchecked(memory[1], rank);
  Rank<Twin> twin(memory[2], rank);
  const auto window = [&](int variant) {
    return variant == 0 ? checked.window(calls)
                        : (variant == 1 ? unchecked.window(calls) : twin.window(calls));
  };
  for (int variant = 0; variant < 3; ++variant) window(variant);
  for (int i = 0; i < num_windows; ++i) {
    // The first variant changes, so that no variant always runs in the caches of the same other.
    double times[3];
    for (int turn = 0; turn < 3; ++turn) {
      const int variant = i % 2 == 0 ? (i + turn) % 3 : (i + 3 - turn) % 3;
      times[variant] = window(variant);
    }
    if (rank == 0) std::printf("%.3f %.3f %.3f\n", times[0], times[1], times[2]);
  }
  if (rank == 1) return 0;
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
