// SPDX-License-Identifier: Apache-2.0
// Calls of the operating system, as test_system's, where it answers otherwise than on this machine.
// It has other CPUs, it refuses, or it copies less than it is asked for. All of it is made up here.
//
//   test_other_system
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/process_memory.h"
#include "cpu/wait.h"
#include "require.h"

using namespace fastcoll;

namespace {

// ---- the system ---------------------------------------------------------------------------------

std::vector<int> cpus_of(const cpu_set_t& set) {
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

struct System {
  std::vector<int> cpus;  // that this thread may use
  bool tells_cpus = true, sets_cpus = true;
  std::vector<std::vector<int>> moves;
  int cpu = -1;

  bool registers = true, has_barrier = true;
  std::vector<long> barriers;

  // Of one copy: from another process, and from its file.
  size_t most_bytes = 1 << 20;
  int error = 0, file_error = 0;
  std::vector<size_t> copies, file_copies;
} machine;

// As the kernel's `struct rseq` begins.
struct ThreadArea {
  int cpu_at_start, cpu;
};
thread_local ThreadArea area{7, -1};

int answer(int error) {
  if (error == 0) return 0;
  errno = error;
  return -1;
}
ssize_t copy(void* dst, const void* src, size_t num_bytes, int error, std::vector<size_t>& copies) {
  require(copies.size() < 100, "a copy that does not end");
  copies.push_back(num_bytes);
  if (error != 0) return answer(error);
  const size_t count = std::min(num_bytes, machine.most_bytes);
  std::memcpy(dst, src, count);
  return ssize_t(count);
}

}  // namespace

extern "C" {
extern const ptrdiff_t __rseq_offset;
const ptrdiff_t __rseq_offset =
    reinterpret_cast<char*>(&area) - static_cast<char*>(__builtin_thread_pointer());

int sched_getcpu() noexcept { return machine.cpu; }
int sched_getaffinity(pid_t, size_t, cpu_set_t* set) noexcept {
  CPU_ZERO(set);
  for (const int cpu : machine.cpus) CPU_SET(cpu, set);
  return answer(machine.tells_cpus ? 0 : EPERM);
}
int sched_setaffinity(pid_t, size_t, const cpu_set_t* set) noexcept {
  machine.moves.push_back(cpus_of(*set));
  return answer(machine.sets_cpus ? 0 : EINVAL);
}
long syscall(long number, ...) noexcept {
  if (number != SYS_membarrier) return answer(ENOSYS);
  va_list list;
  va_start(list, number);
  const long command = va_arg(list, int);
  va_end(list);
  machine.barriers.push_back(command);
  const bool registers = command == MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED;
  return answer((registers ? machine.registers : machine.has_barrier) ? 0 : EINVAL);
}
ssize_t process_vm_readv(pid_t, const iovec* local, unsigned long, const iovec* remote,
                         unsigned long, unsigned long) noexcept {
  require_equal(local->iov_len, remote->iov_len, "bytes to copy");
  return copy(local->iov_base, remote->iov_base, remote->iov_len, machine.error, machine.copies);
}
ssize_t pread(int, void* dst, size_t num_bytes, off_t address) {
  const auto* src = reinterpret_cast<const void*>(uintptr_t(address));
  return copy(dst, src, num_bytes, machine.file_error, machine.file_copies);
}
}

namespace {

// ---- CPUs ---------------------------------------------------------------------------------------

void check_spreading() {
  using Cpus = std::vector<int>;
  const auto spread = [](const Cpus& cpus, const std::vector<uint32_t>& places, int rank) {
    machine.cpus = cpus;
    machine.moves.clear();
    return spread_out(places, rank);
  };
  require(spread({0, 1, 2}, {0, 0, 2}, 1), "a CPU without a rank");
  require(machine.moves == std::vector<Cpus>{{1}, {0, 1, 2}}, "there, and no longer pinned");
  // Of CPUs that are as busy, the nearest: neighbours share caches.
  require(spread({0, 1, 2, 3}, {1, 1}, 1) && machine.moves[0] == Cpus{2}, "the next CPU");
  require(spread({0, 1, 2, 3}, {3, 3}, 1) && machine.moves[0] == Cpus{0}, "behind the last");
  require(spread({0, 1, 3}, {1, 1}, 1) && machine.moves[0] == Cpus{3}, "the next that it may use");
  machine.sets_cpus = false;
  require(!spread({0, 1}, {0, 0}, 1), "a rank that may not go");
  require(machine.moves == std::vector<Cpus>{{1}}, "nor tries again");
  machine.sets_cpus = true;
  machine.tells_cpus = false;
  require(!spread({0, 1}, {0, 0}, 1) && machine.moves.empty(), "a rank that is told no CPUs");
}

void check_current_cpu() {
  const auto seen = [](int in_area, int otherwise) {
    area.cpu = in_area;
    machine.cpu = otherwise;
    return current_cpu();
  };
  require_equal(seen(3, 5), 3, "the CPU in a thread's area");
  require_equal(seen(0, 5), 0, "the first CPU");
  require_equal(seen(-1, 5), 5, "of a thread without such an area");
  require_equal(seen(-1, 0), 0, "the first CPU");
  require_equal(seen(-1, -1), ~0u, "of a system that does not tell");
}

// ---- barriers -----------------------------------------------------------------------------------

void check_barrier() {
  using Commands = std::vector<long>;
  const long registers = MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED,
             passes = MEMBARRIER_CMD_GLOBAL_EXPEDITED;
  require(register_membarrier() && machine.barriers == Commands{registers}, "a registration");
  require(membarrier_everywhere(), "a barrier");
  require(machine.barriers == Commands{registers, passes}, "which is one call");
  machine.has_barrier = false;
  require(!membarrier_everywhere() && register_membarrier(), "a barrier that is refused");
  require(machine.barriers == Commands{registers, passes, passes}, "after it was asked for");
}
// In another process, as one registers only once.
void check_refused_registration() {
  const pid_t pid = fork();
  if (pid == 0) {
    machine.registers = false;
    require(!membarrier_everywhere() && !register_membarrier(), "a registration that is refused");
    require_equal(machine.barriers.size(), 1, "is tried once, and no barrier");
    _exit(0);
  }
  int status = -1;
  require(waitpid(pid, &status, 0) == pid && status == 0, "a process that may not register");
}

// ---- the memory of processes --------------------------------------------------------------------

void check_parts() {
  using Sizes = std::vector<size_t>;
  const std::string text = "0123456789";
  const auto require_copy = [&](int expected, const Sizes& copies, const Sizes& file_copies) {
    machine.copies.clear();
    machine.file_copies.clear();
    std::string got(text.size(), ' ');
    errno = EPERM;  // of another call before
    const int error = read_process(1, uint64_t(uintptr_t(text.data())), got.data(), got.size(), 0);
    require_equal(error, expected, "the end of a copy");
    require(error != 0 || got == text, "the bytes of a copy: " + got);
    require(machine.copies == copies && machine.file_copies == file_copies, "the parts of a copy");
  };
  machine.most_bytes = 4;  // of 2 GiB, in truth
  require_copy(0, {10, 6, 2}, {});
  machine.error = EPERM;
  require_copy(0, {10}, {10, 6, 2});
  machine.file_error = EPERM;
  require_copy(EPERM, {10}, {10});
  machine.error = machine.file_error = 0;
  machine.most_bytes = 0;
  require_copy(EFAULT, {10}, {});
}

}  // namespace

int main() {
  check_refused_registration();
  check_spreading();
  check_current_cpu();
  check_barrier();
  check_parts();
}
