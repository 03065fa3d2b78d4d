// SPDX-License-Identifier: Apache-2.0
// The threads of c10d_backend.cpp: part of that one source, compiled with it.
//
// Decides in which thread something runs that nobody waits for, and that all of it is over before
// the interpreter ends. Who lets go of a tensor may need the GIL for it (torch 2.13); a thread that
// asks for the GIL of an ending interpreter is unwound by Python, and aborts the process if that
// happens in a destructor.
#pragma once

#include <c10/util/Logging.h>
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace {

// The threads of this process. None is ever waited for: a task that finds no idle one gets a new
// one, as tasks may wait for each other.
class Threads {
 public:
  static void run(std::function<void()> task) { of_process()->put(std::move(task)); }

  // Wait until all tasks are over, those too that they start.
  static void drain() {
    Threads& ours = *of_process();
    std::unique_lock lock(ours.mutex_);
    ours.over_.wait(lock, [&ours] { return ours.num_open_ == 0; });
  }

 private:
  // Never destroyed: idle threads wait in it until the process is gone.
  static Threads*& of_process() {
    static Threads* threads = new Threads;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      of_process() = new Threads;  // a forked child has none of the threads
    });
    (void)registered;
    return threads;
  }

  void put(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    if (tasks_.size() >= num_idle_) std::thread([this] { work_off(); }).detach();
    tasks_.push_back(std::move(task));
    ++num_open_;
    changed_.notify_one();
  }

  void work_off() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++num_idle_;
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      --num_idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        task();
      } catch (const std::exception& error) {
        LOG(ERROR) << "fastcoll: a callback of a call raised: " << error.what();
      }
      task = nullptr;  // what it holds goes before it counts as over
      lock.lock();
      if (--num_open_ == 0) over_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, over_;
  std::deque<std::function<void()>> tasks_;
  size_t num_idle_ = 0;
  size_t num_open_ = 0;
};

}  // namespace
