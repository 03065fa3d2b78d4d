// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

// A process with other values where this one has its own, or one that has ended.
class Stranger {
 public:
  explicit Stranger(bool ends) : parent(getpid()), pid(fork()) {
    if (pid < 0) std::abort();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a finding ends this program at once
      while (!ends && getppid() == parent) pause();
      _exit(0);
    }
    if (ends) waitpid(pid, nullptr, 0);
    is_there_ = !ends;
  }
  ~Stranger() {
    if (!is_there_) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  const pid_t parent, pid;

 private:
  bool is_there_;
};
