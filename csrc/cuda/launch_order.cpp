// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch_order.h"

#include <map>

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

cudaError_t query_beside_captures(cudaEvent_t event) {
  const BesideCapture beside;
  const cudaError_t error = cudaEventQuery(event);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

LaunchOrder::LaunchOrder() {
  cudaError_t error = cudaSuccess;
  for (Last* last : {&eager_, &captured_})
    if (error == cudaSuccess)
      error = cudaEventCreateWithFlags(&last->event, cudaEventDisableTiming);
  if (error == cudaSuccess) return;
  if (eager_.event) cudaEventDestroy(eager_.event);
  check_cuda(error, "making a group's events");
}

LaunchOrder::~LaunchOrder() {
  cudaEventDestroy(eager_.event);
  cudaEventDestroy(captured_.event);
}

LaunchOrder::Last LaunchOrder::enter(cudaStream_t stream) {
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
  const bool waits = last.used && last.capture == capture && last.stream_id != stream_id;
  if (waits) check_cuda(cudaStreamWaitEvent(stream, last.event, 0), "waiting for an event");
  return {stream_id, capture, true, last.event, waits};
}

void LaunchOrder::leave(const Last& launched, cudaStream_t stream) {
  (launched.capture == 0 ? eager_ : captured_) = launched;
  check_cuda(cudaEventRecord(launched.event, stream), "recording an event");
}

bool LaunchOrder::busy() const {
  return eager_.used && query_beside_captures(eager_.event) == cudaErrorNotReady;
}

std::shared_ptr<LaunchOrder> shared_order(int device) {
  static std::mutex mutex;
  static auto* orders = new std::map<int, std::weak_ptr<LaunchOrder>>;  // never destroyed
  const std::lock_guard guard(mutex);
  std::weak_ptr<LaunchOrder>& kept = (*orders)[device];
  std::shared_ptr<LaunchOrder> found = kept.lock();
  if (!found) kept = found = std::make_shared<LaunchOrder>();
  return found;
}

}  // namespace fastcoll
