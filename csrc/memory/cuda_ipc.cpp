// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_ipc.h"

#include <cstring>

#include "memory/cuda_driver.h"

namespace fastcoll {

CudaIpcMemory cuda_ipc_create(int device, size_t num_bytes) {
  const OnDevice on(device);
  void* ptr = nullptr;
  check_cuda(cudaMalloc(&ptr, num_bytes), "allocating " + std::to_string(num_bytes) + " bytes");
  try {
    clear_memory(ptr, num_bytes);
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, ptr), "exporting a region (cudaIpcGetMemHandle)");
    return {static_cast<std::byte*>(ptr),
            std::string(reinterpret_cast<const char*>(&handle), sizeof handle)};
  } catch (...) {
    cudaFree(ptr);
    throw;
  }
}

std::byte* cuda_ipc_open(int device, const std::string& handle) {
  const OnDevice on(device);
  cudaIpcMemHandle_t raw;
  if (handle.size() != sizeof raw)
    throw Failure(ErrorKind::driver, "an IPC handle of " + std::to_string(handle.size()) +
                                         " bytes where " + std::to_string(sizeof raw) +
                                         " were expected");
  std::memcpy(&raw, handle.data(), sizeof raw);
  void* ptr = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&ptr, raw, cudaIpcMemLazyEnablePeerAccess),
             "opening a peer's region (cudaIpcOpenMemHandle)");
  return static_cast<std::byte*>(ptr);
}

void cuda_ipc_close(int device, std::byte* ptr) {
  if (!ptr) return;
  const OnDevice on(device);
  check_cuda(cudaIpcCloseMemHandle(ptr), "closing a peer's region");
}

void cuda_ipc_destroy(int device, std::byte* ptr) {
  if (!ptr) return;
  const OnDevice on(device);
  check_cuda(cudaFree(ptr), "freeing a region");
}

}  // namespace fastcoll
