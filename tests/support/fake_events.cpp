// SPDX-License-Identifier: Apache-2.0
#include "fake_events.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

std::mutex mutex;
std::atomic<cudaError_t> told = cudaSuccess;  // of every event that is asked about
uint64_t next_event = 1;
// The kinds, streams and events of all that was done, in its order. Kind 1 is a launch, 2 a record,
// 3 a wait.
std::vector<uint64_t> done_in_streams;
cudaError_t note(uint64_t what, const void* stream, const void* event) {
  const std::lock_guard guard(mutex);
  for (const uint64_t word : {what, uint64_t(reinterpret_cast<uintptr_t>(stream)),
                              uint64_t(reinterpret_cast<uintptr_t>(event))})
    done_in_streams.push_back(word);
  return cudaSuccess;
}

}  // namespace

void note_launch(cudaStream_t stream) { note(1, stream, nullptr); }

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  use_context();
  const std::lock_guard guard(mutex);
  *event = reinterpret_cast<cudaEvent_t>(uintptr_t{next_event++});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return use_context(); }
cudaError_t cudaEventQuery(cudaEvent_t) {
  use_context();
  return told;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  use_context();
  return note(2, stream, event);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  use_context();
  return note(3, stream, event);
}

// ---- for the tests

#pragma GCC visibility push(default)
void fake_be_late(bool is) { told = is ? cudaErrorNotReady : cudaSuccess; }
// Every event was last recorded in a stream that is being captured.
void fake_capture_events(bool is) { told = is ? cudaErrorCapturedEvent : cudaSuccess; }
// Words of what was done since the last question, and their number.
const uint64_t* fake_done_in_streams(uint64_t* number) {
  static std::vector<uint64_t> told;
  const std::lock_guard guard(mutex);
  told.swap(done_in_streams);
  done_in_streams.clear();
  *number = told.size();
  return told.data();
}
#pragma GCC visibility pop

}  // extern "C"
