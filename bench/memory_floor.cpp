// SPDX-License-Identifier: Apache-2.0
// The part of memory in the time of a large all_reduce of two ranks. Two threads only read both
// inputs, each one half of both. They do not wait for each other in between. Usage:
//
//   memory_floor ROUNDS CPU_OF_THREAD_0 CPU_OF_THREAD_1 BYTES...
//
// Prints one line for each size: bytes, and microseconds, the median of the rounds.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

namespace {

double now_us() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) * 1e6 + double(time.tv_nsec) / 1e3;
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) std::abort();
}

// Shared, as symmetric tensors are: in small pages.
uint64_t* allocate(size_t num_bytes) {
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  std::memset(memory, 1, num_bytes);
  return static_cast<uint64_t*>(memory);
}

// Few instructions a line: the more of them fit into the CPU's window, the more lines are on their
// way at once.
#if defined(__x86_64__)
[[gnu::target_clones("avx512f", "avx2", "default")]]
#endif
uint64_t read_both(const uint64_t* a, const uint64_t* b, size_t count) {
  uint64_t sum = 0;
#pragma GCC unroll 8
  for (size_t i = 0; i < count; ++i) sum |= a[i] | b[i];
  return sum;
}

double median_us(size_t num_bytes, int rounds, const int* cpus) {
  const uint64_t* inputs[] = {allocate(num_bytes), allocate(num_bytes)};
  const size_t half = num_bytes / 2 / sizeof(uint64_t);
  std::barrier barrier(2);
  std::vector<double> times;
  const auto work = [&](int rank) {
    pin(cpus[rank]);
    uint64_t sum = 0;
    for (int round = 0; round < rounds; ++round) {
      barrier.arrive_and_wait();
      const double start = now_us();
      sum |= read_both(inputs[0] + rank * half, inputs[1] + rank * half, half);
      barrier.arrive_and_wait();
      if (rank == 0) times.push_back(now_us() - start);
    }
    if (sum == 0) std::abort();  // or the compiler would leave out all of it
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  for (const uint64_t* input : inputs) munmap(const_cast<uint64_t*>(input), num_bytes);
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[size_t(rounds) / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const int cpus[] = {std::atoi(argv[2]), std::atoi(argv[3])};
  for (int i = 4; i < argc; ++i) {
    const size_t num_bytes = std::strtoull(argv[i], nullptr, 10);
    std::printf("%zu %.1f\n", num_bytes, median_us(num_bytes, std::atoi(argv[1]), cpus));
  }
}
