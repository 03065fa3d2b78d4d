// SPDX-License-Identifier: Apache-2.0
// A rank's GPU side of a group: the regions as mapped here, the order of its launches, and the
// kernels' verdict in host memory. At most one kernel of a group runs at a time. No Python here; it
// does not own the regions.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>

#include "cuda/call.h"
#include "cuda/host_words.h"
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

  // Start a plan on a stream, behind this group's earlier calls on any stream. In a stream that is
  // being captured it becomes part of the graph. Allocates nothing.
  void launch(const Plan& plan, const std::byte* input, std::byte* output, cudaStream_t stream,
              const LaunchOptions& options);
  // The same for sends and receives, as one kernel; see launch_transfers. Finds their locations.
  void transfer(std::vector<PairTransfer> transfers, int most_channels, cudaStream_t stream,
                double limit_s);
  // Start copies on a stream, by the copy engines where they cross between devices. Orders nothing.
  void copy(const std::vector<DeviceCopy>& copies, cudaStream_t stream) const;
  // Start a kernel that measures one step, behind the group's earlier calls; see cuda/gauge.h.
  // `call` holds the step's needs but the ranks' regions. For put and get, `symmetric` is the
  // address in this rank's region with the offset of the peer's bytes.
  void gauge(Gauge step, GaugeCall call, const std::byte* symmetric, int blocks,
             cudaStream_t stream);
  std::optional<DeviceVerdict> verdict() const;  // the reason, once the group is broken

  // From the next launch on, waits longer than this are told to the host. 0: none are.
  void report_after(double report_s) { report_s_ = report_s; }
  // By rank: the slot of the last call that waited long for it, or 0. Never waits.
  std::array<uint64_t, kMaxGpuWorld> late() const;
  // Whether the last launch outside of a capture still runs, or has yet to be queued.
  bool busy();
  // Let this rank's kernels stop waiting: `peer` is lost. They leave that loss as their verdict.
  // One store, which nothing can hold up: no stream, no call of CUDA's, no lock.
  void give_up(int peer);

  // Collective: see Probe.
  std::array<uint32_t, kMaxGpuWorld> probe(Probe step, uint64_t token);
  // The address of all regions at once, through the switch. With nullptr there is no multimem.
  void use_multicast(std::byte* ptr);

  // Wait until this rank's kernels are over, captured graphs included. Idempotent; the verdict can
  // still be read, and giving up still does no harm.
  void close();

 private:
  // The last launch of one kind. At most one kernel of a group runs at a time: a launch on another
  // stream waits for the last one's. The event lies behind it already. Streams are compared by
  // number, as the program may have destroyed the stream since.
  struct Last {
    unsigned long long stream_id = 0;
    unsigned long long capture = 0;  // the capture's number; 0: none
    bool used = false;
    cudaEvent_t event = nullptr;
  };
  Last order(cudaStream_t stream);  // to remember, once a launch is behind the others
  void remember(const Last& launched, cudaStream_t stream);
  DeviceCall call(double limit_s) const;  // the fields that all calls share
  uint32_t locate(const std::byte* ptr) const;

  const DeviceGroupOptions options_;
  std::byte* multicast_ = nullptr;
  HostWords* host_ = nullptr;  // as long as this group
  Last eager_, captured_;
  std::atomic<double> report_s_ = 0;
  std::mutex mutex_;  // held as long as a launch takes, which a full queue blocks
  bool closed_ = false;
  bool kernels_ended_ = false;
};

}  // namespace fastcoll
