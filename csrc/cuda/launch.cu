// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <climits>
#include <set>
#include <string>

#include "cuda/gauge.cuh"
#include "cuda/kernel_files.h"
#include "cuda/launch.h"
#include "cuda/launch_table.h"
#include "cuda/probe.cuh"
#include "memory/cuda_driver.h"

namespace fastcoll {

namespace {

const void* gauge_kernel(Gauge step) {
  switch (step) {
    case Gauge::signal:
      return reinterpret_cast<const void*>(&gauge_signal);
    case Gauge::ll_pack:
      return reinterpret_cast<const void*>(&gauge_ll_pack);
    case Gauge::put:
      return reinterpret_cast<const void*>(&gauge_put);
    case Gauge::get:
      return reinterpret_cast<const void*>(&gauge_get);
  }
  return nullptr;
}

// Every kernel that a plan can name, and those that run beside them.
std::set<const void*> all_kernels() {
  std::set<const void*> kernels;
  for (int algorithm = 0; algorithm < kNumGpuAlgorithms; ++algorithm)
    for (int verb = 0; verb < kNumGpuVerbs; ++verb)
      for (int dtype = 0; dtype < kNumDTypes; ++dtype)
        for (const bool ll : {false, true})
          kernels.insert(
              kernel_for(Algorithm(algorithm), Verb(verb), kernel_dtype(DType(dtype)), ll));
  kernels.erase(nullptr);
  kernels.insert(transfer_kernel());
  for (const Gauge step : {Gauge::signal, Gauge::ll_pack, Gauge::put, Gauge::get})
    kernels.insert(gauge_kernel(step));
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) kernels.insert(partials_kernel(DType(dtype)));
  return kernels;
}

template <class Call>
void launch(const void* kernel, int blocks, int threads, Call& call, const Place& place) {
  void* args[] = {&call};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.stream = place.stream;
  config.attrs = &early;
  config.numAttrs = place.early ? 1 : 0;
  check_cuda(cudaLaunchKernelExC(&config, kernel, args), "launching a kernel");
}

// The part_bytes of shape_for: of one rank's part where the message is split, else of all.
uint64_t part_bytes(const Plan& plan, int world_size) {
  if (plan.algorithm == Algorithm::copy_engine) return 0;  // to meet takes one block
  // No rank knows all sizes: all channels, and tiles of a pack for each thread.
  if (plan.splits != 0) return uint64_t{plan.channels} * kMaxBlockThreads * kPackBytes;
  const uint64_t num_bytes = plan.numel * plan.elem_bytes();
  const bool whole =
      plan.verb != Verb::all_reduce || plan.inlined || !splits_message(plan.algorithm, plan.verb);
  return whole ? num_bytes : detail::div_up(num_bytes, uint64_t(world_size));
}

void check_shape(const LaunchShape& shape, const Plan& plan, int world_size) {
  if (shape.blocks <= plan.channels &&
      shape_fits(shape, plan.algorithm, plan.verb, plan.dtype, plan.inlined,
                 part_bytes(plan, world_size), world_size, plan.channels))
    return;
  throw Failure(ErrorKind::usage,
                std::to_string(shape.blocks) + " blocks of " + std::to_string(shape.threads) +
                    " threads and tiles of " + std::to_string(shape.tile_bytes) +
                    " bytes are no shape for " + describe(plan) + " by " + describe_choice(plan) +
                    ": see shape_fits in kernels/cuda/shape.h");
}

const void* probe_kernel(Probe step) {
  switch (step) {
    case Probe::put:
      return reinterpret_cast<const void*>(&probe_put_kernel);
    case Probe::get:
      return reinterpret_cast<const void*>(&probe_get_kernel);
    case Probe::operands:
      return reinterpret_cast<const void*>(&probe_operands_kernel);
    case Probe::reduce:
      return reinterpret_cast<const void*>(&probe_reduce_kernel);
    case Probe::stored:
      return reinterpret_cast<const void*>(&probe_stored_kernel);
  }
  return nullptr;
}

}  // namespace

int load_kernels(int device) {
  int num_sms = 0, fewest = INT_MAX;
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

bool can_start_early() {
  constexpr int kLeastPtx = 90, kLeastDriver = 12030;  // the driver: in captured graphs, too
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, transfer_kernel()), "loading a kernel");
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "asking for the driver's version");
  return attributes.ptxVersion >= kLeastPtx && driver >= kLeastDriver;
}

bool has_kernel(Algorithm algorithm, Verb verb, DType dtype, bool ll) {
  return kernel_for(algorithm, verb, kernel_dtype(dtype), ll) != nullptr;
}

LaunchShape shape_of(const Plan& plan, int world_size) {
  return shape_for(plan.algorithm, plan.verb, plan.dtype, plan.inlined,
                   part_bytes(plan, world_size), world_size, plan.channels);
}

// An integer type of the size of another type.
constexpr DType integer_for(DType dtype) {
  for (int i = 0; i < kNumDTypes; ++i)
    if (dtype_kind(DType(i)) == Kind::integer && dtype_size(DType(i)) == dtype_size(dtype))
      return DType(i);
  return dtype;
}
static_assert([] {
  for (int i = 0; i < kNumDTypes; ++i)
    if (dtype_kind(integer_for(kernel_dtype(DType(i)))) != Kind::integer) return false;
  return true;
}());

