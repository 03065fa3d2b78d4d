// SPDX-License-Identifier: Apache-2.0
// How many streams of a process run side by side. Streams share the hardware's queues
// (CUDA_DEVICE_MAX_CONNECTIONS, at most 32). A kernel that waits for one behind it in the same
// queue waits for ever. Ranks that are threads of a process are such kernels. So N streams start a
// kernel each, which waits until all N have begun, 0.2 s at most.
//
//   queues [MOST]    prints JSON: the most streams, up to MOST (64), of which all began
//
// Exit code: 0 all well, 1 CUDA failed, 77 there is no GPU.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr uint64_t kLimitNs = 200000000;

void check(cudaError_t error, const char* step) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", step, cudaGetErrorString(error));
  std::exit(1);
}

__device__ uint64_t time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// words: kernels that have begun, and kernels that waited in vain.
__global__ void wait_for_all(unsigned* words, unsigned count) {
  atomicAdd(&words[0], 1u);
  const uint64_t begin_ns = time_ns();
  while (atomicAdd(&words[0], 0u) < count)
    if (time_ns() - begin_ns > kLimitNs) {
      atomicAdd(&words[1], 1u);
      return;
    }
}

// Whether so many streams run side by side, on streams that were made in this order.
bool all_begin(const std::vector<cudaStream_t>& streams, unsigned count) {
  unsigned *words = nullptr, in_vain = 0;
  check(cudaMalloc(&words, 2 * sizeof *words), "allocating");
  check(cudaMemset(words, 0, 2 * sizeof *words), "clearing");
  check(cudaDeviceSynchronize(), "clearing");
  for (unsigned i = 0; i < count; ++i) {
    wait_for_all<<<1, 1, 0, streams[i]>>>(words, count);
    check(cudaGetLastError(), "starting a kernel");
  }
  check(cudaDeviceSynchronize(), "waiting for the kernels");
  check(cudaMemcpy(&in_vain, &words[1], sizeof in_vain, cudaMemcpyDeviceToHost), "reading");
  check(cudaFree(words), "freeing");
  return in_vain == 0;
}

}  // namespace

int main(int argc, char** argv) {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    std::fprintf(stderr, "no GPU: nothing was run\n");
    return 77;
  }
  const unsigned most = argc > 1 ? unsigned(std::atoi(argv[1])) : 64;
  std::vector<cudaStream_t> streams(most);
  for (cudaStream_t& stream : streams)
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  unsigned count = 0;
  all_begin(streams, 1);  // loads the kernel
  while (count < most && all_begin(streams, count + 1)) ++count;
  const char* queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  std::printf(
      "{\"rows\": [\n {\"what\": \"streams side by side\", \"case\": \"of %u, %s connections\", "
      "\"value\": %u, \"unit\": \"\"}\n], \"complete\": true}\n",
      most, queues ? queues : "default", count);
  return 0;
}
