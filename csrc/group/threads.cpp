// SPDX-License-Identifier: Apache-2.0
#include "group/threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace fastcoll {

namespace {

class Threads {
 public:
  // Never destroyed: idle threads wait in it until the process is gone.
  static Threads*& of_process() {
    static Threads* threads = new Threads;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      of_process() = new Threads;  // a forked child has none of the threads
    });
    (void)registered;
    return threads;
  }

  void put(std::function<void()> task, Draining draining) {
    const std::lock_guard lock(mutex_);
    if (tasks_.size() >= num_idle_) std::thread([this] { run_tasks(); }).detach();
    tasks_.push_back({std::move(task), draining});
    if (draining == Draining::waits) ++num_open_;
    changed_.notify_one();
  }

  void drain() {
    std::unique_lock lock(mutex_);
    over_.wait(lock, [this] { return num_open_ == 0; });
  }

 private:
  struct Task {
    std::function<void()> run;
    Draining draining;
  };

  void run_tasks() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++num_idle_;
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      --num_idle_;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task.run();
      task.run = nullptr;  // its captures go before it counts as over
      lock.lock();
      if (task.draining == Draining::waits && --num_open_ == 0) over_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_, over_;
  std::deque<Task> tasks_;
  size_t num_idle_ = 0;
  size_t num_open_ = 0;  // that draining waits for
};

}  // namespace

void run_in_thread(std::function<void()> task, Draining draining) {
  Threads::of_process()->put(std::move(task), draining);
}

void drain_threads() { Threads::of_process()->drain(); }

}  // namespace fastcoll
