// SPDX-License-Identifier: Apache-2.0
// A group's side on a GPU, as far as its known calls need it. fastcoll._cuda has it, fastcoll._C
// calls it. No exception crosses from one extension to the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "check.h"
#include "plan.h"

namespace fastcoll {

inline constexpr const char* kDeviceSideName = "fastcoll.device_side";  // of the capsule

// The memory of a call.
struct DeviceOperands {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  // Of uneven parts: the elements sent to each rank, then those received from each.
  std::span<const uint64_t> counts = {};
  // By rank, where the parts of a side lie apart; then `input` or `output` is nullptr. Only for
  // algorithms of takes_parts_apart (kernels/cuda/call.h).
  std::span<const std::byte* const> input_parts = {};
  std::span<std::byte* const> output_parts = {};
};

// A send or a receive of this rank's.
struct DeviceMessage {
  bool sends;
  std::byte* data;
  uint64_t numel;
  DType dtype;
  int peer;
  uint32_t tag;
};

class DeviceSide {
 public:
  // Whether no kernel has left a verdict. Never waits.
  virtual bool is_healthy() const noexcept = 0;
  // Start a plan on a stream, as DeviceGroup::launch does; its failure, if any. Waits where the
  // launch queue is full.
  virtual std::optional<Failure> start(const Plan& plan, const DeviceOperands& operands,
                                       void* stream, double limit_s) noexcept = 0;
  // The same for messages, as one kernel: each peer and direction at most once. At most so many
  // thread blocks for each.
  virtual std::optional<Failure> start(std::span<const DeviceMessage> messages, int most_channels,
                                       void* stream, double limit_s) noexcept = 0;

  // Put an event behind a stream's work so far. It is made if null, and to be dropped in the end.
  virtual std::optional<Failure> record(void*& event, void* stream) noexcept = 0;
  virtual std::optional<Failure> make_stream_wait(void* stream, void* event) noexcept = 0;
  virtual bool is_event_complete(void* event) noexcept = 0;  // never waits
  virtual void drop(void* event) noexcept = 0;

 protected:
  ~DeviceSide() = default;
};

}  // namespace fastcoll
