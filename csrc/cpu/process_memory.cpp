// SPDX-License-Identifier: Apache-2.0
#include "cpu/process_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace fastcoll {

int read_process(int pid, uint64_t address, void* dst, size_t num_bytes, int memory) {
  auto* into = static_cast<char*>(dst);
  bool is_refused = false;
  while (num_bytes != 0) {
    const iovec local{into, num_bytes};
    const iovec remote{reinterpret_cast<void*>(uintptr_t(address)), num_bytes};
    const ssize_t count = is_refused ? pread(memory, into, num_bytes, off_t(address))
                                     : process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count < 0 && !is_refused && memory >= 0 && (errno == EPERM || errno == ENOSYS)) {
      is_refused = true;
      continue;
    }
    if (count < 0) return errno;
    if (count == 0) return EFAULT;
    into += count;
    address += uint64_t(count);
    num_bytes -= size_t(count);
  }
  return 0;
}

int open_memory(int pid) {
  return open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDONLY | O_CLOEXEC);
}

bool Readable::covers(const void* ptr, size_t num_bytes) {
  const Span span{uint64_t(uintptr_t(ptr)), num_bytes};
  if (!Location::fits(span.address + num_bytes)) return false;
  if (std::find(seen_.begin(), seen_.end(), span) != seen_.end()) return true;
  char ends[2];
  const int pid = getpid();
  if (read_process(pid, span.address, &ends[0], 1) != 0 ||
      read_process(pid, span.address + num_bytes - 1, &ends[1], 1) != 0)
    return false;
  seen_[next_++ % seen_.size()] = span;
  return true;
}

}  // namespace fastcoll
