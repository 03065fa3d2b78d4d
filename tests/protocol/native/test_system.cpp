// SPDX-License-Identifier: Apache-2.0
// Calls of the operating system, each by itself: CPUs, sleeps, the end of other processes, and
// their memory. Needs no group.
//
//   test_system
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/company.h"
#include "cpu/process_memory.h"
#include "cpu/text.h"
#include "cpu/wait.h"
#include "require.h"

using namespace fastcoll;

namespace {

// ---- time and CPUs ------------------------------------------------------------------------------

void check_spreading() {
  cpu_set_t allowed, after;
  require(sched_getaffinity(0, sizeof allowed, &allowed) == 0, "affinity");
  std::vector<uint32_t> cpus;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  if (cpus.size() < 2) return;
  const uint32_t one = cpus[0], two = cpus[1];
  const auto spreads = [](const std::vector<uint32_t>& places, int rank) {
    bool went = false;
    std::thread([&] { went = spread_out(places, rank); }).join();
    return went;
  };
  const auto only = [](uint32_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
  };
  // All CPUs but these two are out of the question.
  cpu_set_t both;
  CPU_ZERO(&both);
  CPU_SET(one, &both);
  CPU_SET(two, &both);
  sched_setaffinity(0, sizeof both, &both);
  const uint32_t nowhere = ~0u;
  require(spreads({one, one}, 1), "two on one CPU, none on the other");
  require(!spreads({one, one}, 0), "the last of them goes");
  require(!spreads({one, two}, 1), "one on each");
  require(!spreads({one, two, one}, 2), "two and one");
  require(spreads({one, two, one, one}, 3), "three and one");
  require(!spreads({one, two, one, one}, 2), "three and one, not the last");
  require(spreads({one, one, one, two}, 2), "three and one, and the last rank is the one");
  require(spreads({one, nowhere, CPU_SETSIZE, one}, 3), "ranks that run nowhere");
  require(!spreads({one, one, nowhere}, 2), "a rank that runs nowhere");
  require(!spreads({one, one, CPU_SETSIZE}, 2), "a CPU behind the last");
  std::thread([&] {
    const bool went = spread_out(std::vector<uint32_t>{one, one}, 1);
    sched_getaffinity(0, sizeof after, &after);
    require(went && CPU_EQUAL(&after, &both), "which CPUs a thread may use stays the same");
  }).join();
  std::thread([&] {
    only(one);
    require(!spread_out(std::vector<uint32_t>{one, one}, 1), "no other CPU is allowed");
    require_equal(current_cpu(), one, "the CPU of a thread");
    only(two);
    require_equal(current_cpu(), two, "the CPU of a thread that went");
  }).join();
  sched_setaffinity(0, sizeof allowed, &allowed);
}

void check_main_thread() {
  require(is_main_thread(), "the thread of main()");
  std::thread([] { require(!is_main_thread(), "another thread"); }).join();
  require_equal(num_openmp_threads(), 1, "threads without OpenMP");
}

void check_company() {
  Company company;
  require(!company.is_there(0) && !company.is_there(INT64_MAX), "nobody was seen");
  company.note_pause(1000, 1000 + Company::kSliceUs - 1);
  require(!company.is_there(2000), "a peer that yields soon is no stranger");
  // Every eighth part of the time is lost, and for a while a little more.
  constexpr int64_t kSliceUs = Company::kSliceUs, kShare = Company::kShare;
  int64_t time_us = 10'000;
  for (int turn = 0; turn < 1000; ++turn, time_us += kSliceUs * kShare)
    company.note_pause(time_us, time_us + kSliceUs);
  company.note_pause(time_us, time_us + Company::kBurstUs);
  require(!company.is_there(time_us), "peers and the kernel take a slice now and then");
  Company even;
  even.note_pause(0, Company::kBurstUs);
  even.note_pause(Company::kBurstUs + 200, Company::kBurstUs + 800);
  static_assert((Company::kBurstUs + 600) * kShare - (Company::kBurstUs + 800) ==
                Company::kBurstUs * kShare);
  require(!even.is_there(Company::kBurstUs + 800), "no more is lost than may be");
  // All of the time is lost. The peers forget at the same moment, wherever they began.
  const int64_t forget_us = (time_us / Company::kMemoryUs + 1) * Company::kMemoryUs;
  for (const int64_t start_us : {time_us, time_us + 7 * kSliceUs}) {
    Company busy;
    int num_slices = 0;
    int64_t end_us = start_us;
    while (!busy.is_there(end_us) && num_slices < 100) {
      busy.note_pause(end_us, end_us + kSliceUs);
      end_us += kSliceUs;
      ++num_slices;
    }
    // A slice costs kShare - 1 slices more than it takes.
    require_equal(num_slices, Company::kBurstUs * kShare / (kSliceUs * (kShare - 1)) + 1,
                  "lost slices until the rank sleeps");
    busy.note_pause(end_us + 10, end_us + 11);
    require(busy.is_there(end_us + 20), "a short yield proves nothing");
    require(busy.is_there(forget_us - 1) && !busy.is_there(forget_us), "the next full second");
    busy.note_pause(forget_us, forget_us + kSliceUs);
    require(!busy.is_there(forget_us + kSliceUs), "what was lost before is made up for");
  }
  // The machine slept for an hour: that is made up for at once.
  constexpr int64_t kHourUs = int64_t{3600} * Company::kMemoryUs, kLaterUs = kHourUs + 100'000;
  Company asleep;
  asleep.note_pause(0, kHourUs);
  require(asleep.is_there(kHourUs), "a yield of an hour");
  asleep.note_pause(kLaterUs + Company::kMemoryUs, kLaterUs + Company::kMemoryUs + kSliceUs);
  require(!asleep.is_there(kLaterUs + Company::kMemoryUs + kSliceUs), "a slice after it");
  Company patient(INT64_MAX);
  patient.note_pause(0, INT64_MAX - 1);
  require(!patient.is_there(1), "a limit that no yield reaches");
}

void check_clock() {
  const int64_t before = now_us();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const int64_t took = now_us() - before;
  require(took >= 29000 && took < 20000000, "a sleep of 30 ms took " + std::to_string(took));
  uint32_t word = 5;
  const int64_t start = now_us();
  futex_wait(&word, 5, 30000);
  require(now_us() - start >= 29000, "a sleep that nobody ends");
  futex_wait(&word, 4, 3600000000);  // the word has changed
  std::atomic<bool> is_over{false};
  std::thread sleeper([&] {
    futex_wait(&word, 5, 3600000000);
    is_over = true;
  });
  while (!is_over) {
    futex_wake_all(&word);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  sleeper.join();
  const long known = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  const bool has_barrier = known > 0 && (known & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0;
  require(membarrier_everywhere() == has_barrier, "a barrier of all processes");
  require(register_membarrier() == has_barrier, "whether the kernel has a barrier");
}

// ---- processes ----------------------------------------------------------------------------------

// A process that does so, and is no more when this is.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : parent(getpid()), pid(fork()) {
    if (pid < 0) std::abort();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() == parent) body();
      _exit(0);
    }
    pidfd = int(syscall(SYS_pidfd_open, pid, 0));
  }
  ~Child() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    close(pidfd);
  }
  void await(int options) const {
    siginfo_t info;
    require(waitid(P_PID, id_t(pid), &info, options | WNOWAIT) == 0, "a child's change");
  }
  PeerLink link() const { return {-1, pidfd, pid, -1}; }
  const pid_t parent, pid;
  int pidfd = -1;
};
void pause_forever() {
  for (;;) pause();
}

