// SPDX-License-Identifier: Apache-2.0
// Device memory of the virtual memory API: create, open (map) it from its descriptor, close
// (unmap). Descriptors travel to other processes over the same sockets as memfd's. A mapping keeps
// the memory, so ranks may close in any order, and a killed process leaves nothing behind.
#pragma once

#include <cstddef>

namespace fastcoll {

struct CudaVmmMemory {
  std::byte* ptr;
  int fd;  // the caller's to close; the mapping does not need it
};

// num_bytes must be a multiple of this on every device of the group.
size_t cuda_vmm_granularity(int device);

// Addresses without memory, in which memory can be placed later, piece by piece.
std::byte* cuda_vmm_reserve(int device, size_t num_bytes);
void cuda_vmm_unreserve(int device, std::byte* ptr, size_t num_bytes);

// num_bytes zeroes on `device`. at: where they are placed, in reserved addresses; nullptr:
// anywhere.
CudaVmmMemory cuda_vmm_create(int device, size_t num_bytes, std::byte* at = nullptr);
// Map it into `device`, wherever it lies; the descriptor stays the caller's.
std::byte* cuda_vmm_open(int device, int fd, size_t num_bytes, std::byte* at = nullptr);
// is_placed: it lies in reserved addresses, which stay reserved.
void cuda_vmm_close(int device, std::byte* ptr, size_t num_bytes, bool is_placed = false);
// The same as opening, for memory that a CUmemGenericAllocationHandle names; the handle stays the
// caller's. The address gets this alignment; 0 leaves it to the driver.
std::byte* cuda_vmm_map(unsigned long long handle, int device, size_t num_bytes,
                        std::byte* at = nullptr, size_t alignment = 0);

}  // namespace fastcoll
