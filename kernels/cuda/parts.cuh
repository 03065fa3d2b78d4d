// SPDX-License-Identifier: Apache-2.0
// Where the parts of a call lie, if its verb has a part for each rank. They lie end to end, or each
// by itself, as the tensors of a list do. Peers do not know which: parts that lie apart are staged.
#pragma once

#include "cuda/call.h"
#include "prim.cuh"

namespace fastcoll {

// This rank's part for another rank; start: where it lies in an input that is end to end.
FASTCOLL_DEVICE const std::byte* given_part(const DeviceCall& call, int rank, uint64_t start) {
  return call.input_apart ? call.input_parts[rank] : call.input + start;
}

// The place for a part from another rank, in the same way.
FASTCOLL_DEVICE std::byte* taken_part(const DeviceCall& call, int rank, uint64_t start) {
  return call.output_apart ? call.output_parts[rank] : call.output + start;
}

}  // namespace fastcoll
