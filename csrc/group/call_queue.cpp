// SPDX-License-Identifier: Apache-2.0
#include "group/call_queue.h"

#include <string>
#include <system_error>
#include <utility>

#include "check.h"
#include "group/threads.h"

namespace fastcoll {

bool CallQueue::begin() {
  uint64_t seen = queued_.load(std::memory_order_relaxed);
  do {
    if (seen % kHere != 0) return false;
  } while (!queued_.compare_exchange_weak(seen, seen + kHere, std::memory_order_relaxed));
  return true;
}

void CallQueue::start_thread() {
  if (has_thread_ || is_taken_) return;
  run_in_thread([self = shared_from_this()] { self->work_off(); });
  has_thread_ = true;
}

bool CallQueue::push(std::shared_ptr<QueuedCall> call) {
  std::unique_lock lock(mutex_);
  if (!begin()) return false;
  if (resting_ && resting_->finish_if_ready()) {
    std::shared_ptr<QueuedCall> done = std::exchange(resting_, nullptr);
    lock.unlock();
    end(done);
    done.reset();  // may take the GIL
    lock.lock();
  }
  if (num_open_ == 0) switch (call->begin()) {
      case QueuedCall::Begun::all:
        num_open_ = 1;
        lock.unlock();
        end(call);
        return true;
      case QueuedCall::Begun::half:
        num_open_ = 1;
        resting_ = std::move(call);
        return true;
      case QueuedCall::Begun::no:
        break;
    }
  try {
    start_thread();
  } catch (const std::system_error& error) {
    queued_.fetch_sub(kHere, std::memory_order_relaxed);
    throw Failure(ErrorKind::driver,
                  std::string("no thread for an asynchronous call: ") + error.what());
  }
  if (resting_) calls_.push_front(std::move(resting_));
  calls_.push_back(std::move(call));
  ++num_open_;
  return true;
}

void CallQueue::go_on() {
  if (std::shared_ptr<QueuedCall> call = take()) {
    const bool is_done = call->finish_if_ready();
    put_back(std::move(call), is_done);
  }
}

bool CallQueue::finish(const QueuedCall* call, Host& host) {
  std::shared_ptr<QueuedCall> taken = take(call);
  if (!taken) return false;
  const bool is_done = taken->finish(host);
  put_back(std::move(taken), is_done);
  return is_done;
}

std::shared_ptr<QueuedCall> CallQueue::take(const QueuedCall* call) {
  const std::lock_guard lock(mutex_);
  if (!resting_ || (call && call != resting_.get())) return nullptr;
  is_taken_ = true;
  return std::exchange(resting_, nullptr);
}

void CallQueue::put_back(std::shared_ptr<QueuedCall> call, bool is_done) {
  if (is_done) end(call);
  std::unique_lock lock(mutex_);
  is_taken_ = false;
  if (!is_done) calls_.push_front(std::move(call));
  if (calls_.empty()) return;
  try {
    start_thread();
  } catch (const std::system_error&) {  // then this thread runs the calls
    has_thread_ = true;
    lock.unlock();
    work_off();
  }
}

bool CallQueue::await(std::chrono::milliseconds limit) {
  go_on();
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, limit, [this] { return num_open_ == 0; });
}

void CallQueue::end(const std::shared_ptr<QueuedCall>& call) {
  // Before any thread learns that the call is over: a thread that waited then finds the group idle,
  // and calls without a detour.
  queued_.fetch_sub(kHere, std::memory_order_release);
  call->over();
  const std::lock_guard lock(mutex_);
  if (--num_open_ == 0) over_.notify_all();
}

void CallQueue::work_off() {
  std::unique_lock lock(mutex_);
  while (!calls_.empty() && !is_taken_) {
    std::shared_ptr<QueuedCall> call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call->run();
    end(call);
    call.reset();
    lock.lock();
  }
  has_thread_ = false;
}

}  // namespace fastcoll
