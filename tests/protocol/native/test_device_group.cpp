// SPDX-License-Identifier: Apache-2.0
// A group's GPU side on a CUDA runtime made of counters: the calls that wait for the device.
//
// The runtime's functions that wait for running kernels are noted, and launches can be held up.
// Ends with "all well", or with the first complaint.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "cuda/device_group.h"
#include "memory/cuda_driver.h"

namespace {

int num_waits = 0;            // calls that wait for running kernels
int num_calls = 0;            // of the runtime
int num_waiting_streams = 0;  // behind an event
int num_returned = 0;         // host words that may be lent again
bool runs = false;            // a kernel
bool refuses = false;         // the runtime, to wait
std::atomic<bool> is_waiting = false, go_on = true;
fastcoll::HostWords lent{};

void demand(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void until(const std::atomic<bool>& flag, const std::string& what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!flag) {
    demand(std::chrono::steady_clock::now() < end, what);
    std::this_thread::yield();
  }
}

cudaError_t note() {
  ++num_calls;
  return cudaSuccess;
}

}  // namespace

// ---- the runtime
// ---------------------------------------------------------------------------------

extern "C" {
cudaError_t cudaDeviceSynchronize() {
  ++num_waits;
  is_waiting = true;
  until(go_on, "whoever asks for the verdict waits for the kernels");
  if (refuses) return cudaErrorStreamCaptureUnsupported;
  runs = false;
  return note();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return note(); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return note(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return note(); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return note(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  ++num_waiting_streams;
  return note();
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return note();
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return note(); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return note(); }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return note();
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
// By its symbol: the number of its arguments depends on the toolkit, but not the first ones.
cudaError_t capture_info(cudaStream_t,
                         cudaStreamCaptureStatus*) __asm__("cudaStreamGetCaptureInfo");
cudaError_t capture_info(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
}

// ---- the rest of the extension
// -------------------------------------------------------------------

namespace fastcoll {

void check_cuda(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) throw Failure(ErrorKind::driver, what);
}
OnDevice::OnDevice(int) {}
OnDevice::~OnDevice() = default;
HostWords* borrow_host_words() { return new (&lent) HostWords{}; }
void return_host_words(HostWords*) { ++num_returned; }
std::optional<LaunchShape> launched_shape;
bool can_start_early() { return true; }
bool starts_early;  // the kernel that was launched last
void launch_collective(const Plan&, DeviceCall, const Place& place,
                       const std::optional<LaunchShape>& shape) {
  starts_early = place.early;
  launched_shape = shape;
  is_waiting = true;
  until(go_on, "what must not wait waits for a launch into a full queue");
}
GaugeCall launched_gauge{};
void launch_gauge(Gauge, GaugeCall call, int, cudaStream_t) { launched_gauge = call; }
void launch_transfers(const std::vector<PairTransfer>&, const GroupCall&, int, const Place& place) {
  starts_early = place.early;
}
std::array<uint32_t, kMaxGpuWorld> run_probe(Probe, const Regions&, std::byte*, int, int,
                                             uint64_t) {
  return {};
}

}  // namespace fastcoll

// ---- the checks --------------------------------------------------------------------------------

using namespace fastcoll;

namespace {

std::byte* const kRegions[] = {reinterpret_cast<std::byte*>(size_t{1} << 40),
                               reinterpret_cast<std::byte*>(size_t{2} << 40)};
std::byte* const kHeaps[] = {reinterpret_cast<std::byte*>(size_t{3} << 40),
                             reinterpret_cast<std::byte*>(size_t{4} << 40)};
constexpr uint64_t kHeapBytes = uint64_t{3} << 30;
constexpr int kChannels = 8;

std::unique_ptr<DeviceGroup> make(bool shares = false, bool starts_early = true) {
  DeviceGroupOptions options;
  options.world_size = 2;
  std::copy(std::begin(kRegions), std::end(kRegions), options.regions.begin());
  options.num_channels = kChannels;
  options.shares = shares;
  options.starts_early = starts_early;
  auto group = std::make_unique<DeviceGroup>(options);
  Regions heaps{};
  std::copy(std::begin(kHeaps), std::end(kHeaps), heaps.begin());
  group->use_heap(heaps, kHeapBytes, nullptr);
  return group;
}

Plan a_plan() {
  Plan plan{};
  plan.channels = kChannels;
  return plan;
}

// Python may destroy a closed group whenever it collects garbage, in any thread.
void nothing_is_waited_for_behind_close() {
  auto group = make();
  runs = true;
  lent.verdict.rank = 1;
  std::atomic_ref(lent.verdict.kind).store(uint32_t(DeviceError::timeout));
  group->close();
  demand(num_returned == 0, "words are lent again while threads may look at them");
  const auto verdict = group->verdict();
  demand(verdict && verdict->rank == 1, "the verdict is lost");
  const int waits_before = num_waits;
  runs = true;  // another group's
  group->close();
  group->give_up(1);
  group.reset();
  runs = false;
  demand(num_waits == waits_before, "a closed group's end waits for the device");
  demand(num_returned == 1, "close leaves words behind");
}

void a_group_that_nobody_closed_leaves_nothing() {
  auto group = make();
  demand(!group->verdict(), "a verdict of nothing");
  runs = true;
  group.reset();
  demand(num_returned == 2, "words left behind");
}

// A launch into a full queue waits for the very kernels that giving up is to end.
void giving_up_waits_for_nothing() {
  auto group = make();
  is_waiting = go_on = false;
  std::thread launching([&] { group->launch(a_plan(), {}, nullptr, {1.0}); });
  until(is_waiting, "no launch");
  const int calls_before = num_calls;
  demand(group->busy(), "a launch that waits is no work");
  demand(!group->verdict(), "a verdict of nothing");
  group->give_up(1);
  demand(std::atomic_ref(lent.abort).load() == HostWords::lost(1), "the kernels are not told");
  demand(num_calls == calls_before, "giving up asks CUDA for something");
  go_on = true;
  launching.join();
}

// Threads that hold the GIL ask for the verdict; they must never wait for a kernel.
void the_verdict_is_there_while_close_waits() {
  auto group = make();
  is_waiting = go_on = false;
  std::atomic<bool> is_closed = false;
  std::thread closing([&] {
    group->close();
    is_closed.store(true, std::memory_order_relaxed);  // orders nothing: ThreadSanitizer looks on
  });
  until(is_waiting, "close does not wait");
  demand(!group->verdict(), "a verdict of nothing");
  go_on = true;
  while (!is_closed.load(std::memory_order_relaxed)) group->verdict();
  demand(!group->verdict(), "a verdict of nothing");
  closing.join();
}

void what_may_still_be_written_is_not_lent_again() {
  auto group = make();
  runs = refuses = true;
  try {
    group->close();
    demand(false, "a wait that failed went unsaid");
  } catch (const Failure&) {
  }
  const int returned_before = num_returned;
  group.reset();
  demand(num_returned == returned_before, "lent again, though kernels may run");
}

// A measurement that is told something wrong must not write where it likes.
void a_step_is_measured_between_regions_alone() {
  auto group = make();
  const std::byte* data = kHeaps[0];
  const auto takes = [&](Gauge step, int peer, const std::byte* symmetric, uint64_t num_bytes,
                         int blocks) {
    GaugeCall call{};
    call.peer = peer;
    call.num_bytes = num_bytes;
    try {
      group->gauge(step, call, symmetric, blocks, nullptr);
    } catch (const Failure&) {
      return false;
    }
    return true;
  };
  const std::byte* late = data + (kHeapBytes - kMostTileBytes);
  demand(takes(Gauge::put, 1, late, kMostTileBytes, 1), "a put up to the end is refused");
  demand(takes(Gauge::put, 1, data + 64, kHeapBytes / 2, 1), "a put within the data is refused");
  demand(launched_gauge.offset_bytes == 64, "a put elsewhere");
  demand(launched_gauge.regions[1] == kHeaps[1], "a put into no heap");
  demand(!takes(Gauge::put, 1, late + 1, kMostTileBytes, 1), "a put behind the data");
  demand(!takes(Gauge::put, 1, data, kMostTileBytes + 1, 1), "a put of more than a tile");
  demand(!takes(Gauge::get, 1, data - 1, 16, 1), "a get before the data");
  demand(!takes(Gauge::get, 1, kHeaps[1], 16, 1), "a get of nobody's");
  demand(!takes(Gauge::signal, 0, nullptr, 0, 1), "a signal to itself");
  demand(!takes(Gauge::signal, 2, nullptr, 0, 1), "a signal to nobody");
  demand(!takes(Gauge::put, 1, data, 16, kMaxChannels + 1), "too many blocks");
  demand(takes(Gauge::signal, 1, nullptr, 0, 1), "a signal is refused");
}

// Groups that share a device's blocks: each kernel is behind the one before, of whichever group.
void kernels_that_share_blocks_follow_each_other() {
  const auto stream = [](uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); };
  for (const bool shares : {true, false}) {
    auto one = make(shares), other = make(shares);
    num_waiting_streams = 0;
    one->launch(a_plan(), {}, stream(1), {1.0});
    other->launch(a_plan(), {}, stream(2), {1.0});
    other->launch(a_plan(), {}, stream(2), {1.0});
    one->launch(a_plan(), {}, stream(1), {1.0});
    demand(num_waiting_streams == (shares ? 2 : 0),
           shares ? "kernels that share blocks run beside each other" : "kernels wait for nothing");
    one->launch(a_plan(), {}, stream(2), {1.0});
    demand(num_waiting_streams == (shares ? 3 : 1), "two kernels of a group beside each other");
  }
}

// The launch before it in its stream is then not all that it has to wait for.
void a_kernel_behind_an_event_starts_late() {
  const auto stream = [](uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); };
  for (const bool may : {true, false}) {
    auto group = make(false, may);
    const auto launch = [&](uintptr_t number) {
      group->launch(a_plan(), {}, stream(number), {1.0});
      return starts_early;
    };
    const auto transfer = [&](uintptr_t number) {
      group->transfer({}, 1, stream(number), 1.0);
      return starts_early;
    };
    demand(launch(1) == may && launch(1) == may, may ? "a kernel starts late" : "starts early");
    demand(!launch(2) && !transfer(1), "a kernel behind an event starts early");
    demand(transfer(1) == may && launch(1) == may, may ? "a transfer starts late" : "starts early");
  }
}

void a_plan_for_other_channels_is_refused() {
  auto group = make();
  Plan plan = a_plan();
  --plan.channels;
  try {
    group->launch(plan, {}, nullptr, {1.0});
    demand(false, "channels that the regions are not laid out for");
  } catch (const Failure&) {
  }
}

void a_launch_has_the_shape_that_was_asked_for() {
  auto group = make();
  group->launch(a_plan(), {}, nullptr, {1.0, LaunchShape{3, 64, 16}});
  demand(launched_shape && launched_shape->blocks == 3, "another shape");
  group->launch(a_plan(), {}, nullptr, {1.0});
  demand(!launched_shape, "a shape that nobody asked for");
}

}  // namespace

int main() {
  nothing_is_waited_for_behind_close();
  a_group_that_nobody_closed_leaves_nothing();
  the_verdict_is_there_while_close_waits();
  giving_up_waits_for_nothing();
  a_step_is_measured_between_regions_alone();
  a_launch_has_the_shape_that_was_asked_for();
  kernels_that_share_blocks_follow_each_other();
  a_kernel_behind_an_event_starts_late();
  a_plan_for_other_channels_is_refused();
  what_may_still_be_written_is_not_lent_again();
  std::printf("all well\n");
}