void check_fates() {
  const Child exits([] { _exit(3); }), dies([] { raise(SIGKILL); }), lives(pause_forever);
  exits.await(WEXITED);
  dies.await(WEXITED);
  require_equal(fate(exits.link()), "exited with status 3", "a fate");
  require_equal(fate(dies.link()), "was killed by signal 9 (Killed)", "a fate");
  require_equal(fate(lives.link()), "left the group; its process lives", "a fate");
  require_equal(fate({-1, -1, lives.pid, -1}), "ended or left the group", "a fate");
  require_equal(fate({}), "ended or left the group", "a fate");
  require(peer_is_gone(exits.link()) && !peer_is_gone(lives.link()), "whether a process is gone");
  waitpid(exits.pid, nullptr, 0);
  require_equal(fate(exits.link()), "ended (with which status only its parent knows)", "a fate");

  // A program without standard input may have one of its descriptors there.
  dup2(lives.pidfd, 0);
  require_equal(fate({-1, 0, lives.pid, -1}), "left the group; its process lives", "a fate");
  dup2(exits.pidfd, 0);
  require_equal(fate({-1, 0, exits.pid, -1}), "ended (with which status only its parent knows)",
                "a fate");

  const Child stops([] { raise(SIGSTOP); }), traced([] {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
  });
  stops.await(WSTOPPED);
  traced.await(WSTOPPED);
  require(process_is_stopped(stops.pid), "a process that is stopped");
  require(process_is_stopped(traced.pid), "a process that a debugger holds");
  const int free_descriptor = dup(0);
  close(free_descriptor);
  for (const int pid : {lives.pid, dies.pid, 0, -1, INT_MAX})
    require(!process_is_stopped(pid), "a process that is not stopped");
  require_equal(dup(0), free_descriptor, "a descriptor that is free");
  close(free_descriptor);
}

