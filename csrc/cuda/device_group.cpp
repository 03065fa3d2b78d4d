// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_group.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "memory/cuda_driver.h"

namespace fastcoll {

namespace {

// Lets this thread ask about an event while a graph is captured. The question would otherwise be
// refused and invalidate the capture.
class BesideCapture {
 public:
  BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

DeviceGroup::DeviceGroup(const DeviceGroupOptions& options) : options_(options) {
  if (options.world_size < 1 || options.world_size > kMaxGpuWorld || options.rank < 0 ||
      options.rank >= options.world_size)
    throw Failure(ErrorKind::usage, "rank " + std::to_string(options.rank) + " of " +
                                        std::to_string(options.world_size) +
                                        " ranks with GPUs (1 to " + std::to_string(kMaxGpuWorld) +
                                        " are possible)");
  const OnDevice on(options.device);
  host_ = borrow_host_words();
  cudaError_t error = cudaSuccess;
  for (Last* last : {&eager_, &captured_})
    if (error == cudaSuccess)
      error = cudaEventCreateWithFlags(&last->event, cudaEventDisableTiming);
  if (error == cudaSuccess) return;
  if (eager_.event) cudaEventDestroy(eager_.event);
  return_host_words(host_);
  check_cuda(error, "making a group's events");
}

DeviceGroup::~DeviceGroup() {
  try {
    close();
  } catch (const Failure&) {  // the context is broken: nothing left to save
  }
  if (kernels_ended_) return_host_words(host_);
}

DeviceGroup::Last DeviceGroup::order(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture),
             "asking whether the stream is being captured");
  if (status == cudaStreamCaptureStatusInvalidated)
    throw Failure(ErrorKind::usage, "the stream's capture was invalidated by an earlier error");
  if (status == cudaStreamCaptureStatusNone) capture = 0;
  // A captured call is ordered among the calls of its capture. The order of a replay and eager
  // calls follows from the streams on which the program replays the graph.
  const Last& last = capture == 0 ? eager_ : captured_;
  unsigned long long stream_id = 0;
  check_cuda(cudaStreamGetId(stream, &stream_id), "asking for the stream's number");
  if (last.used && last.capture == capture && last.stream_id != stream_id)
    check_cuda(cudaStreamWaitEvent(stream, last.event, 0), "waiting for an event");
  return {stream_id, capture, true, last.event};
}

void DeviceGroup::remember(const Last& launched, cudaStream_t stream) {
  (launched.capture == 0 ? eager_ : captured_) = launched;
  check_cuda(cudaEventRecord(launched.event, stream), "recording an event");
}

uint32_t DeviceGroup::locate(const std::byte* ptr) const {
  const std::byte* data = options_.regions[size_t(options_.rank)] + kGpuDataOffsetBytes;
  if (ptr < data || ptr >= data + options_.data_bytes) return GpuLocation::kStaged;
  return GpuLocation::encode(uint64_t(ptr - data));
}

DeviceCall DeviceGroup::call(double limit_s) const {
  if (closed_) throw Failure(ErrorKind::usage, "this group's GPU side was closed");
  DeviceCall call{};
  std::copy(options_.regions.begin(), options_.regions.end(), call.regions);
  call.multicast = multicast_;
  call.host = host_;
  call.limit_ns = uint64_t(limit_s * 1e9);
  const double report_s = report_s_;
  call.report_ns = report_s > 0 ? uint64_t(report_s * 1e9) : ~uint64_t{0};
  call.data_bytes = options_.data_bytes;
  call.rank = options_.rank;
  call.world_size = options_.world_size;
  return call;
}

void DeviceGroup::launch(const Plan& plan, const std::byte* input, std::byte* output,
                         cudaStream_t stream, const LaunchOptions& options) {
  const std::lock_guard guard(mutex_);
  const OnDevice on(options_.device);
  DeviceCall call = this->call(options.limit_s);
  const std::vector<uint64_t>& counts = options.counts;
  if (plan.algorithm == Algorithm::multimem && !multicast_)
    throw Failure(ErrorKind::unsupported, "this group's GPUs have no multicast memory");
  if (counts.size() != (plan.splits == 0 ? 0 : 2 * size_t(options_.world_size)))
    throw Failure(ErrorKind::usage, "counts do not fit the plan");
  std::copy(counts.begin(), counts.end(), call.counts);
  call.input = input;
  call.output = output;
  call.input_location = locate(input);
  call.output_location = locate(output);
  const Last launched = order(stream);
  launch_collective(plan, call, stream, options.shape);
  remember(launched, stream);
}

void DeviceGroup::transfer(std::vector<PairTransfer> transfers, int most_channels,
                           cudaStream_t stream, double limit_s) {
  const std::lock_guard guard(mutex_);
  const OnDevice on(options_.device);
  const DeviceCall call = this->call(limit_s);
  for (PairTransfer& transfer : transfers) transfer.location = locate(transfer.data);
  const Last launched = order(stream);
  launch_transfers(transfers, call, most_channels, stream);
  remember(launched, stream);
}

void DeviceGroup::gauge(Gauge step, GaugeCall call, const std::byte* symmetric, int blocks,
                        cudaStream_t stream) {
  const std::lock_guard guard(mutex_);
  if (closed_) throw Failure(ErrorKind::usage, "this group's GPU side was closed");
  if (call.peer < 0 || call.peer >= options_.world_size || call.peer == options_.rank ||
      !options_.regions[size_t(call.peer)])
    throw Failure(ErrorKind::usage, "rank " + std::to_string(call.peer) +
                                        " has no region that rank " +
                                        std::to_string(options_.rank) + " could measure");
  if (blocks < 1 || blocks > kMaxChannels)
    throw Failure(ErrorKind::usage, "1 to " + std::to_string(kMaxChannels) +
                                        " blocks can copy, not " + std::to_string(blocks));
  if (step == Gauge::put || step == Gauge::get) {
    const std::byte* mine = options_.regions[size_t(options_.rank)];
    call.offset_bytes = uint64_t(symmetric - mine);
    const bool lies_there = symmetric >= mine + kGpuDataOffsetBytes;
    const uint64_t end = kGpuDataOffsetBytes + options_.data_bytes;
    if (!lies_there || call.offset_bytes > end || call.num_bytes > end - call.offset_bytes)
      throw Failure(ErrorKind::usage, "what is copied must lie in a symmetric tensor");
  }
  const OnDevice on(options_.device);
  std::copy(options_.regions.begin(), options_.regions.end(), call.regions);
  call.rank = options_.rank;
  const Last launched = order(stream);
  launch_gauge(step, call, blocks, stream);
  remember(launched, stream);
}

void DeviceGroup::copy(const std::vector<DeviceCopy>& copies, cudaStream_t stream) const {
  const OnDevice on(options_.device);
  for (const DeviceCopy& one : copies)
    check_cuda(
        cudaMemcpyAsync(one.target, one.source, one.num_bytes, cudaMemcpyDeviceToDevice, stream),
        "copying between GPUs");
}

std::optional<DeviceVerdict> DeviceGroup::verdict() const {
  // `kind` is stored last.
  DeviceVerdict& found = host_->verdict;
  if (std::atomic_ref(found.kind).load(std::memory_order_acquire) == 0) return std::nullopt;
  return found;
}

std::array<uint64_t, kMaxGpuWorld> DeviceGroup::late() const {
  std::array<uint64_t, kMaxGpuWorld> slots;
  for (size_t peer = 0; peer < slots.size(); ++peer)
    slots[peer] = std::atomic_ref(host_->late[peer]).load(std::memory_order_relaxed);
  return slots;
}

bool DeviceGroup::busy() {
  const std::unique_lock guard(mutex_, std::try_to_lock);
  if (!guard) return true;  // a launch waits for room in its queue, or the last kernel's end
  if (closed_ || !eager_.used) return false;
  const OnDevice on(options_.device);
  const BesideCapture beside;
  const cudaError_t error = cudaEventQuery(eager_.event);
  if (error == cudaSuccess) return false;
  cudaGetLastError();
  return error == cudaErrorNotReady;
}

void DeviceGroup::give_up(int peer) {
  std::atomic_ref(host_->abort).store(HostWords::lost(peer), std::memory_order_release);
}

std::array<uint32_t, kMaxGpuWorld> DeviceGroup::probe(Probe step, uint64_t token) {
  const OnDevice on(options_.device);
  return run_probe(step, options_.regions, multicast_, options_.rank, options_.world_size, token);
}

void DeviceGroup::use_multicast(std::byte* ptr) {
  const std::lock_guard guard(mutex_);
  multicast_ = ptr;
}

void DeviceGroup::close() {
  const std::lock_guard guard(mutex_);
  if (closed_) return;
  closed_ = true;
  const OnDevice on(options_.device);
  // All of the device: a captured graph may run in any stream. Bounded, as every wait in a kernel
  // is.
  const cudaError_t error = cudaDeviceSynchronize();
  cudaEventDestroy(eager_.event);
  cudaEventDestroy(captured_.event);
  // On an error the context is broken, or kernels may still use the host's words.
  kernels_ended_ = error == cudaSuccess;
  check_cuda(error, "waiting for the group's kernels");
}

}  // namespace fastcoll
