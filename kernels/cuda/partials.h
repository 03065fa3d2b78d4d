// SPDX-License-Identifier: Apache-2.0
// The operands of partials.cuh. Plain data, for the host, the device and the simulator.
#pragma once

#include "dtypes.h"

namespace fastcoll {

inline constexpr int kMaxPartials = 72;

struct PartialsCall {
  const std::byte* rows[kMaxPartials];  // of nodes or ranks; aligned to their elements
  std::byte* output;                    // as is this; may be a row
  uint64_t numel;                       // of a row
  int32_t num_rows;
  int32_t divisor;  // of AVG, else 0
  Op op;
  bool widened;  // the rows are accumulators: of narrow floats fp32
};

}  // namespace fastcoll
