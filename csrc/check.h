// SPDX-License-Identifier: Apache-2.0
// The errors of the C++ side. bindings.cpp turns each kind into the Python class of the same name.
#pragma once

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

[[noreturn]] inline void throw_system(const std::string& what) {
  throw Failure(ErrorKind::driver, what + ": " + std::strerror(errno));
}

}  // namespace fastcoll
