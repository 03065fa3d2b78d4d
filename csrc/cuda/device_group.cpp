// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_group.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "memory/cuda_driver.h"

namespace fastcoll {

DeviceGroup::DeviceGroup(const DeviceGroupOptions& options) : options_(options) {
  if (options.world_size < 1 || options.world_size > kMaxGpuWorld || options.rank < 0 ||
      options.rank >= options.world_size)
    throw Failure(ErrorKind::usage, "rank " + std::to_string(options.rank) + " of " +
                                        std::to_string(options.world_size) +
                                        " ranks with GPUs (1 to " + std::to_string(kMaxGpuWorld) +
                                        " are possible)");
  if (options.num_channels < 1 || options.num_channels > kMaxChannels)
    throw Failure(ErrorKind::usage, std::to_string(options.num_channels) + " channels (1 to " +
                                        std::to_string(kMaxChannels) + " are possible)");
  const OnDevice on(options.device);
  starts_early_ = options.starts_early && can_start_early();
  host_ = borrow_host_words();
  try {
    order_ = options.shares ? shared_order(options.device) : std::make_shared<LaunchOrder>();
  } catch (...) {
    return_host_words(host_);
    throw;
  }
}

DeviceGroup::~DeviceGroup() {
  try {
    close();
  } catch (const Failure&) {  // the context is broken: nothing left to save
  }
  if (kernels_ended_) return_host_words(host_);
  try {
    const OnDevice on(options_.device);
    order_.reset();
  } catch (const Failure&) {  // its events go with the process
  }
}

uint32_t DeviceGroup::locate(const std::byte* ptr) const {
  const std::byte* heap = heaps_[size_t(options_.rank)];
  if (ptr < heap || ptr >= heap + heap_bytes_) return GpuLocation::kStaged;
  return GpuLocation::encode(uint64_t(ptr - heap));
}

// A kernel behind an event starts when all before it is over: the stream's last kernel is not all
// that it depends on.
Place DeviceGroup::place(const LaunchOrder::Last& launched, cudaStream_t stream) const {
  return {stream, starts_early_ && !launched.waits};
}

GroupCall DeviceGroup::call(double limit_s) const {
  if (closed_) throw Failure(ErrorKind::usage, "this group's GPU side was closed");
  GroupCall call{};
  std::copy(options_.regions.begin(), options_.regions.end(), call.regions);
  std::copy(heaps_.begin(), heaps_.end(), call.heaps);
  call.multicast = multicast_;
  call.heap_multicast = heap_multicast_;
  call.host = host_;
  call.limit_ns = uint64_t(limit_s * 1e9);
  const double report_s = report_s_;
  call.report_ns = report_s > 0 ? uint64_t(report_s * 1e9) : ~uint64_t{0};
  call.heap_bytes = heap_bytes_;
  call.layout = GpuLayout::of(options_.num_channels, options_.world_size);
  call.rank = options_.rank;
  call.world_size = options_.world_size;
  return call;
}

// The memory of a call that such a plan can have.
void DeviceGroup::put(const Plan& plan, const DeviceOperands& operands, DeviceCall& call) const {
  const auto world = size_t(options_.world_size);
  const auto [input, output, counts, input_parts, output_parts] = operands;
  if (counts.size() != (plan.splits == 0 ? 0 : 2 * world))
    throw Failure(ErrorKind::usage, "counts do not fit the plan");
  const auto fits = [&](size_t num_parts, bool has_parts) {
    return num_parts == 0 || (num_parts == world && has_parts && takes_parts_apart(plan.algorithm));
  };
  if (!fits(input_parts.size(), verb_gives_parts(plan.verb)) ||
      !fits(output_parts.size(), verb_gets_parts(plan.verb)))
    throw Failure(ErrorKind::usage, "parts that lie apart do not fit the plan");
  call.input = input;
  call.output = output;
  call.input_location = locate(input);
  call.output_location = locate(output);
  call.input_apart = !input_parts.empty();
  call.output_apart = !output_parts.empty();
  std::copy(counts.begin(), counts.end(), call.counts);
  std::copy(input_parts.begin(), input_parts.end(), call.input_parts);
  std::copy(output_parts.begin(), output_parts.end(), call.output_parts);
}

void DeviceGroup::launch(const Plan& plan, const DeviceOperands& operands, cudaStream_t stream,
                         const LaunchOptions& options) {
  const std::lock_guard guard(order_->mutex());
  const OnDevice on(options_.device);
  DeviceCall call{};
  static_cast<GroupCall&>(call) = this->call(options.limit_s);
  if (plan.channels != options_.num_channels)
    throw Failure(ErrorKind::usage, "the plan's channels are not the group's");
  if (plan.algorithm == Algorithm::multimem && !multicast_)
    throw Failure(ErrorKind::unsupported, "this group's GPUs have no multicast memory");
  put(plan, operands, call);
  const auto launched = order_->enter(stream);
  launch_collective(plan, call, place(launched, stream), options.shape);
  order_->leave(launched, stream);
}

namespace {

template <class Body>
std::optional<Failure> attempt(Body body) noexcept {
  try {
    body();
  } catch (const Failure& failure) {
    return failure;
  } catch (const std::exception& error) {
    return Failure(ErrorKind::driver, error.what());
  }
  return std::nullopt;
}

}  // namespace

std::optional<Failure> DeviceGroup::start(const Plan& plan, const DeviceOperands& operands,
                                          void* stream, double limit_s) noexcept {
  return attempt([&] { launch(plan, operands, static_cast<cudaStream_t>(stream), {limit_s}); });
}

std::optional<Failure> DeviceGroup::start(std::span<const DeviceMessage> messages,
                                          int most_channels, void* stream,
                                          double limit_s) noexcept {
  return attempt([&] {
    std::vector<PairTransfer> transfers;
    for (const DeviceMessage& one : messages)
      transfers.push_back({one.sends, one.data, one.numel, one.dtype, one.peer, one.tag, 0});
    transfer(std::move(transfers), most_channels, static_cast<cudaStream_t>(stream), limit_s);
  });
}

std::optional<Failure> DeviceGroup::record(void*& event, void* stream) noexcept {
  return attempt([&] {
    const OnDevice on(options_.device);
    auto made = static_cast<cudaEvent_t>(event);
    if (!made)
      check_cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
    event = made;
    check_cuda(cudaEventRecord(made, static_cast<cudaStream_t>(stream)), "recording an event");
  });
}

std::optional<Failure> DeviceGroup::make_stream_wait(void* stream, void* event) noexcept {
  return attempt([&] {
    const OnDevice on(options_.device);
    check_cuda(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
        "waiting for an event");
  });
}

bool DeviceGroup::is_event_complete(void* event) noexcept {
  bool is_complete = true;  // behind an error nothing comes any more
  attempt([&] {
    const OnDevice on(options_.device);
    const cudaError_t told = query_beside_captures(static_cast<cudaEvent_t>(event));
    // A capture runs nothing.
    is_complete = told != cudaErrorNotReady && told != cudaErrorCapturedEvent;
  });
  return is_complete;
}

void DeviceGroup::drop(void* event) noexcept {
  attempt([&] {
    const OnDevice on(options_.device);
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  });
}

void DeviceGroup::transfer(std::vector<PairTransfer> transfers, int most_channels,
                           cudaStream_t stream, double limit_s) {
  const std::lock_guard guard(order_->mutex());
  const OnDevice on(options_.device);
  const GroupCall call = this->call(limit_s);
  for (PairTransfer& transfer : transfers) transfer.location = locate(transfer.data);
  const auto launched = order_->enter(stream);
  launch_transfers(transfers, call, most_channels, place(launched, stream));
  order_->leave(launched, stream);
}

void DeviceGroup::gauge(Gauge step, GaugeCall call, const std::byte* symmetric, int blocks,
                        cudaStream_t stream) {
  const std::lock_guard guard(order_->mutex());
  if (closed_) throw Failure(ErrorKind::usage, "this group's GPU side was closed");
  if (call.peer < 0 || call.peer >= options_.world_size || call.peer == options_.rank ||
      !options_.regions[size_t(call.peer)])
    throw Failure(ErrorKind::usage, "rank " + std::to_string(call.peer) +
                                        " has no region that rank " +
                                        std::to_string(options_.rank) + " could measure");
  if (blocks < 1 || blocks > kMaxChannels)
    throw Failure(ErrorKind::usage, "1 to " + std::to_string(kMaxChannels) +
                                        " blocks can copy, not " + std::to_string(blocks));
  const bool copies = step == Gauge::put || step == Gauge::get;
  if (copies) {
    const std::byte* mine = heaps_[size_t(options_.rank)];
    call.offset_bytes = uint64_t(symmetric - mine);
    if (symmetric < mine || call.offset_bytes > heap_bytes_ ||
        call.num_bytes > heap_bytes_ - call.offset_bytes)
      throw Failure(ErrorKind::usage, "what is copied must lie in a symmetric tensor");
    if (call.num_bytes > kMostTileBytes)  // a block copies its part as one tile
      throw Failure(ErrorKind::usage, "at most " + std::to_string(kMostTileBytes) +
                                          " bytes can be copied at a time, not " +
                                          std::to_string(call.num_bytes));
  }
  const OnDevice on(options_.device);
  const Regions& memory = copies ? heaps_ : options_.regions;
  std::copy(memory.begin(), memory.end(), call.regions);
  call.rank = options_.rank;
  const auto launched = order_->enter(stream);
  launch_gauge(step, call, blocks, stream);
  order_->leave(launched, stream);
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
  const std::unique_lock guard(order_->mutex(), std::try_to_lock);
  if (!guard) return true;  // a launch waits for room in its queue, or the last kernel's end
  if (closed_) return false;
  const OnDevice on(options_.device);
  return order_->busy();
}

void DeviceGroup::give_up(int peer) {
  std::atomic_ref(host_->abort).store(HostWords::lost(peer), std::memory_order_release);
}

std::array<uint32_t, kMaxGpuWorld> DeviceGroup::probe(Probe step, uint64_t token) {
  const OnDevice on(options_.device);
  return run_probe(step, options_.regions, multicast_, options_.rank, options_.world_size, token);
}

void DeviceGroup::use_multicast(std::byte* ptr) {
  const std::lock_guard guard(order_->mutex());
  multicast_ = ptr;
}

void DeviceGroup::use_heap(const Regions& heaps, uint64_t num_bytes, std::byte* multicast) {
  const std::lock_guard guard(order_->mutex());
  heaps_ = heaps;
  heap_bytes_ = num_bytes;
  heap_multicast_ = multicast;
}

void DeviceGroup::close() {
  {
    const std::lock_guard guard(order_->mutex());
    if (closed_) return;
    closed_ = true;
  }
  const OnDevice on(options_.device);
  // All of the device: a captured graph may run in any stream. Bounded, as every wait in a kernel
  // is.
  const cudaError_t error = cudaDeviceSynchronize();
  // On an error the context is broken, or kernels may still use the host's words.
  kernels_ended_ = error == cudaSuccess;
  check_cuda(error, "waiting for the group's kernels");
}

}  // namespace fastcoll