void check_links() {
  for (const bool hangs_up : {true, false}) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "sockets");
    const PeerLink link{ends[0], -1, 0, -1};
    require(send(ends[1], "x", 1, 0) == 1 && !peer_is_gone(link), "data is no loss");
    if (hangs_up) close(ends[1]);
    else shutdown(ends[1], SHUT_WR);
    require(peer_is_gone(link), "a peer that hung up");
    if (!hangs_up) close(ends[1]);
    close(ends[0]);
  }
  require(!peer_is_gone({}), "a peer of which nothing is known");
}

void check_farewells() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0, "sockets");
  const PeerLink link{ends[1], -1, 0, -1};
  Farewell farewell{};
  std::string text;
  require(!read_farewell(link, &farewell, &text), "nothing was said");
  // A message that is no farewell is passed over.
  const auto say = [&](uint64_t tag, uint64_t kind, size_t num_bytes = sizeof(Farewell)) {
    const Farewell words{tag, kind, 1};
    require(send(ends[0], &words, num_bytes, 0) == ssize_t(num_bytes), "a message");
  };
  say(kFarewell + 1, uint64_t(ErrorKind::timeout));
  say(kFarewell, uint64_t(ErrorKind::timeout), sizeof(Farewell) - 1);
  say(kFarewell, uint64_t(ErrorKind::usage));
  say(kFarewell, uint64_t(ErrorKind::aborted));
  say(kFarewell, 256 + uint64_t(ErrorKind::timeout));
  for (const ErrorKind kind :
       {ErrorKind::timeout, ErrorKind::desync, ErrorKind::peer_lost, ErrorKind::driver}) {
    const std::string said = "why\n" + std::to_string(int(kind));
    leave_farewell(ends[0], kind, 5, said);
    require(read_farewell(link, &farewell, &text), "a farewell");
    require_equal(text, printable(said), "its text");
    require_equal(farewell.kind, kind, "its kind");
    require_equal(farewell.ranks, 5, "its ranks");
  }
  say(kFarewell, uint64_t(ErrorKind::desync));
  require(read_farewell(link, &farewell, &text) && text.empty(), "a farewell without text");
  const std::string tale(kMostFarewellBytes, 't');
  leave_farewell(ends[0], ErrorKind::driver, 1, tale);
  require(read_farewell(link, &farewell, &text), "a long farewell");
  require_equal(text, tale.substr(sizeof farewell), "what fits of it");
  // The kernel tells first that the peer left our message unread.
  require(send(ends[1], "?", 1, 0) == 1, "a message");
  leave_farewell(ends[0], ErrorKind::peer_lost, 2, "bye");
  close(ends[0]);
  require(read_farewell(link, &farewell, &text), "a farewell behind an error");
  require_equal(text, "bye", "its text");
  require(!read_farewell(link, &farewell, &text), "nothing more was said");
  leave_farewell(ends[1], ErrorKind::driver, 1, "to nobody");
  close(ends[1]);
}

