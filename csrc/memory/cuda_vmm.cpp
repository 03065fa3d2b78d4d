// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_vmm.h"

#include <unistd.h>

#include "memory/cuda_driver.h"

namespace fastcoll {

namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

const DriverApi& vmm_api() {
  const DriverApi& api = driver_api();
  if (!api.has_vmm())
    throw Failure(ErrorKind::unsupported, "this driver has no virtual memory management");
  return api;
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  prop.requestedHandleTypes = kHandleType;
  return prop;
}

// A handle of physical memory; each mapping keeps the memory.
class Handle {
 public:
  Handle(const DriverApi& api, CUmemGenericAllocationHandle handle) : api_(api), handle_(handle) {}
  ~Handle() { api_.mem_release(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const DriverApi& api_;
  CUmemGenericAllocationHandle handle_;
};

// The driver's functions need the device's context to exist; the runtime makes it.
void make_context() { check_cuda(cudaFree(nullptr), "making a context"); }

}  // namespace

std::byte* cuda_vmm_reserve(int device, size_t num_bytes) {
  const OnDevice on(device);
  CUdeviceptr ptr = 0;
  check_cuda(vmm_api().mem_address_reserve(&ptr, num_bytes, 0, 0, 0), "reserving addresses");
  return reinterpret_cast<std::byte*>(ptr);
}

void cuda_vmm_unreserve(int device, std::byte* ptr, size_t num_bytes) {
  const OnDevice on(device);
  check_cuda(vmm_api().mem_address_free(reinterpret_cast<CUdeviceptr>(ptr), num_bytes),
             "freeing addresses");
}

std::byte* cuda_vmm_map(unsigned long long handle, int device, size_t num_bytes, std::byte* at,
                        size_t alignment) {
  const OnDevice on(device);
  const DriverApi& api = vmm_api();
  CUdeviceptr ptr = reinterpret_cast<CUdeviceptr>(at);
  if (!at)
    check_cuda(api.mem_address_reserve(&ptr, num_bytes, alignment, 0, 0), "reserving addresses");
  bool mapped = false;
  try {
    check_cuda(api.mem_map(ptr, num_bytes, 0, handle, 0), "mapping a region");
    mapped = true;
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_cuda(api.mem_set_access(ptr, num_bytes, &access, 1),
               "giving device " + std::to_string(device) + " access to a region");
  } catch (...) {
    if (mapped) api.mem_unmap(ptr, num_bytes);
    if (!at) api.mem_address_free(ptr, num_bytes);
    throw;
  }
  return reinterpret_cast<std::byte*>(ptr);
}

size_t cuda_vmm_granularity(int device) {
  const CUmemAllocationProp prop = properties(device);
  size_t granularity = 0;
  check_cuda(vmm_api().mem_get_allocation_granularity(&granularity, &prop,
                                                      CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
             "asking for the granularity of memory");
  return granularity;
}

CudaVmmMemory cuda_vmm_create(int device, size_t num_bytes, std::byte* at) {
  const OnDevice on(device);
  make_context();
  const DriverApi& api = vmm_api();
  const CUmemAllocationProp prop = properties(device);
  CUmemGenericAllocationHandle raw = 0;
  check_cuda(api.mem_create(&raw, num_bytes, &prop, 0),
             "allocating " + std::to_string(num_bytes) + " bytes (cuMemCreate)");
  const Handle handle(api, raw);
  CudaVmmMemory memory{cuda_vmm_map(handle.get(), device, num_bytes, at), -1};
  try {
    clear_memory(memory.ptr, num_bytes);
    check_cuda(api.mem_export(&memory.fd, handle.get(), kHandleType, 0),
               "exporting a region (cuMemExportToShareableHandle)");
  } catch (...) {
    cuda_vmm_close(device, memory.ptr, num_bytes, at != nullptr);
    throw;
  }
  return memory;
}

std::byte* cuda_vmm_open(int device, int fd, size_t num_bytes, std::byte* at) {
  const OnDevice on(device);
  make_context();
  const DriverApi& api = vmm_api();
  CUmemGenericAllocationHandle raw = 0;
  // The descriptor itself, passed as a pointer: the driver's way.
  void* as_pointer = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  check_cuda(api.mem_import(&raw, as_pointer, kHandleType),
             "opening a peer's region (cuMemImportFromShareableHandle)");
  return cuda_vmm_map(Handle(api, raw).get(), device, num_bytes, at);
}

void cuda_vmm_close(int device, std::byte* ptr, size_t num_bytes, bool is_placed) {
  if (!ptr) return;
  const OnDevice on(device);
  const DriverApi& api = vmm_api();
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(ptr);
  check_cuda(api.mem_unmap(address, num_bytes), "unmapping a region");
  if (!is_placed) check_cuda(api.mem_address_free(address, num_bytes), "freeing addresses");
}

}  // namespace fastcoll
