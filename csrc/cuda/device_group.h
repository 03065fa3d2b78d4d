// SPDX-License-Identifier: Apache-2.0
// A rank's GPU side of a group: the regions as mapped here, what orders its launches, and the host
// memory in which kernels leave their verdict. No Python here; it does not own the regions.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <optional>

#include "cuda/call.h"
#include "cuda/launch.h"
#include "plan.h"

namespace fastcoll {

struct DeviceGroupOptions {
  int device = 0;
  int rank = 0;
  int world_size = 1;
  Regions regions{};        // all nullptr: no peer is reached, plans of nccl only
  uint64_t data_bytes = 0;  // of each region, behind scratch
};

struct LaunchOptions {
  double limit_s = 0;  // of every single wait
  // Where a plan has splits, the elements sent to each rank, then those received from each.
  std::vector<uint64_t> counts{};
  // Another one than the plan's own, the same on all ranks: for measurements.
  std::optional<LaunchShape> shape{};
};

struct DeviceCopy {
  std::byte* target;
  const std::byte* source;  // any rank's region, or this rank's own memory
  size_t num_bytes;
};

class DeviceGroup {
 public:
  explicit DeviceGroup(const DeviceGroupOptions& options);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // Start a plan on a stream, behind this group's earlier calls whatever their streams. In a stream
  // that is being captured it becomes part of the graph. Allocates nothing.
  void launch(const Plan& plan, const std::byte* input, std::byte* output, cudaStream_t stream,
              const LaunchOptions& options);
  // The same for sends and receives, as one kernel; see launch_transfers. Finds their locations.
  void transfer(std::vector<PairTransfer> transfers, int most_channels, cudaStream_t stream,
                double limit_s);
  // Start copies on a stream, by the copy engines where they cross between devices. Orders nothing.
  void copy(const std::vector<DeviceCopy>& copies, cudaStream_t stream) const;
  // Start a kernel that measures one step, behind the group's earlier calls; see cuda/gauge.h.
  // `call` has what the step needs but the ranks' regions. symmetric: put and get: where this rank
  // has what of the peer's is meant.
  void gauge(Gauge step, GaugeCall call, const std::byte* symmetric, int blocks,
             cudaStream_t stream);
  std::optional<DeviceVerdict> verdict() const;  // what broke the group, once something has

  // Whether what was last started outside of a capture still runs.
  bool busy();
  // Let this rank's kernels stop waiting: `peer` is lost. They leave that as their verdict.
  void give_up(int peer);

  // Collective: see Probe.
  std::array<uint32_t, kMaxGpuWorld> probe(Probe step, uint64_t token);
  // Where the switch finds all regions at once; without it, which nullptr is, there is no multimem.
  void use_multicast(std::byte* ptr);

  // Wait until this rank's kernels are over, captured graphs included, and free what they used: to
  // free waits for whatever runs on the device, so the destructor shall have nothing left to free.
  // Idempotent; the verdict can still be read.
  void close();

 private:
  // The last launch of one kind. At most one kernel of a group runs at a time: a launch on another
  // stream waits for the last one's. The event lies behind it already, and streams go by their
  // numbers, as the program may have destroyed the stream since.
  struct Last {
    unsigned long long stream_id = 0;
    unsigned long long capture = 0;  // the capture's number; 0: none
    bool used = false;
    cudaEvent_t event = nullptr;
  };
  Last order(cudaStream_t stream);  // what to remember, once there is a launch behind the others
  void remember(const Last& launched, cudaStream_t stream);
  DeviceCall call(double limit_s) const;  // what all calls have
  uint32_t locate(const std::byte* ptr) const;
  void free_memory();  // no kernel runs any more

  const DeviceGroupOptions options_;
  std::byte* multicast_ = nullptr;
  DeviceVerdict* verdict_ = nullptr;  // host memory that the device writes
  DeviceCall* batch_ = nullptr;       // device memory: the sends and receives of one kernel
  Last eager_, captured_;
  cudaStream_t beside_ = nullptr;  // for what must not wait for kernels
  std::mutex mutex_;
  bool closed_ = false;
  // Held for moments only, while `mutex_` is held as long as a launch or the last kernel takes.
  mutable std::mutex verdict_mutex_;
  std::optional<DeviceVerdict> last_verdict_;  // once `verdict_` is freed
};

}  // namespace fastcoll
