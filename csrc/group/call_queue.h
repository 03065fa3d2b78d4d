// SPDX-License-Identifier: Apache-2.0
// The asynchronous calls of a group. There are two queues: Python's (work.py), for calls that need
// Python, and this one, whose calls a thread carries out without the GIL. This one takes a call
// only while Python's is empty, and Python's calls wait for those queued here. So a group's calls
// stay in order, whichever thread makes them. No Python here.
//
// A busy Python program does not delay such a call, and waiting for it costs two switches of
// threads. The thread never takes the GIL: a thread that closes the group may hold the GIL and wait
// for it. So the handle keeps the tensors. If the handle goes first, Python's main thread releases
// them when the call is over (python/kept_memory.h, Py_AddPendingCall). The compiled backend of
// torch uses the same queue through core_api.h.
//
// A synchronous call runs in its caller's thread once the calls queued here are over. It is queued
// only behind calls of Python's queue.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "cpu/company.h"
#include "cpu/wait.h"

namespace fastcoll {

class QueuedCall {
 public:
  // The part of a call that `begin` did: nothing, its first half, or all of it.
  enum class Begun { no, half, all };

  virtual ~QueuedCall() = default;  // may take the GIL
  // Does the part that takes no wait.
  virtual Begun begin() noexcept { return Begun::no; }
  virtual void run() noexcept = 0;  // carries it out, or the rest of it
  // Of one that is half done: goes on with it; false where the host stepped out.
  virtual bool finish(Host&) noexcept { return true; }
  // The same if it takes no wait: whether it was done.
  virtual bool finish_if_ready() noexcept { return false; }
  // The group is idle again unless there are more. Never takes the GIL: its holder may wait here.
  virtual void over() noexcept = 0;
};

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  // While calls are queued, a synchronous one has to go behind them.
  bool idle() const { return queued_.load(std::memory_order_acquire) == 0; }

  void begin_in_python() { queued_.fetch_add(kInPython, std::memory_order_relaxed); }
  void end_in_python() { queued_.fetch_sub(kInPython, std::memory_order_release); }

  // Whether nothing is queued in Python, whose calls go first.
  bool takes_calls() const { return queued_.load(std::memory_order_relaxed) % kHere == 0; }
  // False unless it takes calls. Throws Failure(ErrorKind::driver) where there is no thread for it.
  // A call with none before it is begun here. If its first half was done, it rests until a thread
  // waits for it, asks for it or queues another one. The program waits for most calls, and the
  // waiting thread is quicker than a thread that has to wake up.
  bool push(std::shared_ptr<QueuedCall> call);
  // Get on with the call that rests, if one does: here if that takes no wait, else in a thread.
  void go_on();
  // Go on in this thread with the call that rests: with `call`, or any if that is null. False if
  // that does not rest, or where the host stepped out; a thread goes on with it then.
  bool finish(const QueuedCall* call, Host& host);
  // Wait for a call as long as a hand-over to a thread takes: it goes on here if it rests, or in
  // its thread. After that time it goes on in a thread.
  void linger(const QueuedCall* call, Company& company);
  // Run a callback of a call, which may start calls of the group and wait for them, in some thread.
  // The thread that carried out the call runs it if no call is left: none has to wake up for that.
  static void run_callback(std::function<void()> callback);
  // Wait until nothing is queued here. False if calls are left after `limit`.
  bool await(std::chrono::milliseconds limit);

 private:
  class BusyHost;

  bool begin();
  void start_thread();  // under the mutex
  // Carry out the rest of the call that rests, if that takes no wait; whether it did. `lock`, which
  // holds the mutex, is released meanwhile.
  bool end_resting_if_ready(std::unique_lock<std::mutex>& lock);
  bool has(const QueuedCall* call) const;  // under the mutex: it is queued or under way
  // Not under it. The call that rests, to go on with it here: `call`, or any if that is null.
  std::shared_ptr<QueuedCall> take(const QueuedCall* call = nullptr);
  void put_back(std::shared_ptr<QueuedCall> call, bool is_done);
  // Returns with the mutex, for the caller to put the call away: from here on another may begin.
  std::unique_lock<std::mutex> end(const std::shared_ptr<QueuedCall>& call);
  void run_calls();

  static constexpr uint64_t kInPython = 1, kHere = uint64_t{1} << 32;
  std::atomic<uint64_t> queued_{0};  // calls: Python's in the low half, those here above
  std::mutex mutex_;
  std::condition_variable over_;
  std::deque<std::shared_ptr<QueuedCall>> calls_;
  std::shared_ptr<QueuedCall> resting_;
  bool is_taken_ = false;  // a thread goes on with it
  const QueuedCall* under_way_ = nullptr;
  uint64_t num_open_ = 0;  // calls here whose over() has not returned
  bool has_thread_ = false;
};

}  // namespace fastcoll