void launch_collective(const Plan& plan, DeviceCall call, const Place& place,
                       const std::optional<LaunchShape>& asked) {
  // A group of one rank has nothing to combine: every verb gives the input, bit for bit. Integers
  // keep the bits that a sum of floats would round.
  const bool keeps_bits = call.world_size == 1 && verb_reduces(plan.verb);
  call.dtype = kernel_dtype(plan.dtype);
  if (keeps_bits) call.dtype = integer_for(call.dtype);
  const void* kernel = kernel_for(plan.algorithm, plan.verb, call.dtype, plan.inlined);
  if (!kernel)
    throw Failure(ErrorKind::unsupported,
                  "there is no GPU kernel for " + describe(plan) + " by " + describe_choice(plan));
  if (asked) check_shape(*asked, plan, call.world_size);
  const LaunchShape shape = asked ? *asked : shape_of(plan, call.world_size);
  call.elem_bytes = uint32_t(dtype_size(call.dtype));
  const uint64_t per_element = plan.elem_bytes() / call.elem_bytes;  // 2 in a complex number
  call.numel = plan.numel * per_element;
  call.tile_bytes = shape.tile_bytes;
  // Tile and grid follow from the plan, unless they were asked for.
  call.plan_hash = asked ? shaped_hash(plan.hash, shape) : plan.hash;
  call.root = plan.root;
  call.op = keeps_bits ? Op::bor : plan.op;
  call.verb = plan.verb;
  call.counted = plan.splits != 0;
  for (uint64_t& count : call.counts) count *= per_element;
  launch(kernel, shape.blocks, shape.threads, call, place);
}

void launch_partials(DType dtype, PartialsCall call, cudaStream_t stream) {
  constexpr uint64_t kMostBlocks = 1024;  // not measured
  if (call.numel == 0) return;
  if (kernel_dtype(dtype) != dtype) call.numel *= 2;
  const uint64_t row_bytes =
      call.numel * (call.widened ? sizeof(float) : dtype_size(kernel_dtype(dtype)));
  const uint64_t blocks = detail::div_up(row_bytes, kMaxBlockThreads * kPackBytes);
  launch(partials_kernel(dtype), int(std::min(blocks, kMostBlocks)), kMaxBlockThreads, call,
         {stream, false});
}

void launch_transfers(const std::vector<PairTransfer>& transfers, const GroupCall& call,
                      int most_channels, const Place& place) {
  if (transfers.empty() || transfers.size() > kMaxPairs)
    throw Failure(ErrorKind::usage, "a batch has 1 to " + std::to_string(kMaxPairs) +
                                        " sends and receives, not " +
                                        std::to_string(transfers.size()));
  PairCall pairs{call, {}};
  for (size_t i = 0; i < transfers.size(); ++i) {
    const PairTransfer& transfer = transfers[i];
    const uint64_t num_bytes = transfer.numel * dtype_size(transfer.dtype);
    const LaunchShape shape = shape_for(Algorithm::direct, Verb::send, transfer.dtype, false,
                                        num_bytes, call.world_size, most_channels);
    const uint64_t kinds = uint64_t(transfer.dtype) | uint64_t(most_channels) << 8;
    PairPart& part = pairs.parts[i];
    part.data = transfer.data;
    part.dtype = kernel_dtype(transfer.dtype);
    part.elem_bytes = uint32_t(dtype_size(part.dtype));
    part.numel = num_bytes / part.elem_bytes;
    part.location = transfer.location;
    part.tile_bytes = shape.tile_bytes;
    part.plan_hash = uint32_t(mix64(mix64(mix64(kinds) + transfer.numel) + transfer.tag));
    part.channels = uint32_t(shape.blocks);
    part.peer = transfer.peer;
    part.verb = transfer.sends ? Verb::send : Verb::recv;
  }
  launch(transfer_kernel(), int(transfers.size()) * kPairChannels, kMaxBlockThreads, pairs, place);
}

std::array<uint32_t, kMaxGpuWorld> run_probe(Probe step, const Regions& regions,
                                             std::byte* multicast, int rank, int world_size,
                                             uint64_t token) {
  ProbeCall call{};
  std::copy(regions.begin(), regions.end(), call.regions);
  call.multicast = multicast;
  call.token = token;
  call.rank = rank;
  call.world_size = world_size;
  std::array<uint32_t, kMaxGpuWorld> seen{};
  void* answer = nullptr;
  check_cuda(cudaMalloc(&answer, sizeof seen), "allocating a probe's answer");
  call.seen = static_cast<uint32_t*>(answer);
  try {
    check_cuda(cudaMemset(answer, 0, sizeof seen), "clearing a probe's answer");
    launch(probe_kernel(step), 1, kMaxGpuWorld, call, {nullptr, false});
    check_cuda(cudaMemcpy(seen.data(), answer, sizeof seen, cudaMemcpyDeviceToHost),
               "trying out the peers' regions");
  } catch (...) {
    cudaFree(answer);
    throw;
  }
  check_cuda(cudaFree(answer), "freeing a probe's answer");
  return seen;
}

void launch_gauge(Gauge step, GaugeCall call, int blocks, cudaStream_t stream) {
  const bool copies = step == Gauge::put || step == Gauge::get;
  launch(gauge_kernel(step), copies ? blocks : 1, copies ? kMaxBlockThreads : 1, call,
         {stream, false});
}

}  // namespace fastcoll
