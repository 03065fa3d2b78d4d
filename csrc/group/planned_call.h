// SPDX-License-Identifier: Apache-2.0
// A call whose plan is known, for a group's queue. Keeps the failure until the handle asks for it.
// No Python here.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "group/process_group.h"

namespace fastcoll {

class PlannedCall : public QueuedCall {
 public:
  PlannedCall(ProcessGroup& group, double timeout_s) : group_(group), timeout_s_(timeout_s) {}

  Begun begin() noexcept final;
  void run() noexcept final;
  bool finish(Host& host) noexcept final;
  bool finish_if_ready() noexcept final;

  // "all_reduce(SUM, float32, numel=8)", and its number in its group; 0 before it begins.
  std::string described() const { return describe(first_.plan); }
  uint64_t number() const { return number_.load(std::memory_order_relaxed); }
  const std::optional<Failure>& failure() const { return failure_; }  // of one that is over

 protected:
  struct Step {
    Plan plan;
    Operands operands;  // their memory lives as long as this
  };
  // Around the call, when it is its turn; `after` only where it did not fail. Before may come
  // twice.
  virtual void before() noexcept {}
  virtual void after() noexcept {}
  Step first_;
  std::vector<Step> more_;         // after it, if it is a list of several dtypes; never in halves
  bool is_prepared_long_ = false;  // `before` takes long: never in halves
  ProcessGroup& group_;

 private:
  template <class Body>
  void keep_failure(Body body) noexcept;

  const double timeout_s_;  // below 0: the group's
  bool is_begun_ = false;
  std::atomic<uint64_t> number_{0};
  std::optional<Failure> failure_;
};

}  // namespace fastcoll
