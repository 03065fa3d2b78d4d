// SPDX-License-Identifier: Apache-2.0
// Decides whether pieces of memory overlap that must not: a written piece may overlap no other one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace fastcoll {

struct Extent {
  const std::byte* begin;
  const std::byte* end;
  bool is_written;
};

inline bool is_earlier(const Extent& a, const Extent& b) { return a.begin < b.begin; }

// Not inlined: GCC 12 sees std::sort leave an array of fewer than its 16 elements, and warns.
[[gnu::noinline]] inline void sort_by_address(std::span<Extent> extents) {
  std::sort(extents.begin(), extents.end(), is_earlier);
}

// Whether nothing that is written overlaps anything else. Puts them into order.
inline bool apart(std::span<Extent> extents) {
  if (!std::is_sorted(extents.begin(), extents.end(), is_earlier)) sort_by_address(extents);
  const std::byte *end_of_any = nullptr, *end_of_written = nullptr;
  for (const Extent& extent : extents) {
    if (extent.begin == extent.end) continue;
    if (extent.begin < (extent.is_written ? end_of_any : end_of_written)) return false;
    end_of_any = std::max(end_of_any, extent.end);
    if (extent.is_written) end_of_written = std::max(end_of_written, extent.end);
  }
  return true;
}

}  // namespace fastcoll
