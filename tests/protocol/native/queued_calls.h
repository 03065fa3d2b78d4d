// SPDX-License-Identifier: Apache-2.0
// Calls for the queue's test that note what the queue does with them.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "group/call_queue.h"

namespace fastcoll {

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("WRONG: %s\n", what);
  std::exit(1);
}

class Task final : public QueuedCall {
 public:
  Task(std::function<void()> run, std::function<void()> over)
      : run_(std::move(run)), over_(std::move(over)) {}
  void run() noexcept override { run_(); }
  void over() noexcept override { over_(); }

 private:
  std::function<void()> run_, over_;
};

// A call of which one half was done where it was made.
class TwoHalves final : public QueuedCall {
 public:
  explicit TwoHalves(std::vector<int>& order, int number, Begun part = Begun::half)
      : order_(order), number_(number), part_(part) {}
  Begun begin() noexcept override {
    begun = true;
    if (part_ == Begun::all) note();
    return part_;
  }
  void run() noexcept override { note(); }
  bool finish(Host& host) noexcept override {
    meanwhile();
    if (host.steps_out()) return false;
    note();
    return true;
  }
  bool finish_if_ready() noexcept override {
    if (is_ready) note();
    return is_ready;
  }
  void over() noexcept override {
    check(is_noted_ && !is_over, "a call is over before it is carried out, or twice");
    is_over = true;
  }

  std::atomic<bool> begun{false}, is_over{false}, is_ready{false};
  std::function<void()> meanwhile = [] {};
  std::thread::id carried_out_by;

 private:
  void note() {
    check(!is_noted_, "a call was carried out twice");
    is_noted_ = true;
    carried_out_by = std::this_thread::get_id();
    order_.push_back(number_);
  }

  std::vector<int>& order_;
  const int number_;
  const Begun part_;
  bool is_noted_ = false;
};

}  // namespace fastcoll
