// SPDX-License-Identifier: Apache-2.0
// The descriptors of a peer's process, which groups share: with processes of its own as peers.
//
//   test_peer_process
//   test_peer_process wait     a peer, until a signal ends it
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "group/peer_process.h"
#include "require.h"

using namespace fastcoll;

namespace {

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

int open_pidfd(pid_t pid) {
  const int fd = int(syscall(SYS_pidfd_open, pid, 0));
  require(fd >= 0, "a pidfd");
  return fd;
}

// The bytes that can be read where the process has its first mapping.
ssize_t bytes_of(int memory, pid_t pid) {
  std::FILE* maps = std::fopen(("/proc/" + std::to_string(pid) + "/maps").c_str(), "r");
  unsigned long begin = 0;
  require(maps && std::fscanf(maps, "%lx", &begin) == 1, "the maps of a process");
  std::fclose(maps);
  char bytes[16];
  return pread(memory, bytes, sizeof bytes, off_t(begin));
}

class Child {
 public:
  Child() {
    int ends[2];
    require(pipe2(ends, O_CLOEXEC) == 0, "a pipe");
    pid = fork();
    if (pid == 0) {
      char go = 0;
      if (read(ends[0], &go, 1) == 1) execl("/proc/self/exe", "test_peer_process", "wait", nullptr);
      _exit(1);
    }
    close(ends[0]);
    gate_ = ends[1];
  }
  ~Child() { end(); }
  // Becomes another program, under its number.
  void become_another() {
    require(write(gate_, "g", 1) == 1, "a byte");
    const std::string path = "/proc/" + std::to_string(pid) + "/cmdline";
    for (std::string words; words.find("wait") == std::string::npos; usleep(1000)) {
      std::FILE* file = std::fopen(path.c_str(), "r");
      char text[256] = {};
      const size_t count = file ? std::fread(text, 1, sizeof text, file) : 0;
      if (file) std::fclose(file);
      words.assign(text, count);
    }
  }
  void end() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    close(gate_);
    pid = 0;
  }

  pid_t pid;

 private:
  int gate_;
};

void check_sharing() {
  PeerTable table;
  Child child, other;
  const int first_fd = open_pidfd(child.pid), second_fd = open_pidfd(child.pid);
  auto first = table.meet(child.pid, first_fd), second = table.meet(child.pid, second_fd);
  require(first == second, "one process, met twice");
  require_equal(first->pidfd(), first_fd, "its descriptor");
  require(!is_open(second_fd), "the second descriptor is closed");
  require(table.meet(other.pid, open_pidfd(other.pid)) != first, "another process");
  first.reset();
  require(is_open(first_fd), "a descriptor that a group still has");
  second.reset();
  require(!is_open(first_fd), "a descriptor that no group has");
  const int third_fd = open_pidfd(child.pid);
  require_equal(table.meet(child.pid, third_fd)->pidfd(), third_fd, "met once more");
}

void check_ends() {
  PeerTable table;
  Child child;
  const auto first = table.meet(child.pid, open_pidfd(child.pid));
  require(!first->has_ended(), "a process that lives");
  const pid_t pid = child.pid;
  child.end();
  require(first->has_ended(), "a process that ended");
  const int later_fd = open_pidfd(getpid());  // as of a later process with that number
  const auto later = table.meet(pid, later_fd);
  require(later != first && later->pidfd() == later_fd, "a later process of that number");
  require(table.meet(pid, open_pidfd(getpid())) == later, "the later process again");
}

void check_strangers() {
  PeerTable table;
  require(table.meet(0, -1) != table.meet(0, -1), "processes whose number can't be seen");
  Child child;
  const int fd = open_pidfd(child.pid);
  const auto unseen = table.meet(0, fd);
  require(unseen->pidfd() == fd && is_open(fd), "an unseen process with a pidfd");
  require(table.meet(0, open_pidfd(getpid())) != unseen, "another unseen process");
  const auto first = table.meet(child.pid, -1), second = table.meet(child.pid, -1);
  require(first != second && !first->has_ended(), "processes without a pidfd");
}

void check_memory() {
  PeerTable table;
  Child child;
  const auto peer = table.meet(child.pid, open_pidfd(child.pid));
  const int memory = peer->open_memory();
  require(memory >= 0 && bytes_of(memory, child.pid) > 0, "the memory of a process");
  require_equal(peer->open_memory(), memory, "the number of a second look");
  child.become_another();
  require(bytes_of(memory, child.pid) <= 0, "the memory of the program before");
  require_equal(peer->open_memory(), memory, "the number behind another program's start");
  require(bytes_of(memory, child.pid) > 0, "the memory of the new program");
  child.end();
  require_equal(peer->open_memory(), memory, "the number of a process that ended");
  require(is_open(memory), "its descriptor");
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) pause();
  check_sharing();
  check_ends();
  check_strangers();
  check_memory();
}
