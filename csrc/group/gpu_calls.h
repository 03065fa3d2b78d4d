// SPDX-License-Identifier: Apache-2.0
// The known calls of a group on its GPU: their plans, and what is asked before each of them.
// Decides which calls need no closer look. Python takes the others, and makes the same checks.
// Guarded by the GIL.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "device_side.h"
#include "group/gpu_journal.h"
#include "group/plan_table.h"
#include "layout.h"

namespace fastcoll {

class ProcessGroup;

// The stream in which asynchronous calls run, and the object that it belongs to.
struct SideStream {
  void* stream = nullptr;
  std::shared_ptr<void> object;
};

class GpuCalls {
 public:
  // limit_s: of the waits of calls that give none. `side` must live as long.
  GpuCalls(DeviceSide& side, int device, std::shared_ptr<GpuJournal> journal, double limit_s,
           SideStream beside, int num_channels)
      : side_(side),
        device_(device),
        journal_(std::move(journal)),
        limit_s_(limit_s),
        beside_(std::move(beside)),
        num_channels_(num_channels) {}
  ~GpuCalls();
  GpuCalls(const GpuCalls&) = delete;
  GpuCalls& operator=(const GpuCalls&) = delete;

  int device() const { return device_; }
  const SideStream& beside() const { return beside_; }
  int num_channels() const { return num_channels_; }
  // Thread blocks of one message; 0: there are too few.
  int pair_channels() const { return std::min(kPairChannels, num_channels_ / 2); }
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
  bool is_known_use(const void* ptr, void* stream) const;

  // Whether a call on these tensors may start in this stream without a closer look.
  bool may_start(const ProcessGroup& group, const void* input, const void* output, void* stream);
  // Write the call down. Then start it: without the GIL, as a full launch queue blocks.
  void note(const Plan& plan) { journal_->write(plan); }
  std::optional<Failure> start(const Plan& plan, const DeviceOperands& operands, void* stream,
                               double limit_s) noexcept {
    return side_.start(plan, operands, stream, limit_s);
  }
  // The same of messages that are one kernel.
  void note(std::span<const DeviceMessage> messages);
  std::optional<Failure> start(std::span<const DeviceMessage> messages, void* stream,
                               double limit_s) noexcept {
    return side_.start(messages, pair_channels(), stream, limit_s);
  }

  // Asynchronous calls: put the side's stream behind another one's work so far. Behind the call its
  // handle takes an event, and gives it back at its end.
  std::optional<Failure> follow(void* stream) noexcept;
  std::optional<Failure> take_event(void*& event) noexcept;
  void give_back(void* event) { events_.push_back(event); }
  std::optional<Failure> make_stream_wait(void* stream, void* event) noexcept {
    return side_.make_stream_wait(stream, event);
  }
  bool is_event_complete(void* event) noexcept { return side_.is_event_complete(event); }
  // Whether nothing needs a closer look: the group, its kernels, its ranks.
  bool is_healthy(const ProcessGroup& group);

 private:
  bool all_ranks_joined(const ProcessGroup& group);

  DeviceSide& side_;
  const int device_;
  const std::shared_ptr<GpuJournal> journal_;
  double limit_s_;
  const SideStream beside_;
  const int num_channels_;
  void* before_ = nullptr;     // the event that the side's stream waits for
  std::vector<void*> events_;  // that nobody has
  PlanTable plans_;
  bool is_paused_ = false;
  uintptr_t symmetric_begin_ = 0, symmetric_end_ = 0;
  std::set<std::pair<uintptr_t, uintptr_t>> uses_;  // addresses and streams
  int64_t next_look_ms_ = 0;
};

}  // namespace fastcoll
