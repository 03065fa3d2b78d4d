// SPDX-License-Identifier: Apache-2.0
// The order of kernels that must not run beside each other. They are those of one group, or those
// of all groups that share a device's thread blocks (gpu/residency.py). Decides for which earlier
// launch a launch has to wait in the device; knows no kernel. The device is the current one.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

namespace fastcoll {

// As cudaEventQuery, also while a graph is captured; leaves no error behind.
cudaError_t query_beside_captures(cudaEvent_t event);

class LaunchOrder {
 public:
  LaunchOrder();
  ~LaunchOrder();
  LaunchOrder(const LaunchOrder&) = delete;
  LaunchOrder& operator=(const LaunchOrder&) = delete;

  // The last launch of one kind. A launch on another stream waits for the last one's. The event
  // lies behind it already. Streams are compared by number, as the program may have destroyed the
  // stream since.
  struct Last {
    unsigned long long stream_id = 0;
    unsigned long long capture = 0;  // the capture's number; 0: none
    bool used = false;
    cudaEvent_t event = nullptr;
    bool waits = false;  // the stream, for the launch before it in another one
  };
  // Hold it from `enter` to `leave`; a launch into a full queue takes long.
  std::mutex& mutex() { return mutex_; }
  // Put the stream behind the earlier launches. Returns what to leave with, after the launch.
  Last enter(cudaStream_t stream);
  void leave(const Last& launched, cudaStream_t stream);
  // Whether the last launch outside of a capture still runs.
  bool busy() const;

 private:
  std::mutex mutex_;
  Last eager_, captured_;
};

// The order of all groups of this process that share this device's blocks.
std::shared_ptr<LaunchOrder> shared_order(int device);

}  // namespace fastcoll