// ---- the memory of processes --------------------------------------------------------------------

// From here on this thread may not copy from processes, but it may read their memory files.
void forbid_copies(int error) {
  sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | uint32_t(error)),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    std::abort();
}

void check_memory() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  auto* pages = static_cast<char*>(
      mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (size_t i = 0; i < 4 * page; ++i) pages[i] = char(i * 7 + i / page);
  const Child owner(pause_forever);
  std::memset(pages, 0, page);  // here, not there
  mprotect(pages + 3 * page, page, PROT_NONE);
  const auto there = uint64_t(uintptr_t(pages));
  const auto copy = [&](int pid, uint64_t address, size_t num_bytes, int memory) {
    std::vector<char> got(num_bytes);
    const int error = read_process(pid, address, got.data(), num_bytes, memory);
    for (size_t i = 0; i < num_bytes && error == 0; ++i) {
      const size_t at = address - there + i;
      require(got[i] == char(at * 7 + at / page), "the bytes of another process");
    }
    return error;
  };
  const int memory = open_memory(owner.pid), none = -1;
  require(memory >= 0, "a process's memory file");
  require((fcntl(memory, F_GETFD) & FD_CLOEXEC) != 0, "that no other program inherits");
  for (const size_t num_bytes : {size_t{0}, size_t{1}, 4 * page})
    require_equal(copy(owner.pid, there, num_bytes, none), 0, "a copy");
  require_equal(copy(owner.pid, there + 5, page, memory), 0, "a copy");
  require_equal(copy(owner.pid, 8, 8, none), EFAULT, "a copy from nowhere");
  require_equal(copy(INT_MAX, there, 8, none), ESRCH, "a copy from nobody");
  for (const int refusal : {EPERM, ENOSYS, EACCES})
    std::thread([&] {
      forbid_copies(refusal);
      const bool is_other = refusal == EACCES;  // is no reason to try another way
      require_equal(copy(owner.pid, there + 5, page, memory), is_other ? refusal : 0, "a copy");
      require_equal(copy(owner.pid, there, 8, none), refusal, "a copy without another way");
      require(copy(owner.pid, 8, 8, memory) != 0, "a copy from nowhere");
    }).join();
  // Under a descriptor of any number; and of a process that has ended there is nothing to read.
  const Child ended(pause_forever);
  const int nothing = open_memory(ended.pid);
  kill(ended.pid, SIGKILL);
  ended.await(WEXITED);
  std::thread([&] {
    forbid_copies(EPERM);
    dup2(memory, 0);
    require_equal(copy(owner.pid, there + 5, page, 0), 0, "a copy through descriptor 0");
    require_equal(copy(ended.pid, there, 8, nothing), EFAULT, "a copy of nothing");
  }).join();
  close(nothing);
  close(memory);

  Readable readable;
  require(readable.covers(pages, 3 * page), "memory of this process");
  require(!readable.covers(pages, 3 * page + 1), "memory whose end can't be read");
  require(!readable.covers(pages + 4 * page - 1, 1), "memory that can't be read");
  require(!readable.covers(pages + 4 * page - 1, 2 * page), "memory whose beginning can't be read");
  require(!readable.covers(pages, size_t{1} << 48), "more than there are addresses");
  mprotect(pages, page, PROT_NONE);
  require(readable.covers(pages, 3 * page), "a piece that was tried before");
  require(!readable.covers(pages, 2 * page), "another piece");
  for (size_t i = 0; i < 15; ++i) readable.covers(pages + page + i, 1);
  require(readable.covers(pages, 3 * page), "a piece of the last few");
  readable.covers(pages + page + 15, 1);
  require(!readable.covers(pages, 3 * page), "a piece that was forgotten");
  munmap(pages, 4 * page);
}

}  // namespace

int main() {
  check_spreading();
  check_main_thread();
  check_company();
  check_clock();
  check_fates();
  check_links();
  check_farewells();
  check_memory();
}
