// SPDX-License-Identifier: Apache-2.0
// Device memory handed to other processes by the runtime's IPC handles: create, open (map) it from
// its handle, close (unmap). The way that works wherever cudaMalloc does, containers permitting.
//
// Such memory must outlive its mappings, unlike that of cuda_vmm.h. So a rank parks its region
// until it has seen every peer leave.
#pragma once

#include <cstddef>
#include <string>

namespace fastcoll {

struct CudaIpcMemory {
  std::byte* ptr;
  std::string handle;  // raw bytes, for cuda_ipc_open in another process
};

// num_bytes zeroes on `device`.
CudaIpcMemory cuda_ipc_create(int device, size_t num_bytes);
// Map another process's memory into `device`, with peer access if it lies on another one. A process
// can't open a handle of its own.
std::byte* cuda_ipc_open(int device, const std::string& handle);
void cuda_ipc_close(int device, std::byte* ptr);
// Only once every process that opened it has closed it: the driver promises nothing earlier.
void cuda_ipc_destroy(int device, std::byte* ptr);

}  // namespace fastcoll
