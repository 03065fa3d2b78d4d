// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_driver.h"

#include <array>
#include <atomic>
#include <cstdio>

namespace fastcoll {

namespace {

// The driver's versions from which on the used parts of the virtual memory API, and multicast
// objects, exist.
constexpr unsigned kVmmVersion = 12000, kMulticastVersion = 12010;

template <class Function>
void find(const char* name, Function& function, [[maybe_unused]] unsigned version = kVmmVersion) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  function = there ? reinterpret_cast<Function>(found) : nullptr;
}

int attribute(CUdevice_attribute which, int device) {
  const auto ask = driver_api().device_get_attribute;
  int value = 0;
  return ask && ask(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

// The context of a device that the runtime uses, too. It is kept as long as the process, as the
// runtime keeps it.
CUcontext primary_context(int device) {
  constexpr int kMostDevices = 256;
  static std::array<std::atomic<CUcontext>, kMostDevices> kept{};
  const bool is_possible = device >= 0 && device < kMostDevices;
  if (is_possible)
    if (const CUcontext found = kept[size_t(device)].load(std::memory_order_relaxed)) return found;
  const DriverApi& api = driver_api();
  const std::string what = "switching to device " + std::to_string(device);
  if (!api.has_contexts()) throw Failure(ErrorKind::driver, what + ": there is no CUDA driver");
  if (!is_possible) throw Failure(ErrorKind::usage, what + ": there is no such device");
  CUdevice handle = 0;
  CUcontext context = nullptr;
  check_cuda(api.init(0), what);
  check_cuda(api.device_get(&handle, device), what);
  check_cuda(api.primary_context_retain(&context, handle), what);
  kept[size_t(device)].store(context, std::memory_order_relaxed);
  return context;
}

}  // namespace

const DriverApi& driver_api() {
  static const DriverApi api = [] {
    DriverApi found{};
    find("cuGetErrorString", found.get_error_string);
    find("cuInit", found.init);
    find("cuDeviceGet", found.device_get);
    find("cuDevicePrimaryCtxRetain", found.primary_context_retain);
    find("cuCtxGetCurrent", found.context_get_current);
    find("cuCtxPushCurrent", found.context_push);
    find("cuCtxPopCurrent", found.context_pop);
    find("cuDeviceGetAttribute", found.device_get_attribute);
    find("cuMemGetAllocationGranularity", found.mem_get_allocation_granularity);
    find("cuMemCreate", found.mem_create);
    find("cuMemRelease", found.mem_release);
    find("cuMemExportToShareableHandle", found.mem_export);
    find("cuMemImportFromShareableHandle", found.mem_import);
    find("cuMemAddressReserve", found.mem_address_reserve);
    find("cuMemAddressFree", found.mem_address_free);
    find("cuMemMap", found.mem_map);
    find("cuMemUnmap", found.mem_unmap);
    find("cuMemSetAccess", found.mem_set_access);
    find("cuMemRetainAllocationHandle", found.mem_retain);
    find("cuMulticastGetGranularity", found.multicast_get_granularity, kMulticastVersion);
    find("cuMulticastCreate", found.multicast_create, kMulticastVersion);
    find("cuMulticastAddDevice", found.multicast_add_device, kMulticastVersion);
    find("cuMulticastBindMem", found.multicast_bind_mem, kMulticastVersion);
    find("cuMulticastUnbind", found.multicast_unbind, kMulticastVersion);
    return found;
  }();
  return api;
}

bool DriverApi::has_contexts() const {
  return init && device_get && primary_context_retain && context_get_current && context_push &&
         context_pop;
}

bool DriverApi::has_vmm() const {
  return mem_get_allocation_granularity && mem_create && mem_release && mem_export && mem_import &&
         mem_address_reserve && mem_address_free && mem_map && mem_unmap && mem_set_access;
}

bool DriverApi::has_multicast() const {
  return has_vmm() && mem_retain && multicast_get_granularity && multicast_create &&
         multicast_add_device && multicast_bind_mem && multicast_unbind;
}

void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call shall not report it again
  throw Failure(ErrorKind::driver,
                what + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

void check_cuda(CUresult error, const std::string& what) {
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  if (driver_api().get_error_string) driver_api().get_error_string(error, &text);
  throw Failure(ErrorKind::driver, what + ": " + (text ? text : "unknown error") + " (CUresult " +
                                       std::to_string(int(error)) + ")");
}

int device_count(std::string* reason) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  cudaGetLastError();
  if (reason) *reason = cudaGetErrorString(error);
  return 0;
}

DeviceFacts device_facts(int device) {
  cudaDeviceProp prop{};
  check_cuda(cudaGetDeviceProperties(&prop, device), "reading device " + std::to_string(device));
  DeviceFacts facts;
  facts.name = prop.name;
  char text[3];
  for (const char byte : prop.uuid.bytes) {
    std::snprintf(text, sizeof text, "%02x", unsigned(static_cast<unsigned char>(byte)));
    facts.uuid += text;
  }
  facts.capability = prop.major * 10 + prop.minor;
  facts.num_sms = prop.multiProcessorCount;
  facts.has_vmm_fds =
      driver_api().has_vmm() &&
      attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) &&
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
  facts.has_multicast = driver_api().has_multicast() &&
                        attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device) != 0;
  return facts;
}

bool can_access_peer(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  const cudaError_t error = cudaDeviceCanAccessPeer(&can, device, peer);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && can != 0;
}

void enable_peer_access(int device, int peer) {
  const OnDevice on(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
  else
    check_cuda(error, "enabling access from device " + std::to_string(device) + " to device " +
                          std::to_string(peer));
}

std::string driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
  if (version == 0) return "none";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void clear_memory(void* ptr, size_t num_bytes) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  cudaError_t error = cudaMemsetAsync(ptr, 0, num_bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check_cuda(error, "clearing memory");
}

OnDevice::OnDevice(int device) {
  const CUcontext wanted = primary_context(device);
  CUcontext current = nullptr;
  check_cuda(driver_api().context_get_current(&current), "asking for the current context");
  if (current == wanted) return;
  if (const CUresult error = driver_api().context_push(wanted); error != CUDA_SUCCESS)
    check_cuda(error, "switching to device " + std::to_string(device));
  pushed_ = true;
}

OnDevice::~OnDevice() {
  CUcontext popped = nullptr;
  if (pushed_) driver_api().context_pop(&popped);
}

}  // namespace fastcoll
