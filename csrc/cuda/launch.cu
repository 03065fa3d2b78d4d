// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <climits>
#include <set>
#include <string>

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "cuda/launch_table.h"
#include "cuda/probe.cuh"

namespace fastcoll {

namespace {

// Every kernel that a plan can name.
std::set<const void*> all_kernels() {
  std::set<const void*> kernels;
  for (int algorithm = 0; algorithm < kNumGpuAlgorithms; ++algorithm)
    for (int verb = 0; verb < kNumGpuVerbs; ++verb)
      for (int dtype = 0; dtype < kNumDTypes; ++dtype)
        for (const bool ll : {false, true})
          kernels.insert(
              kernel_for(Algorithm(algorithm), Verb(verb), kernel_dtype(DType(dtype)), ll));
  kernels.erase(nullptr);
  return kernels;
}

template <class Call>
void launch(const void* kernel, int blocks, int threads, Call& call, cudaStream_t stream) {
  void* args[] = {&call};
  check_cuda(
      cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), args, 0, stream),
      "launching a kernel");
}

// What shape_for calls part_bytes: of one rank's part where the message is split, else of all.
uint64_t part_bytes(const Plan& plan, int world_size) {
  const uint64_t num_bytes = plan.numel * plan.elem_bytes();
  const bool whole =
      plan.verb != Verb::all_reduce || plan.inlined || !splits_message(plan.algorithm, plan.verb);
  return whole ? num_bytes : detail::div_up(num_bytes, uint64_t(world_size));
}

ProbeCall probe_call(const Regions& regions, int rank, int world_size, uint64_t token) {
  ProbeCall call{};
  std::copy(regions.begin(), regions.end(), call.regions);
  call.token = token;
  call.rank = rank;
  call.world_size = world_size;
  return call;
}

}  // namespace

int load_kernels() {
  int device = 0, num_sms = 0, fewest = INT_MAX;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "counting the multiprocessors");
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes;  // asking for them loads the kernel
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
    int per_sm = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kMaxBlockThreads, 0),
               "asking how many blocks fit");
    fewest = std::min(fewest, per_sm * num_sms);
  }
  return fewest == INT_MAX ? 0 : fewest;
}

bool has_kernel(Algorithm algorithm, Verb verb, DType dtype, bool ll) {
  return kernel_for(algorithm, verb, kernel_dtype(dtype), ll) != nullptr;
}

void launch_collective(const Plan& plan, DeviceCall call, cudaStream_t stream) {
  const void* kernel =
      kernel_for(plan.algorithm, plan.verb, kernel_dtype(plan.dtype), plan.inlined);
  if (!kernel)
    throw Failure(ErrorKind::unsupported,
                  "there is no GPU kernel for " + describe(plan) + " by " + describe_choice(plan));
  const LaunchShape shape =
      shape_for(plan.algorithm, plan.verb, plan.dtype, plan.inlined,
                part_bytes(plan, call.world_size), call.world_size, plan.channels);
  call.dtype = kernel_dtype(plan.dtype);
  call.elem_bytes = uint32_t(dtype_size(call.dtype));
  call.numel = plan.numel * (call.dtype == plan.dtype ? 1 : 2);
  call.tile_bytes = shape.tile_bytes;
  call.plan_hash = plan.hash;  // tile and grid follow from it
  call.root = plan.root;
  call.op = plan.op;
  call.verb = plan.verb;
  launch(kernel, shape.blocks, shape.threads, call, stream);
}

void probe_put(const Regions& regions, int rank, int world_size, uint64_t token) {
  ProbeCall call = probe_call(regions, rank, world_size, token);
  launch(reinterpret_cast<const void*>(&probe_put_kernel), 1, kMaxGpuWorld, call, nullptr);
  check_cuda(cudaStreamSynchronize(nullptr), "writing into the peers' regions");
}

std::array<uint32_t, kMaxGpuWorld> probe_get(const Regions& regions, int rank, int world_size,
                                             uint64_t token) {
  ProbeCall call = probe_call(regions, rank, world_size, token);
  std::array<uint32_t, kMaxGpuWorld> seen{};
  void* answer = nullptr;
  check_cuda(cudaMalloc(&answer, sizeof seen), "allocating a probe's answer");
  call.seen = static_cast<uint32_t*>(answer);
  try {
    launch(reinterpret_cast<const void*>(&probe_get_kernel), 1, kMaxGpuWorld, call, nullptr);
    check_cuda(cudaMemcpy(seen.data(), answer, sizeof(uint32_t) * size_t(world_size),
                          cudaMemcpyDeviceToHost),
               "reading from the peers' regions");
  } catch (...) {
    cudaFree(answer);
    throw;
  }
  check_cuda(cudaFree(answer), "freeing a probe's answer");
  return seen;
}

}  // namespace fastcoll
