// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's devices, and those of its functions that the runtime does not wrap. Nothing
// here needs a driver to load: without one there are 0 devices.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "check.h"

namespace fastcoll {

// Throws a DriverError with the failed step and its reason; the error is cleared.
void check_cuda(cudaError_t error, const std::string& what);
void check_cuda(CUresult error, const std::string& what);
// For every call: no text is made before there is an error.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) [[unlikely]]
    check_cuda(error, std::string(what));
}
inline void check_cuda(CUresult error, const char* what) {
  if (error != CUDA_SUCCESS) [[unlikely]]
    check_cuda(error, std::string(what));
}

// Devices this process can use. Any error of the driver counts as none; `reason` gets its text.
int device_count(std::string* reason = nullptr);

struct DeviceFacts {
  std::string name;
  std::string uuid;  // tells devices apart across processes; MIG instances have their own
  int capability;    // 90 for sm_90
  int num_sms;
  bool has_vmm_fds;    // memory can be handed to other processes as descriptors
  bool has_multicast;  // NVLink SHARP, and a driver that knows how to use it
};
DeviceFacts device_facts(int device);
bool can_access_peer(int device, int peer);
// Let kernels of `device` reach the memory that this process allocates on `peer`. May be repeated.
void enable_peer_access(int device, int peer);
// Zero memory of the current device and wait for that, in a stream of its own. Kernels of other
// groups may wait for ranks that are on their way here.
void clear_memory(void* ptr, size_t num_bytes);
std::string driver_version();  // "13.0"; "none" without a driver

// Makes a device this thread's current one until the end of the scope. It puts its context on the
// thread's stack of contexts, so that a thread without one has none again. Switching back by
// cudaSetDevice would make a context on GPU 0, hundreds of MB, in every process.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
};

// Found at run time, so that the extension needs no libcuda to load. Null: the driver lacks it.
struct DriverApi {
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuInit) init;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&::cuCtxGetCurrent) context_get_current;
  decltype(&::cuCtxPushCurrent) context_push;
  decltype(&::cuCtxPopCurrent) context_pop;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&::cuMemCreate) mem_create;
  decltype(&::cuMemRelease) mem_release;
  decltype(&::cuMemExportToShareableHandle) mem_export;
  decltype(&::cuMemImportFromShareableHandle) mem_import;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemUnmap) mem_unmap;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuMemRetainAllocationHandle) mem_retain;
  decltype(&::cuMulticastGetGranularity) multicast_get_granularity;
  decltype(&::cuMulticastCreate) multicast_create;
  decltype(&::cuMulticastAddDevice) multicast_add_device;
  decltype(&::cuMulticastBindMem) multicast_bind_mem;
  decltype(&::cuMulticastUnbind) multicast_unbind;
  bool has_contexts() const;
  bool has_vmm() const;
  bool has_multicast() const;
};
const DriverApi& driver_api();

}  // namespace fastcoll
