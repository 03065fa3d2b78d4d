// SPDX-License-Identifier: Apache-2.0
// Codes floats to cross between nodes, and adds coded arrays. It works on arrays of one process,
// with the same bits at every SIMD level. docs/numerics.md has the definition.
//
// int8 and fp8 are coded in blocks of kWireBlock elements, of which the last may be short. A block
// is a scale in fp32 and a byte for each element. So a part of an array that begins with a block is
// coded as it would be alone. bf16 has neither blocks nor scales.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace fastcoll {

inline constexpr std::size_t kWireBlock = 128;

/// Pointers may have any byte alignment. The arrays do not overlap.
struct CodeArgs {
  void* coded;         ///< coded_bytes() of them
  const void* source;  ///< fp32
  void* feedback;      ///< fp32, added to the source; becomes the error of the coding, or null
  std::size_t numel;
  int divisor;  ///< of the source, before the feedback is added
};

/// Rows are coded arrays of at least `numel` elements each, and there is at least one.
struct WireFns {
  /// An error that is not finite becomes 0: it would spoil all later calls.
  void (*code)(const CodeArgs&);
  /// target = the sum of the decoded rows in their order, in fp32. One row: decodes it.
  void (*add)(void* target, const void* const* rows, int num_rows, std::size_t numel);
  /// coded = the same sum, coded. It may be one of the rows.
  void (*add_coded)(void* coded, const void* const* rows, int num_rows, std::size_t numel);
};

/// The functions of the current SIMD level, or nullptr for Wire::none. They set the floating-point
/// environment they need by themselves.
const WireFns* wire_fns(Wire wire);

constexpr std::size_t coded_bytes(Wire wire, std::size_t numel) {
  if (wire == Wire::none) return 4 * numel;
  if (wire == Wire::bf16) return 2 * numel;
  return numel + 4 * ((numel + kWireBlock - 1) / kWireBlock);
}

}  // namespace fastcoll
