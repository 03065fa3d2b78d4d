// SPDX-License-Identifier: Apache-2.0
// The errors of the C++ side. A failure has a kind, a text and the ranks at fault;
// python/errors.cpp makes the Python error of that kind. A refusal by the kernel names the limit
// behind it, so that users can raise it.
#pragma once

#include <sys/resource.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fastcoll {

enum class ErrorKind : uint32_t {
  usage = 1,
  unsupported,
  timeout,
  desync,
  peer_lost,
  driver,
  aborted
};
inline constexpr ErrorKind kLastKind = ErrorKind::aborted;

class Failure : public std::runtime_error {
 public:
  Failure(ErrorKind kind, const std::string& text, uint64_t ranks = 0)
      : std::runtime_error(text), kind_(kind), ranks_(ranks) {}
  ErrorKind kind() const { return kind_; }
  uint64_t ranks() const { return ranks_; }  // bit set of the ranks at fault

 private:
  ErrorKind kind_;
  uint64_t ranks_;
};

// The host asked to stop (KeyboardInterrupt): its own exception is already set.
struct Interrupted {};

// The host leaves a wait; nothing else has changed, and another thread may go on with it.
struct SteppedOut {};

// The limit or rule by which the kernel refused something, and how to change it; "": unknown.
inline std::string limit_behind(int error) {
  struct Limit {
    int error;
    decltype(RLIMIT_NOFILE) resource;
    const char *name, *option;
  };
  constexpr Limit kLimits[] = {
      {EMFILE, RLIMIT_NOFILE, "RLIMIT_NOFILE", "-n"},
      {ETOOMANYREFS, RLIMIT_NOFILE, "RLIMIT_NOFILE", "-n"},
      {EFBIG, RLIMIT_FSIZE, "RLIMIT_FSIZE", "-f"},
      {ENOMEM, RLIMIT_AS, "RLIMIT_AS", "-v"},
  };
  for (const Limit& limit : kLimits) {
    rlimit found;
    if (limit.error != error || getrlimit(limit.resource, &found) != 0 ||
        found.rlim_cur == RLIM_INFINITY)
      continue;
    return std::string(" (") + limit.name + " is " + std::to_string(found.rlim_cur) +
           ": raise it with ulimit " + limit.option + ")";
  }
  if (error == EPERM)
    return " (a filter of system calls, or the rights of this process, forbid it: look at the "
           "container's seccomp profile)";
  if (error == ENOSYS) return " (this kernel, or a filter of system calls, does not have it)";
  if (error == ENFILE) return " (this machine may not open more files: raise fs.file-max)";
  if (error == ENOMEM) return " (there is no memory left, or no mapping: see vm.max_map_count)";
  return "";
}

[[noreturn]] inline void throw_system(const std::string& what) {
  const int error = errno;
  throw Failure(ErrorKind::driver, what + ": " + std::strerror(error) + limit_behind(error));
}

}  // namespace fastcoll
