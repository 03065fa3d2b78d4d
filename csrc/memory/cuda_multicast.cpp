// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_multicast.h"

#include "memory/cuda_driver.h"
#include "memory/cuda_vmm.h"

namespace fastcoll {

namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

const DriverApi& multicast_api() {
  const DriverApi& api = driver_api();
  if (!api.has_multicast())
    throw Failure(ErrorKind::unsupported, "this driver has no multicast objects (CUDA 12.1)");
  return api;
}

CUmulticastObjectProp properties(int world_size, size_t num_bytes) {
  CUmulticastObjectProp prop{};
  prop.numDevices = unsigned(world_size);
  prop.size = num_bytes;
  prop.handleTypes = kHandleType;
  return prop;
}

}  // namespace

// The least that will do: the driver's recommendation may be more than a whole region.
size_t cuda_multicast_granularity(int world_size, size_t least_bytes) {
  const CUmulticastObjectProp prop = properties(world_size, least_bytes);
  size_t granularity = 0;
  check_cuda(multicast_api().multicast_get_granularity(&granularity, &prop,
                                                       CU_MULTICAST_GRANULARITY_MINIMUM),
             "asking for the granularity of multicast");
  return granularity;
}

CudaMulticast::CudaMulticast(int device, int world_size, size_t num_bytes, int fd)
    : device_(device), world_size_(world_size), num_bytes_(num_bytes) {
  const OnDevice on(device_);
  const DriverApi& api = multicast_api();
  if (fd < 0) {
    const CUmulticastObjectProp prop = properties(world_size, num_bytes);
    check_cuda(api.multicast_create(&handle_, &prop),
               "making a multicast object (cuMulticastCreate)");
    return;
  }
  // The descriptor itself, passed as a pointer: the driver's way.
  void* as_pointer = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  check_cuda(api.mem_import(&handle_, as_pointer, kHandleType),
             "opening the multicast object (cuMemImportFromShareableHandle)");
}

CudaMulticast::~CudaMulticast() {
  try {
    close();
  } catch (const Failure&) {  // the context is broken: nothing left to save
  }
}

int CudaMulticast::export_fd() const {
  int fd = -1;
  check_cuda(multicast_api().mem_export(&fd, handle_, kHandleType, 0),
             "exporting the multicast object (cuMemExportToShareableHandle)");
  return fd;
}

void CudaMulticast::add_device() {
  check_cuda(multicast_api().multicast_add_device(handle_, device_),
             "adding device " + std::to_string(device_) +
                 " to the multicast object (cuMulticastAddDevice)");
}

void CudaMulticast::bind(std::byte* region) {
  const OnDevice on(device_);
  const DriverApi& api = multicast_api();
  CUmemGenericAllocationHandle memory = 0;
  check_cuda(api.mem_retain(&memory, region),
             "finding a region's memory (cuMemRetainAllocationHandle)");
  const CUresult error = api.multicast_bind_mem(handle_, 0, memory, 0, num_bytes_, 0);
  api.mem_release(memory);  // the region's mapping keeps it
  check_cuda(error, "binding a region to the multicast object (cuMulticastBindMem)");
  bound_ = true;
}

std::byte* CudaMulticast::map(std::byte* at) {
  const size_t alignment = cuda_multicast_granularity(world_size_, num_bytes_);
  ptr_ = cuda_vmm_map(handle_, device_, num_bytes_, at, alignment);
  is_placed_ = at != nullptr;
  return ptr_;
}

void CudaMulticast::close() {
  if (handle_ == 0) return;
  const OnDevice on(device_);
  const DriverApi& api = multicast_api();
  const unsigned long long handle = handle_;
  std::byte* const ptr = ptr_;
  const bool bound = bound_;
  handle_ = 0;
  ptr_ = nullptr;
  bound_ = false;
  // All steps are taken even if one fails; the first error is reported.
  CUresult error = CUDA_SUCCESS;
  const auto note = [&](CUresult result) {
    if (error == CUDA_SUCCESS) error = result;
  };
  if (ptr) {
    const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(ptr);
    note(api.mem_unmap(address, num_bytes_));
    if (!is_placed_) note(api.mem_address_free(address, num_bytes_));
  }
  if (bound) note(api.multicast_unbind(handle, device_, 0, num_bytes_));
  note(api.mem_release(handle));
  check_cuda(error, "closing the multicast object");
}

}  // namespace fastcoll
