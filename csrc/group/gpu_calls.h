// SPDX-License-Identifier: Apache-2.0
// The known calls of a group on its GPU: their plans, and what is asked before each of them.
// Decides which calls need no closer look. Python takes the others, and makes the same checks.
// Guarded by the GIL.
#pragma once

#include <memory>
#include <set>
#include <utility>

#include "device_side.h"
#include "group/gpu_journal.h"
#include "group/plan_table.h"

namespace fastcoll {

class ProcessGroup;

class GpuCalls {
 public:
  // limit_s: of the waits of calls that give none. `side` must live as long.
  GpuCalls(DeviceSide& side, int device, std::shared_ptr<GpuJournal> journal, double limit_s)
      : side_(side), device_(device), journal_(std::move(journal)), limit_s_(limit_s) {}

  int device() const { return device_; }
  void set_limit(double limit_s) { limit_s_ = limit_s; }
  double limit_s() const { return limit_s_; }

  // A plan that a kernel carries out by itself; others are not kept.
  void add_plan(const Plan& plan, CallOptions options);
  const Plan* find(const PlanTable::Key& key) { return plans_.find(key); }

  // Python takes all calls, as long as NCCL carries one whose lateness only Python sees.
  void pause(bool pauses) { is_paused_ = pauses; }
  bool is_paused() const { return is_paused_; }

  // The memory of symmetric tensors, which has a new one: nobody's use of it is known (streams.py).
  void use_symmetric(uintptr_t begin, uintptr_t end);
  void note_use(uintptr_t ptr, uintptr_t stream);

  // Whether a call on these tensors may start in this stream without a closer look.
  bool may_start(const ProcessGroup& group, const void* input, const void* output, void* stream);
  // Write the call down. Then start it: without the GIL, as a full launch queue blocks.
  void note(const Plan& plan) { journal_->write(plan); }
  std::optional<Failure> start(const Plan& plan, const void* input, void* output, void* stream,
                               double limit_s) noexcept {
    return side_.start(plan, static_cast<const std::byte*>(input), static_cast<std::byte*>(output),
                       stream, limit_s);
  }

 private:
  bool is_known_use(const void* ptr, void* stream) const;
  bool all_are_there(const ProcessGroup& group);

  DeviceSide& side_;
  const int device_;
  const std::shared_ptr<GpuJournal> journal_;
  double limit_s_;
  PlanTable plans_;
  bool is_paused_ = false;
  uintptr_t symmetric_begin_ = 0, symmetric_end_ = 0;
  std::set<std::pair<uintptr_t, uintptr_t>> uses_;  // addresses and streams
  int64_t next_look_ms_ = 0;
};

}  // namespace fastcoll
