// SPDX-License-Identifier: Apache-2.0
#include "cpu/wait.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "cpu/text.h"

extern "C" [[gnu::weak]] const ptrdiff_t __rseq_offset;  // of glibc, from 2.35 on

namespace fastcoll {

namespace {

int64_t read_us(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return int64_t(time.tv_sec) * 1000000 + time.tv_nsec / 1000;
}

}  // namespace

int64_t now_us() { return read_us(CLOCK_MONOTONIC); }
int64_t tick_us() { return read_us(CLOCK_MONOTONIC_COARSE); }

bool is_main_thread() { return gettid() == getpid(); }

int num_openmp_threads() {
  using Count = int (*)();
  static std::atomic<Count> known{nullptr};
  Count count = known.load(std::memory_order_relaxed);
  if (!count) {  // torch or another library may load it at any time
    count = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    known.store(count, std::memory_order_relaxed);
  }
  return count ? count() : 1;
}

uint32_t current_cpu() {
  // The kernel keeps the CPU in each thread's `struct rseq`, as its second field, `cpu_id`. A
  // negative value means that it does not. The library's sched_getcpu() looks there, too, but takes
  // several times as long.
  if (&__rseq_offset) [[likely]] {
    const auto* area = static_cast<const char*>(__builtin_thread_pointer()) + __rseq_offset;
    int32_t seen;
    __atomic_load(reinterpret_cast<const int32_t*>(area) + 1, &seen, __ATOMIC_RELAXED);
    if (seen >= 0) [[likely]]
      return uint32_t(seen);
  }
  const int cpu = sched_getcpu();
  return cpu < 0 ? ~0u : uint32_t(cpu);
}

bool spread_out(std::span<const uint32_t> cpus, int rank) {
  const uint32_t here = cpus[size_t(rank)];
  cpu_set_t allowed;
  if (here >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  int counts[CPU_SETSIZE] = {};
  for (size_t peer = 0; peer < cpus.size(); ++peer) {
    if (cpus[peer] >= CPU_SETSIZE) continue;
    if (cpus[peer] == here && peer > size_t(rank)) return false;
    ++counts[cpus[peer]];
  }
  uint32_t least = here;
  for (uint32_t i = 1; i < CPU_SETSIZE; ++i) {  // from here on: neighbours share caches
    const uint32_t cpu = (here + i) % CPU_SETSIZE;
    if (CPU_ISSET(cpu, &allowed) && counts[cpu] < counts[least]) least = cpu;
  }
  if (counts[here] < counts[least] + 2) return false;
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(least, &there);
  if (sched_setaffinity(0, sizeof there, &there) != 0) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);
  return true;
}

bool peer_is_gone(const PeerLink& link) {
  // poll() ignores negative descriptors. Data waiting in the socket is not a loss; a hang-up is.
  pollfd fds[2] = {{link.socket, POLLRDHUP, 0}, {link.pidfd, POLLIN, 0}};
  if (poll(fds, 2, 0) <= 0) return false;
  return (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 || (fds[1].revents & POLLIN) != 0;
}

void leave_farewell(int socket, ErrorKind kind, uint64_t ranks, const std::string& text) {
  const Farewell farewell{kFarewell, uint64_t(kind), ranks};
  std::string message(reinterpret_cast<const char*>(&farewell), sizeof farewell);
  message += text.substr(0, kMostFarewellBytes - sizeof farewell);
  // A peer that is gone does not get it.
  (void)!send(socket, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool read_farewell(const PeerLink& link, Farewell* farewell, std::string* text) {
  char message[kMostFarewellBytes];
  for (;;) {
    const ssize_t length = recv(link.socket, message, sizeof message, MSG_DONTWAIT);
    if (length < 0 && errno == ECONNRESET) continue;  // reported once, before the queued messages
    if (length <= 0) return false;
    if (size_t(length) < sizeof *farewell) continue;
    std::memcpy(farewell, message, sizeof *farewell);
    const uint64_t kind = farewell->kind;  // all of it: an ErrorKind would hold its lowest byte
    const bool is_known =
        kind == uint64_t(ErrorKind::timeout) || kind == uint64_t(ErrorKind::desync) ||
        kind == uint64_t(ErrorKind::peer_lost) || kind == uint64_t(ErrorKind::driver);
    if (farewell->tag != kFarewell || !is_known) continue;
    *text = printable({message + sizeof *farewell, size_t(length) - sizeof *farewell});
    return true;
  }
}

namespace {

struct ProcessStat {
  char state = 0;       // 0: there is no such process, or it is not visible
  int wait_status = 0;  // as of waitpid, once it has ended
};

ProcessStat read_stat(int pid) {
  if (pid <= 0) return {};
  char path[32], line[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (!file) return {};
  const size_t length = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[length] = 0;
  const char* after_name = std::strrchr(line, ')');
  const char* last = std::strrchr(line, ' ');
  if (!after_name || after_name[1] != ' ') return {};
  return {after_name[2], std::atoi(last)};
}

}  // namespace

bool process_is_stopped(int pid) {
  const char state = read_stat(pid).state;
  return state == 'T' || state == 't';
}

std::string fate(const PeerLink& link) {
  // Its sockets close a moment before it has ended altogether.
  pollfd end{link.pidfd, POLLIN, 0};
  const bool ended = link.pidfd >= 0 && poll(&end, 1, 100) > 0;
  // Until its parent has asked, a process that ended still has an entry, with the status.
  const ProcessStat stat = read_stat(link.pid);
  if (stat.state == 'Z' || stat.state == 'X') {
    const int status = stat.wait_status;
    if (WIFSIGNALED(status))
      return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" +
             strsignal(WTERMSIG(status)) + ")";
    return "exited with status " + std::to_string(WEXITSTATUS(status));
  }
  if (ended) return "ended (with which status only its parent knows)";
  if (link.pidfd >= 0) return "left the group; its process lives";
  return "ended or left the group";
}

bool register_membarrier() {
  static const bool registered =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
  return registered;
}

bool membarrier_everywhere() {
  return register_membarrier() &&
         syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

void futex_wait(uint32_t* word, uint32_t seen, int64_t limit_us) {
  const timespec limit{limit_us / 1000000, (limit_us % 1000000) * 1000};
  // Not FUTEX_PRIVATE: the word is shared between processes. Any return is a reason to look again.
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fastcoll
