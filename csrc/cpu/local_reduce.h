// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the reductions on arrays of one process, for Python: what a rank does itself
// with bytes that came from other nodes. Arrays are addresses; codes out of range or without
// meaning raise Failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastcoll {

// Reduces the sources, in their order, into the target. No AVG: finish_array divides.
void reduce_arrays(int dtype, int op, const std::vector<uintptr_t>& sources, uintptr_t target,
                   size_t numel);

// Makes the type in which partial sums are kept of a dtype.
void widen_array(int dtype, uintptr_t source, uintptr_t target, size_t numel);

// Rounds partial results to the dtype, after what is left of the operation.
void finish_array(int dtype, int op, uintptr_t source, uintptr_t target, size_t numel,
                  int world_size);

}  // namespace fastcoll
