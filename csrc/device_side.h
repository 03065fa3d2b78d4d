// SPDX-License-Identifier: Apache-2.0
// A group's side on a GPU, as far as its known calls need it. fastcoll._cuda has it, fastcoll._C
// calls it. No exception crosses from one extension to the other.
#pragma once

#include <optional>

#include "check.h"
#include "plan.h"

namespace fastcoll {

inline constexpr const char* kDeviceSideName = "fastcoll.device_side";  // of the capsule

class DeviceSide {
 public:
  // Whether no kernel has left a verdict. Never waits.
  virtual bool is_well() const noexcept = 0;
  // Start a plan without counts on a stream, as DeviceGroup::launch does; its failure, if any.
  // Waits where the launch queue is full.
  virtual std::optional<Failure> start(const Plan& plan, const std::byte* input, std::byte* output,
                                       void* stream, double limit_s) noexcept = 0;

 protected:
  ~DeviceSide() = default;
};

}  // namespace fastcoll
