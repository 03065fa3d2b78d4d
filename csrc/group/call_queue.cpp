// SPDX-License-Identifier: Apache-2.0
#include "group/call_queue.h"

#include <sched.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "check.h"
#include "group/threads.h"

namespace fastcoll {

namespace {

using Callbacks = std::deque<std::function<void()>>;
// Of a thread that carries out queued calls, while one of them ends.
thread_local Callbacks* callbacks_behind = nullptr;

void start(Callbacks& callbacks) {
  try {
    for (; !callbacks.empty(); callbacks.pop_front()) run_in_thread(callbacks.front());
  } catch (const std::system_error&) {  // there is no thread: they run behind the calls
  }
}

}  // namespace

bool CallQueue::begin() {
  uint64_t seen = queued_.load(std::memory_order_relaxed);
  do {
    if (seen % kHere != 0) return false;
  } while (!queued_.compare_exchange_weak(seen, seen + kHere, std::memory_order_relaxed));
  return true;
}

void CallQueue::start_thread() {
  if (has_thread_ || is_taken_) return;
  run_in_thread([self = shared_from_this()] { self->run_calls(); });
  has_thread_ = true;
}

bool CallQueue::push(std::shared_ptr<QueuedCall> call) {
  std::unique_lock lock(mutex_);
  if (!begin()) return false;
  end_resting_if_ready(lock);
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

bool CallQueue::end_resting_if_ready(std::unique_lock<std::mutex>& lock) {
  if (!resting_ || !resting_->finish_if_ready()) return false;
  std::shared_ptr<QueuedCall> done = std::exchange(resting_, nullptr);
  lock.unlock();
  end(done);
  done.reset();  // may take the GIL
  lock.lock();
  return true;
}

bool CallQueue::has(const QueuedCall* call) const {
  const auto is_it = [call](const auto& queued) { return queued.get() == call; };
  return under_way_ == call || std::any_of(calls_.begin(), calls_.end(), is_it);
}

// Waits for a moment beside strangers: asleep, as a yield gives each of them a time slice.
class CallQueue::BusyHost final : public Host {
 public:
  bool steps_out() override { return now_us() >= end_us_; }
  int64_t longest_sleep_us() override { return kHandOverUs / 2; }

 private:
  // Each thread that wakes up may have to wait for a stranger's slice, of 3 ms and more.
  static constexpr int64_t kHandOverUs = 4000;
  const int64_t end_us_ = now_us() + kHandOverUs;
};

void CallQueue::linger(const QueuedCall* call, Company& company) {
  // A hand-over wakes two threads: the one that runs the call, and the one that waits for it. To
  // wait here as long as that takes at most twice the better of the two choices.
  constexpr int64_t kHandOverUs = 100;
  int64_t time_us = now_us();
  const int64_t end_us = time_us + kHandOverUs;
  while (time_us < end_us && !company.is_there(time_us)) {
    bool rests;
    {
      std::unique_lock lock(mutex_);
      rests = resting_.get() == call;
      if (rests ? end_resting_if_ready(lock) : !has(call)) return;
    }
    sched_yield();  // the call's thread, which is no stranger, may need this CPU
    const int64_t before_us = std::exchange(time_us, now_us());
    if (rests) company.note_pause(before_us, time_us);
  }
  if (company.is_there(time_us)) {
    BusyHost host;
    finish(call, host);
  } else {
    go_on();
  }
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
  under_way_ = resting_.get();
  return std::exchange(resting_, nullptr);
}

void CallQueue::put_back(std::shared_ptr<QueuedCall> call, bool is_done) {
  std::unique_lock lock = is_done ? end(call) : std::unique_lock(mutex_);
  is_taken_ = false;
  under_way_ = nullptr;
  if (!is_done) calls_.push_front(std::move(call));
  if (calls_.empty()) return;
  try {
    start_thread();
  } catch (const std::system_error&) {  // then this thread runs the calls
    has_thread_ = true;
    lock.unlock();
    run_calls();
  }
}

bool CallQueue::await(std::chrono::milliseconds limit) {
  go_on();
  std::unique_lock lock(mutex_);
  return over_.wait_for(lock, limit, [this] { return num_open_ == 0; });
}

std::unique_lock<std::mutex> CallQueue::end(const std::shared_ptr<QueuedCall>& call) {
  // Before any thread learns that the call is over: a thread that waited then finds the group idle,
  // and calls without a detour.
  queued_.fetch_sub(kHere, std::memory_order_release);
  call->over();
  std::unique_lock lock(mutex_);
  if (--num_open_ == 0) over_.notify_all();
  return lock;
}

void CallQueue::run_callback(std::function<void()> callback) {
  if (callbacks_behind) callbacks_behind->push_back(std::move(callback));
  else run_in_thread(std::move(callback));
}

void CallQueue::run_calls() {
  Callbacks callbacks;
  std::unique_lock lock(mutex_);
  while (!calls_.empty() && !is_taken_) {
    std::shared_ptr<QueuedCall> call = std::move(calls_.front());
    calls_.pop_front();
    under_way_ = call.get();
    lock.unlock();
    start(callbacks);  // this call may take long
    call->run();
    callbacks_behind = &callbacks;
    lock = end(call);
    callbacks_behind = nullptr;
    under_way_ = nullptr;
    lock.unlock();
    call.reset();
    lock.lock();
  }
  has_thread_ = false;
  lock.unlock();
  for (const auto& callback : callbacks) callback();
}

}  // namespace fastcoll
