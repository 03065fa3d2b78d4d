// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the reductions on arrays of one process, for Python: a rank combines bytes that
// came from other nodes. Arrays are addresses; codes out of range or without meaning raise Failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastcoll {

// Reduces the sources, in their order, into the target. No AVG: finish_array divides.
void reduce_arrays(int dtype, int op, const std::vector<uintptr_t>& sources, uintptr_t target,
                   size_t numel);

// Widens elements of a dtype to the type of its partial sums.
void widen_array(int dtype, uintptr_t source, uintptr_t target, size_t numel);

// Rounds partial results to the dtype, after the rest of the operation (AVG's division).
void finish_array(int dtype, int op, uintptr_t source, uintptr_t target, size_t numel,
                  int world_size);

// Codes fp32 elements for the way between nodes (cpu/wire.h), divided by `divisor` before. The
// feedback is fp32, or 0 for none.
void code_array(int wire, uintptr_t source, uintptr_t coded, uintptr_t feedback, size_t numel,
                int divisor);

// Adds coded arrays in their order, to a target in fp32 or to one that is coded again. One array
// to fp32: decodes it.
void add_coded_arrays(int wire, const std::vector<uintptr_t>& sources, uintptr_t target,
                      size_t numel, bool coded_again);

// Bytes of a coded array.
size_t coded_array_bytes(int wire, size_t numel);

}  // namespace fastcoll
