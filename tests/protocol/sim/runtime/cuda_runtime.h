// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime as far as bench/gpu/one_grid.cu calls it, in the simulator. Row y of a grid is
// rank y, and a kernel ends before its launch returns. Of a graph the first call runs, when it is
// captured.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/scheduler.h"

#define __device__
#define blockIdx (::fastcoll::sim::place_in_grid())

namespace fastcoll::sim {
struct PlaceInGrid {
  unsigned x, y;
};
inline PlaceInGrid place_in_grid() { return {self().block, unsigned(self().rank)}; }
}  // namespace fastcoll::sim

struct dim3 {
  unsigned x = 1, y = 1;
};
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
using cudaStream_t = int;
using cudaGraph_t = int;
using cudaGraphExec_t = int;
using cudaEvent_t = int;
inline constexpr unsigned cudaHostAllocMapped = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "a rank waits for ever"; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** memory, size_t num_bytes) {
  *memory = std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, size_t num_bytes, unsigned) {
  return cudaMalloc(memory, num_bytes);
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaMemset(void* memory, int value, size_t num_bytes) {
  std::memset(memory, value, num_bytes);
  return cudaSuccess;
}
// FAKE_CUDA_DAMAGES: of each first float that comes back, a high bit is another one. "bits": the
// lowest bit, in every second copy.
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
  std::memcpy(to, from, num_bytes);
  static int num_back = 0;
  const char* damages = std::getenv("FAKE_CUDA_DAMAGES");
  auto* bytes = static_cast<unsigned char*>(to);
  if (kind != cudaMemcpyDeviceToHost || !damages) return cudaSuccess;
  if (std::strcmp(damages, "bits") != 0) bytes[3] ^= 0x40;
  else if (++num_back % 2 == 0) bytes[0] ^= 1;
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int numRegs = 90;
  size_t localSizeBytes = 0;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  *of = {};
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                                 size_t) {
  *blocks = 1;
  return cudaSuccess;
}

inline bool is_capturing = false;
inline int num_captured = 0;
inline cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block,
                                               void** args, size_t, cudaStream_t) {
  static uint64_t seed = 0;
  if (is_capturing && num_captured++ > 0) return cudaSuccess;
  fastcoll::sim::Simulator simulator(int(grid.y), fastcoll::sim::Schedule::uniform, ++seed);
  // Its one argument is a reference in the simulator (sim/prim.h).
  const auto body = reinterpret_cast<void (*)(const void*)>(reinterpret_cast<uintptr_t>(kernel));
  const void* argument = args[0];
  for (unsigned rank = 0; rank < grid.y; ++rank)
    simulator.enqueue(int(rank), {int(grid.x), int(block.x), [=] { body(argument); }});
  return simulator.run() ? cudaSuccess : cudaErrorLaunchFailure;
}

inline cudaError_t cudaStreamCreate(cudaStream_t*) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  is_capturing = true;
  num_captured = 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  is_capturing = false;
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
