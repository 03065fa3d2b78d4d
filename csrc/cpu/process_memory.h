// SPDX-License-Identifier: Apache-2.0
// The private memory of other processes, which is only read, never written. Decides how it is read,
// and which memory of this process the others can read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace fastcoll {

// Copy from another process's memory. The kernel allows it between ranks of one user, unless Yama's
// ptrace_scope or a seccomp filter forbids it. Returns 0, or the errno of the failure, perhaps
// after a part was copied. `memory` is a result of open_memory, for a permission that was taken
// away.
int read_process(int pid, uint64_t address, void* dst, size_t num_bytes, int memory = -1);

// A descriptor of a process's memory; -1 without one. The kernel checks the permission when it is
// opened and not again. So it outlives a later prctl(PR_SET_DUMPABLE), ptrace_scope or seccomp
// filter. It is slower than process_vm_readv.
int open_memory(int pid);

// Whether other processes can copy from a piece of this one's memory. They can't where a driver
// mapped it, as with pinned memory. Tried on both ends of the piece; a few pieces are remembered,
// as a try takes a microsecond.
class Readable {
 public:
  bool covers(const void* ptr, size_t num_bytes);

 private:
  struct Span {
    uint64_t address, num_bytes;
    bool operator==(const Span&) const = default;
  };
  std::array<Span, 16> seen_{};
  size_t next_ = 0;
};

}  // namespace fastcoll
