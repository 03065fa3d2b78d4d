// SPDX-License-Identifier: Apache-2.0
// Huge pages for a fresh result that somebody else allocated and this call fills. A first write to
// each page of 4 KiB costs a fault, which together take longer than a large all_reduce.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace fastcoll {

// Asks for huge pages where they lie within num_bytes as a whole, so no other memory grows. A page
// that was touched before stays as it is. A kernel without huge pages refuses, which is no error.
inline void ask_for_huge_pages(void* ptr, size_t num_bytes) {
  constexpr uintptr_t kHugeBytes = uintptr_t{2} << 20;
  if (num_bytes < 2 * kHugeBytes) return;
  const uintptr_t start = (uintptr_t(ptr) + kHugeBytes - 1) & ~(kHugeBytes - 1);
  const uintptr_t stop = (uintptr_t(ptr) + num_bytes) & ~(kHugeBytes - 1);
  madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE);
}

}  // namespace fastcoll
