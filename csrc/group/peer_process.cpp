// SPDX-License-Identifier: Apache-2.0
#include "group/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "cpu/process_memory.h"

namespace fastcoll {

PeerProcess::~PeerProcess() {
  if (pidfd_ >= 0) ::close(pidfd_);
  if (memory_ >= 0) ::close(memory_);
}

bool PeerProcess::has_ended() const {
  pollfd end{pidfd_, POLLIN, 0};
  return pidfd_ >= 0 && poll(&end, 1, 0) > 0;
}

int PeerProcess::open_memory() {
  const int opened = fastcoll::open_memory(pid_);
  const std::lock_guard guard(mutex_);
  if (opened < 0) return memory_;
  if (memory_ < 0) return memory_ = opened;
  dup3(opened, memory_, O_CLOEXEC);  // other groups' threads may be reading by it
  ::close(opened);
  return memory_;
}

std::shared_ptr<PeerProcess> PeerTable::meet(int pid, int pidfd) {
  if (pid <= 0 || pidfd < 0) return std::make_shared<PeerProcess>(pid, pidfd);
  // A process that lives keeps its number.
  if (const auto known = living_[pid].lock(); known && !known->has_ended()) {
    ::close(pidfd);
    return known;
  }
  std::erase_if(living_, [](const auto& entry) { return entry.second.expired(); });
  const auto made = std::make_shared<PeerProcess>(pid, pidfd);
  living_[pid] = made;
  return made;
}

}  // namespace fastcoll
