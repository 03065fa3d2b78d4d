// SPDX-License-Identifier: Apache-2.0
#include "call_queue.h"

#include <string>
#include <system_error>
#include <utility>

#include "check.h"
#include "threads.h"

namespace fastcoll {

bool CallQueue::begin() {
  uint64_t seen = queued_.load(std::memory_order_relaxed);
  do {
    if (seen % kHere != 0) return false;
  } while (!queued_.compare_exchange_weak(seen, seen + kHere, std::memory_order_relaxed));
  return true;
}

bool CallQueue::push(std::shared_ptr<QueuedCall> call) {
  const std::lock_guard lock(mutex_);
  if (!begin()) return false;
  try {
    if (!has_thread_) run_in_thread([self = shared_from_this()] { self->work_off(); });
  } catch (const std::system_error& error) {
    queued_.fetch_sub(kHere, std::memory_order_relaxed);
    throw Failure(ErrorKind::driver,
                  std::string("no thread for an asynchronous call: ") + error.what());
  }
  has_thread_ = true;
  calls_.push_back(std::move(call));
  ++num_open_;
  return true;
}

bool CallQueue::await(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, limit, [this] { return num_open_ == 0; });
}

void CallQueue::work_off() {
  std::unique_lock lock(mutex_);
  while (!calls_.empty()) {
    std::shared_ptr<QueuedCall> call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call->run();
    // Before anybody learns that it is over: who waited finds the group idle, and calls without a
    // detour.
    queued_.fetch_sub(kHere, std::memory_order_release);
    call->over();
    lock.lock();
    if (--num_open_ == 0) over_.notify_all();
    lock.unlock();
    call.reset();
    lock.lock();
  }
  has_thread_ = false;
}

}  // namespace fastcoll
