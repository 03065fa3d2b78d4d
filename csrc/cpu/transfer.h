// SPDX-License-Identifier: Apache-2.0
// A send or a receive, as the program's thread and the engine (p2p.h) share it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "cpu/wait.h"
#include "dtypes.h"

namespace fastcoll {

inline constexpr int kAnyPeer = -1;

// One send or receive. Guarded by the engine's mutex, but for `done`.
struct Transfer {
  bool sends = false;
  int peer = 0;  // kAnyPeer: any rank; then the first rank that offers
  uint32_t tag = 0;
  DType dtype = DType::uint8;
  uint64_t numel = 0;
  std::byte* data = nullptr;
  size_t num_bytes = 0;
  double timeout_s = 0;
  bool has_other_senders = false;  // of kAnyPeer: ranks outside of the group may answer, too
  std::string site;                // where the program asked for it; only in a group that traces

  enum class State { fresh, offered, moving } state = State::fresh;
  int place = 0;            // of the message in the sender's channel
  uint64_t number = 0;      // of the message
  uint64_t location = 0;    // of the message's bytes, as `Message` has it
  uint64_t seen = 0;        // offers looked through, in vain
  bool is_awaited = false;  // its starter waits for it next
  bool is_copied = false;   // sends: the receiver may copy it; receives: it does
  size_t moved_bytes = 0;
  WaitedTime waited{0};  // once it is open
  int64_t matched_us = 0;
  std::exception_ptr error;
  std::atomic<bool> done{false};
};

// "send(float32, numel=8, dst=1, tag=0)".
inline std::string describe(const Transfer& transfer) {
  const std::string peer = transfer.peer == kAnyPeer ? "any" : std::to_string(transfer.peer);
  return std::string(transfer.sends ? "send(" : "recv(") + dtype_name(transfer.dtype) +
         ", numel=" + std::to_string(transfer.numel) + (transfer.sends ? ", dst=" : ", src=") +
         peer + ", tag=" + std::to_string(transfer.tag) + ")";
}

}  // namespace fastcoll
