// SPDX-License-Identifier: Apache-2.0
#include "group/gpu_calls.h"

#include <time.h>

#include "group/process_group.h"

namespace fastcoll {

namespace {

// Steps of milliseconds do, and cost a tenth of the exact time.
int64_t coarse_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

}  // namespace

void GpuCalls::add_plan(const Plan& plan, CallOptions options) {
  const bool by_a_kernel =
      plan.algorithm != Algorithm::nccl && plan.algorithm != Algorithm::copy_engine;
  if (by_a_kernel)
    plans_.add(plan, options, plan.numel, plan.numel);  // on GPUs each size has its own plan
}

void GpuCalls::use_symmetric(uintptr_t begin, uintptr_t end) {
  symmetric_begin_ = begin;
  symmetric_end_ = end;
  uses_.clear();
}

void GpuCalls::note_use(uintptr_t ptr, uintptr_t stream) {
  constexpr size_t kMost = 4096;  // a program of ever new views must not grow for ever
  if (ptr < symmetric_begin_ || ptr >= symmetric_end_) return;
  if (uses_.size() >= kMost) uses_.clear();
  uses_.emplace(ptr, stream);
}

bool GpuCalls::is_known_use(const void* ptr, void* stream) const {
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  if (address < symmetric_begin_ || address >= symmetric_end_) return true;
  return uses_.contains({address, reinterpret_cast<uintptr_t>(stream)});
}

// Looks at the peers' sockets now and then, as each takes a system call.
bool GpuCalls::all_ranks_joined(const ProcessGroup& group) {
  constexpr int64_t kLookMs = 10;
  const int64_t now = coarse_ms();
  if (now < next_look_ms_) return true;
  for (int peer = 0; peer < group.world_size(); ++peer)
    if (peer != group.rank() && group.peer_is_gone(peer)) return false;
  next_look_ms_ = now + kLookMs;
  return true;
}

bool GpuCalls::is_healthy(const ProcessGroup& group) {
  return !is_paused_ && group.is_usable() && side_.is_healthy() && all_ranks_joined(group);
}

bool GpuCalls::may_start(const ProcessGroup& group, const void* input, const void* output,
                         void* stream) {
  return is_healthy(group) && is_known_use(input, stream) &&
         (output == input || is_known_use(output, stream));
}

GpuCalls::~GpuCalls() {
  if (before_) events_.push_back(before_);
  for (void* event : events_) side_.drop(event);
}

void GpuCalls::note(std::span<const DeviceMessage> messages) {
  for (const DeviceMessage& one : messages)
    journal_->write_message(one.sends, one.peer, one.dtype, one.numel, one.tag, {});
  journal_->note_messages(messages);
}

std::optional<Failure> GpuCalls::follow(void* stream) noexcept {
  std::optional<Failure> failure = side_.record(before_, stream);
  return failure ? failure : side_.make_stream_wait(beside_.stream, before_);
}

std::optional<Failure> GpuCalls::take_event(void*& event) noexcept {
  if (!events_.empty()) {
    event = events_.back();
    events_.pop_back();
  }
  return side_.record(event, beside_.stream);
}

}  // namespace fastcoll
