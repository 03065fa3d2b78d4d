// SPDX-License-Identifier: Apache-2.0
// A rank's GPU side of a group: the regions as mapped here, the order of its launches, and the
// kernels' verdict in host memory. At most one kernel of a group runs at a time. No Python here; it
// does not own the regions.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>

#include "cuda/call.h"
#include "cuda/host_words.h"
#include "cuda/launch.h"
#include "cuda/launch_order.h"
#include "device_side.h"
#include "plan.h"

namespace fastcoll {

struct DeviceGroupOptions {
  int device = 0;
  int rank = 0;
  int world_size = 1;
  Regions regions{};     // all nullptr: no peer is reached, nothing is launched
  int num_channels = 1;  // that the ranks agreed on; the regions are laid out for them
  // The group's kernels share thread blocks with those of other such groups of this process. They
  // run one after the other, in the order of their launches.
  bool shares = false;
  bool starts_early = true;  // kernels, where the device can: see Place
};

struct LaunchOptions {
  double limit_s = 0;  // of every single wait
  // Another one than the plan's own, the same on all ranks: for measurements.
  std::optional<LaunchShape> shape{};
};

struct DeviceCopy {
  std::byte* target;
  const std::byte* source;  // any rank's region, or this rank's own memory
  size_t num_bytes;
};

class DeviceGroup final : public DeviceSide {
 public:
  explicit DeviceGroup(const DeviceGroupOptions& options);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  // Start a plan on a stream, behind this group's earlier calls on any stream. In a stream that is
  // being captured it becomes part of the graph. Allocates nothing.
  void launch(const Plan& plan, const DeviceOperands& operands, cudaStream_t stream,
              const LaunchOptions& options);
  // The same for the known calls of fastcoll._C.
  bool is_healthy() const noexcept override { return !verdict(); }
  std::optional<Failure> start(const Plan& plan, const DeviceOperands& operands, void* stream,
                               double limit_s) noexcept override;
  std::optional<Failure> start(std::span<const DeviceMessage> messages, int most_channels,
                               void* stream, double limit_s) noexcept override;
  std::optional<Failure> record(void*& event, void* stream) noexcept override;
  std::optional<Failure> make_stream_wait(void* stream, void* event) noexcept override;
  bool is_event_complete(void* event) noexcept override;
  void drop(void* event) noexcept override;
  // As launch for sends and receives, as one kernel; see launch_transfers. Finds their locations.
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
  // Where symmetric tensors lie from the next call on: each rank's heap as mapped here. multicast:
  // all heaps at once through the switch, or nullptr. A heap only grows, and never moves.
  void use_heap(const Regions& heaps, uint64_t num_bytes, std::byte* multicast);

  // Wait until this rank's kernels are over, captured graphs included. Idempotent; the verdict can
  // still be read, and giving up still does no harm.
  void close();

 private:
  GroupCall call(double limit_s) const;
  uint32_t locate(const std::byte* ptr) const;
  Place place(const LaunchOrder::Last& launched, cudaStream_t stream) const;
  void put(const Plan& plan, const DeviceOperands& operands, DeviceCall& call) const;

  const DeviceGroupOptions options_;
  std::byte* multicast_ = nullptr;
  Regions heaps_{};
  uint64_t heap_bytes_ = 0;
  std::byte* heap_multicast_ = nullptr;
  HostWords* host_ = nullptr;           // as long as this group
  std::shared_ptr<LaunchOrder> order_;  // its mutex guards this group's state, too
  std::atomic<double> report_s_ = 0;
  bool starts_early_ = false;
  bool closed_ = false;
  bool kernels_ended_ = false;
};

}  // namespace fastcoll
