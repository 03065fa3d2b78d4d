// SPDX-License-Identifier: Apache-2.0
// The one place from which kernels are launched. A kernel's grid and tile follow from the plan,
// unless all ranks ask for others: so they are the same on all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <optional>
#include <vector>

#include "cuda/call.h"
#include "cuda/gauge.h"
#include "cuda/partials.h"
#include "cuda/shape.h"
#include "plan.h"

namespace fastcoll {

// Load every kernel into the context of `device`, the current one, now. Loading one later may have
// to wait for running kernels, and those may wait for the kernel to be loaded. Returns how many
// blocks of the largest kernel can be resident at once.
int load_kernels(int device);

// Whether kernels on the current device can start before the one before them in their stream is
// over. Code for an older architecture may run there, and does not wait for its stream by itself.
bool can_start_early();

// Where a kernel starts. early: before the stream's last kernel is over, as soon as that one allows
// it. Kernels of plans and transfers wait for it themselves.
struct Place {
  cudaStream_t stream;
  bool early;
};

// The shape with which the kernel of a plan is launched.
LaunchShape shape_of(const Plan& plan, int world_size);

// Start the kernel of a plan on the current device. `call` has all fields but those that follow
// from the plan. shape: another one than shape_of's, the same on all ranks; for measurements.
// Throws UnsupportedError if there is no such kernel, UsageError if the shape does not fit.
void launch_collective(const Plan& plan, DeviceCall call, const Place& place,
                       const std::optional<LaunchShape>& shape = std::nullopt);

// One send or receive of this rank.
struct PairTransfer {
  bool sends;
  std::byte* data;
  uint64_t numel;
  DType dtype;
  int peer;
  uint32_t tag;       // must be the same on both sides
  uint32_t location;  // GpuLocation of the data
};

// Start them as one kernel: each pair and direction at most once. most_channels: thread blocks of
// each, the same on all ranks.
void launch_transfers(const std::vector<PairTransfer>& transfers, const GroupCall& call,
                      int most_channels, const Place& place);

// Start adding rows of this rank's memory, on the current device.
void launch_partials(DType dtype, PartialsCall call, cudaStream_t stream);

// Whether there is a kernel for such plans.
bool has_kernel(Algorithm algorithm, Verb verb, DType dtype, bool ll);

using Regions = std::array<std::byte*, kMaxGpuWorld>;

inline constexpr uint32_t kProbePushed = 1;  // the peer's store reached my memory
inline constexpr uint32_t kProbePulled = 2;  // my load sees the peer's own word

// The steps that test the mappings, each taken when all ranks have taken the one before. With `put`
// a rank writes a word into every region; `get` reports the arrivals by rank, as the bits above.
// The other three are the same through the switch. `reduce` reports by type (float32, float16,
// bfloat16, int32, uint32, int64, uint64) a bit for each operation, by its number, that was right.
// `stored` reports by rank whether all that it stored is here.
enum class Probe { put, get, operands, reduce, stored };

// Take a step and wait for it. multicast: nullptr for put and get.
std::array<uint32_t, kMaxGpuWorld> run_probe(Probe step, const Regions& regions,
                                             std::byte* multicast, int rank, int world_size,
                                             uint64_t token);

// Start one of the kernels that measure a step. blocks: of put and get; the others have one thread.
void launch_gauge(Gauge step, GaugeCall call, int blocks, cudaStream_t stream);

}  // namespace fastcoll
