// SPDX-License-Identifier: Apache-2.0
// The descriptors that tell of another process. Decides that all groups of this process share them.
// Each group of 64 ranks would have 126 of its own, and a usual limit of open files is 1024.
#pragma once

#include <map>
#include <memory>
#include <mutex>

namespace fastcoll {

// One process that is a peer.
class PeerProcess {
 public:
  // Takes over `pidfd`; -1: there is none.
  PeerProcess(int pid, int pidfd) : pid_(pid), pidfd_(pidfd) {}
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  int pidfd() const { return pidfd_; }
  bool has_ended() const;  // false also where there is no pidfd
  // A result of open_memory, or -1. Each call opens it anew where it may, and the number stays: the
  // process may have become another program since the last one.
  int open_memory();

 private:
  const int pid_, pidfd_;
  std::mutex mutex_;
  int memory_ = -1;  // guarded by mutex_
};

// The peers of this process. The caller has one thread at a time call it.
class PeerTable {
 public:
  // Returns a process. Takes over `pidfd`, and closes it where the process is known. One whose
  // number can't be seen (0), or that has no pidfd, is nobody else's.
  std::shared_ptr<PeerProcess> meet(int pid, int pidfd);

 private:
  std::map<int, std::weak_ptr<PeerProcess>> living_;  // by process id
};

}  // namespace fastcoll
