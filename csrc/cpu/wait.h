// SPDX-License-Identifier: Apache-2.0
// What waiting needs from the operating system: time, the CPU one runs on, futex sleep and wake,
// and whether a peer's process is still there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "check.h"

namespace fastcoll {

// The program around a group, as far as a waiting rank has to know it.
class Host {
 public:
  virtual ~Host() = default;
  virtual void blocking() {}                         // a wait gets long: let others run (the GIL)
  virtual bool interrupted() { return false; }       // the program wants to stop (Ctrl-C)
  virtual std::string interruption() { return {}; }  // by what: the error that was raised then
  virtual bool steps_out() { return false; }  // it leaves a wait that another thread goes on with
  virtual std::string call_site() { return {}; }  // where it made the call that runs, if noted
};

// Kept for the life of a group, so that the kernel tells when a peer is gone. -1: not there.
struct PeerLink {
  int socket = -1;
  int pidfd = -1;
  int pid = 0;
};

int64_t now_us();
int64_t end_of_wait_us(double limit_s);  // 0 and less are no limit
uint32_t current_cpu();

// `cpus`: where each rank runs. If at least two more run here than on another CPU that this thread
// may use, the last of them goes there: ranks that wait by yielding look busy to the scheduler,
// which leaves three on one CPU and one on another for seconds. Whether this thread went; which
// CPUs it may use stays the same.
bool spread_out(std::span<const uint32_t> cpus, int rank);
bool peer_is_gone(const PeerLink& link);

// What a rank that could not finish init leaves in its sockets (bootstrap/farewell.py): who is to
// blame. A rank that died leaves nothing.
inline constexpr uint64_t kFarewell = 0x6c6c657765726166ULL;  // "farewell"
inline constexpr size_t kMostFarewellBytes = 2048;
struct Farewell {
  uint64_t tag;
  uint64_t kind;  // ErrorKind
  uint64_t ranks;
};
void leave_farewell(int socket, ErrorKind kind, uint64_t ranks, const std::string& text);
bool read_farewell(const PeerLink& link, Farewell* farewell, std::string* text);

bool process_is_stopped(int pid);  // as by SIGSTOP; false where it can't be known

// What became of a peer that hung up, as text: "was killed by signal 9 (Killed)".
std::string fate(const PeerLink& link);

// The sleeper's store-load handshake: after this call every process that registered has executed a
// full barrier. False where the kernel can't; sleeps must then be short.
bool membarrier_everywhere();
bool register_membarrier();

void futex_wait(uint32_t* word, uint32_t seen, int64_t limit_us);
void futex_wake_all(uint32_t* word);

}  // namespace fastcoll
