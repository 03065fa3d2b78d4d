// SPDX-License-Identifier: Apache-2.0
// CUDA made of the CPU: the runtime and driver functions that csrc calls, and the launches. With it
// g++ builds fastcoll._cuda, whose bindings, groups and memory are the real ones.
//
// Memory is a memfd. A kernel does nothing, but those of sends. The devices on which this process
// made a context are noted. As in the runtime, a thread that never chose a device makes one on
// device 0.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "cuda/launch.h"
#include "fake_events.h"
#include "memory/cuda_driver.h"

namespace {

constexpr int kDevices = 8;
constexpr int kCapacity = 132;  // thread blocks

std::mutex mutex;
std::set<int> contexts;
std::atomic<uint64_t> created_bytes{0};
std::map<CUmemGenericAllocationHandle, int> handles;  // -> descriptor
std::map<uintptr_t, size_t> plain;                    // of cudaMalloc
CUmemGenericAllocationHandle next_handle = 1;
thread_local int thread_device = 0;
thread_local std::vector<CUcontext> stack;
bool captures = false;                // every stream, in capture 1
std::atomic<uint64_t> launches{0};    // of collectives
std::array<uint64_t, 20> launched{};  // of the last one: see fake_launched
bool refuses = false;                 // every launch of a collective
std::atomic<bool> is_full = false;    // the launch queue: whoever launches waits
std::atomic<bool> is_waiting = false;

int device_of(CUcontext context) { return int(reinterpret_cast<uintptr_t>(context)) - 1; }
CUcontext context_of(int device) {
  const std::lock_guard guard(mutex);
  contexts.insert(device);
  return reinterpret_cast<CUcontext>(uintptr_t(device) + 1);
}
// A call that works in the current context, which the runtime makes if there is none.
cudaError_t use() {
  if (stack.empty()) stack.push_back(context_of(thread_device));
  return cudaSuccess;
}

void* map_bytes(size_t num_bytes) {
  return mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// ---- the driver

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult retain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = which != CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}
CUresult add_handle(CUmemGenericAllocationHandle* handle, int fd) {
  const std::lock_guard guard(mutex);
  handles[*handle = next_handle++] = fd;
  return CUDA_SUCCESS;
}
CUresult mem_create(CUmemGenericAllocationHandle* handle, size_t num_bytes,
                    const CUmemAllocationProp*, unsigned long long) {
  use();
  created_bytes += num_bytes;
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  return ftruncate(fd, off_t(num_bytes)) == 0 ? add_handle(handle, fd) : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult mem_release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard guard(mutex);
  close(handles.at(handle));
  handles.erase(handle);
  return CUDA_SUCCESS;
}
int fd_of(CUmemGenericAllocationHandle handle) {
  const std::lock_guard guard(mutex);
  return handles.at(handle);
}
CUresult mem_export(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                    unsigned long long) {
  *static_cast<int*>(fd) = fcntl(fd_of(handle), F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}
CUresult mem_import(CUmemGenericAllocationHandle* handle, void* fd, CUmemAllocationHandleType) {
  use();
  return add_handle(handle, fcntl(int(reinterpret_cast<uintptr_t>(fd)), F_DUPFD_CLOEXEC, 0));
}
CUresult reserve(CUdeviceptr* ptr, size_t num_bytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *ptr = reinterpret_cast<CUdeviceptr>(found);
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult address_free(CUdeviceptr ptr, size_t num_bytes) {
  munmap(reinterpret_cast<void*>(ptr), num_bytes);
  return CUDA_SUCCESS;
}
CUresult mem_map(CUdeviceptr ptr, size_t num_bytes, size_t, CUmemGenericAllocationHandle handle,
                 unsigned long long) {
  void* found = mmap(reinterpret_cast<void*>(ptr), num_bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, fd_of(handle), 0);
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult mem_unmap(CUdeviceptr ptr, size_t num_bytes) {
  mmap(reinterpret_cast<void*>(ptr), num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
       -1, 0);
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

const std::map<std::string, void*> kFunctions = {
    {"cuInit", reinterpret_cast<void*>(&init)},
    {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
    {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
    {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(&attribute)},
    {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)},
    {"cuMemCreate", reinterpret_cast<void*>(&mem_create)},
    {"cuMemRelease", reinterpret_cast<void*>(&mem_release)},
    {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&mem_export)},
    {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&mem_import)},
    {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
    {"cuMemAddressFree", reinterpret_cast<void*>(&address_free)},
    {"cuMemMap", reinterpret_cast<void*>(&mem_map)},
    {"cuMemUnmap", reinterpret_cast<void*>(&mem_unmap)},
    {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
};

cudaError_t find_function(const char* name, void** function,
                          cudaDriverEntryPointQueryResult* result) {
  const auto found = kFunctions.find(name);
  *function = found == kFunctions.end() ? nullptr : found->second;
  *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace

cudaError_t use_context() { return use(); }

// ---- the runtime

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = stack.empty() ? thread_device : device_of(stack.back());
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  thread_device = device;
  if (!stack.empty()) stack.pop_back();
  return use();
}
cudaError_t cudaGetDeviceCount(int* found) {
  *found = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  *prop = {};
  std::strcpy(prop->name, "Fake");
  prop->uuid.bytes[0] = char(device);
  prop->major = 9;
  prop->multiProcessorCount = kCapacity;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return use(); }
cudaError_t cudaDeviceSynchronize() { return use(); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the fake"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return find_function(name, function, result);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return find_function(name, function, result);
}
cudaError_t cudaMalloc(void** ptr, size_t num_bytes) {
  *ptr = map_bytes(num_bytes);
  const std::lock_guard guard(mutex);
  plain[reinterpret_cast<uintptr_t>(*ptr)] = num_bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* ptr) {
  use();
  const std::lock_guard guard(mutex);
  const auto found = plain.find(reinterpret_cast<uintptr_t>(ptr));
  if (found == plain.end()) return ptr ? cudaErrorInvalidValue : cudaSuccess;
  munmap(ptr, found->second);
  plain.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** ptr, size_t num_bytes, unsigned) {
  *ptr = map_bytes(num_bytes);
  return use();
}
cudaError_t cudaMemset(void*, int, size_t) { return use(); }  // of fresh memory: it is zero
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return use(); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return use();
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return use(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return use(); }
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) { return use(); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return use();
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* ptr) {
  *handle = {};
  std::memcpy(handle, &ptr, sizeof ptr);
  return use();
}
cudaError_t cudaIpcOpenMemHandle(void** ptr, cudaIpcMemHandle_t handle, unsigned) {
  std::memcpy(ptr, &handle, sizeof *ptr);
  return use();
}
cudaError_t cudaIpcCloseMemHandle(void*) { return use(); }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return use();
}
cudaError_t fake_capture_info(cudaStreamCaptureStatus* status, unsigned long long* id) {
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = captures;
  return use();
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  return fake_capture_info(status, id);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t*,
                                        const cudaGraphNode_t**, size_t*) {
  return fake_capture_info(status, id);
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return use(); }
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return use(); }

// ---- for the tests

#pragma GCC visibility push(default)
// Bit d: this process made a context on device d.
uint64_t fake_contexts() {
  const std::lock_guard guard(mutex);
  uint64_t bits = 0;
  for (const int device : contexts) bits |= uint64_t{1} << device;
  return bits;
}
// Of all memory that was ever made by cuMemCreate.
uint64_t fake_created_bytes() { return created_bytes; }
void fake_capture(bool begins) { captures = begins; }
uint64_t fake_launches() { return launches; }
// The last one's verb, dtype, op, algorithm, numel, root, input, output, stream, limit in ns, and
// the host's words. Then whether it has counts, and those of a group of two. At last that group's
// parts that lie apart: of the input, of the output.
const uint64_t* fake_launched() { return launched.data(); }
void fake_refuse(bool refuses_all) { refuses = refuses_all; }
void fake_fill_queue(bool fills) { is_full = fills; }
bool fake_waits() { return is_waiting; }
#pragma GCC visibility pop

}  // extern "C"

// ---- the launches

namespace fastcoll {

int load_kernels(int) {
  use();
  return kCapacity;
}
bool can_start_early() { return true; }
bool has_kernel(Algorithm, Verb, DType, bool) { return true; }
LaunchShape shape_of(const Plan&, int) { return {1, kMaxBlockThreads, uint32_t{kPackBytes}}; }
void launch_collective(const Plan& plan, DeviceCall call, const Place& place,
                       const std::optional<LaunchShape>&) {
  use();
  launched = {uint64_t(plan.verb),
              uint64_t(plan.dtype),
              uint64_t(plan.op),
              uint64_t(plan.algorithm),
              plan.numel,
              uint64_t(plan.root),
              reinterpret_cast<uint64_t>(call.input),
              reinterpret_cast<uint64_t>(call.output),
              reinterpret_cast<uint64_t>(place.stream),
              call.limit_ns,
              reinterpret_cast<uint64_t>(call.host),
              uint64_t(plan.splits != 0)};
  std::copy_n(call.counts, 4, launched.begin() + 12);
  for (size_t rank = 0; rank < 2; ++rank) {
    if (call.input_apart) launched[16 + rank] = reinterpret_cast<uint64_t>(call.input_parts[rank]);
    if (call.output_apart)
      launched[18 + rank] = reinterpret_cast<uint64_t>(call.output_parts[rank]);
  }
  if (refuses) throw Failure(ErrorKind::driver, "refused by the fake");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (is_waiting = is_full.load(); is_full; std::this_thread::yield())
    if (std::chrono::steady_clock::now() > end) throw Failure(ErrorKind::driver, "full for ever");
  is_waiting = false;
  ++launches;
  note_launch(place.stream);
}
// The one kernel that does something: its sends, then its receives. A message lies where a real one
// is staged, and its number is in the words of its pair.
void launch_transfers(const std::vector<PairTransfer>& transfers, const GroupCall& call, int,
                      const Place& place) {
  use();
  note_launch(place.stream);
  const GpuLayout& layout = call.layout;
  const auto pad = [&](int rank) { return reinterpret_cast<GpuPad*>(call.regions[rank]); };
  const auto staged = [&](int peer, uint64_t number) {
    return layout.pair_scratch(peer, 0) + number % 2 * kPairHalfBytes;
  };
  for (const PairTransfer& one : transfers) {
    if (!one.sends) continue;
    uint64_t& sent = pad(one.peer)->receive[call.rank][0].from_peer.progress;
    std::memcpy(call.regions[call.rank] + staged(one.peer, sent + 1), one.data,
                one.numel * dtype_size(one.dtype));
    __atomic_fetch_add(&sent, 1, __ATOMIC_RELEASE);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (const PairTransfer& one : transfers) {
    if (one.sends) continue;
    auto* receive = pad(call.rank)->receive[one.peer];
    const uint64_t awaited = ++receive[0].state.turn;
    while (__atomic_load_n(&receive[0].from_peer.progress, __ATOMIC_ACQUIRE) < awaited)
      if (std::chrono::steady_clock::now() > end) throw Failure(ErrorKind::driver, "no message");
    std::memcpy(one.data, call.regions[one.peer] + staged(call.rank, awaited),
                one.numel * dtype_size(one.dtype));
  }
}
void launch_partials(DType, PartialsCall, cudaStream_t) { use(); }
void launch_gauge(Gauge, GaugeCall, int, cudaStream_t) { use(); }
std::array<uint32_t, kMaxGpuWorld> run_probe(Probe, const Regions&, std::byte*, int, int,
                                             uint64_t) {
  use();
  std::array<uint32_t, kMaxGpuWorld> seen{};
  seen.fill(kProbePushed | kProbePulled);
  return seen;
}

}  // namespace fastcoll
