// SPDX-License-Identifier: Apache-2.0
// A group as a process holds it: the protocol's Group, with its mappings, descriptors and plans.
// One lock orders the calls of several threads. No Python here.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cpu/operands.h"
#include "cpu/program.h"
#include "cpu/rows.h"
#include "cpu/transfer.h"
#include "group/call_queue.h"
#include "group/gpu_calls.h"
#include "group/openmp.h"
#include "group/plan_table.h"

namespace fastcoll {

class PeerProcess;

// The protocol takes seconds to compile, and the users of a group need not see it.
struct StdAtomics;
template <class P>
class Group;
template <class P>
class PointToPoint;
template <class P>
struct Call;

// Descriptors of every rank, by rank; ownership passes to the group. -1: not there.
struct GroupFds {
  std::vector<int> regions;
  std::vector<int> sockets;
  std::vector<int> pidfds;
  std::vector<int> pids;
};

// The memory that a call reads and writes: one message, or the fields of Call in its place.
struct Operands {
  const void* input = nullptr;
  void* output = nullptr;
  const Parts* parts = nullptr;
  const List* list = nullptr;
  const StridedPair* strided = nullptr;
  const RowCall* rows = nullptr;  // behind the call; its `plain` is not read
};

// Before each timed call a program would write what it sends. So the loop writes these bytes anew,
// as they are; then all ranks meet in a barrier, by this plan. Without a plan calls are back to
// back, and their time is that of all of them.
struct Rewriting {
  const Plan* meeting = nullptr;
  void* bytes = nullptr;
  size_t num_bytes = 0;
};

class ProcessGroup {
 public:
  ProcessGroup(int rank, int world_size, const std::string& name, const GroupFds& fds,
               double timeout_s, int num_cpus, bool traces = false);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& name() const { return name_; }
  bool traces() const { return traces_; }  // notes the sites of calls

  // Carry out a plan. Calls of several threads run one after another.
  void run(const Plan& plan, const Operands& operands, Host& host, double timeout_s);
  // The same; `number` becomes the call's, once it begins.
  void run(const Plan& plan, const Operands& operands, Host& host, double timeout_s,
           std::atomic<uint64_t>& number);
  // A call in two halves, without a wait in the first; all of it must live until it is over.
  QueuedCall::Begun begin_half(const Plan& plan, const Operands& operands, double timeout_s,
                               std::atomic<uint64_t>& number);
  // May throw SteppedOut: then call it again.
  void finish(const Plan& plan, const Operands& operands, Host& host);
  // The same if that takes no wait: whether it was done.
  bool finish_if_ready(const Plan& plan, const Operands& operands);
  // For benchmarks (timing.cpp): the seconds of `iterations` such calls in one compiled loop. In an
  // exchange this rank sends to one peer and receives from another.
  double time_calls(const Plan& plan, const Operands& operands, int iterations,
                    const Rewriting& rewriting, Host& host);
  double time_exchanges(const Transfer& sent, const Transfer& received, int iterations,
                        const Rewriting& rewriting, Host& host);
  double time_one_way_flag(int iterations, Host& host);
  // The descriptor of each rank's process, by rank: the group's, which shares it with others. -1:
  // there is none.
  std::vector<int> pidfds() const;
  // See Group: by rank, the errno with which it can't read all memories. Collective, before the
  // first call.
  std::vector<int> try_single_copy(bool is_wanted, bool always, Host& host);

  // This rank's program of a schedule, for plans whose `splits` is `hash`.
  void add_program(uint64_t hash, const ProgramBlocks& blocks, const std::vector<uint32_t>& words);

  // Sends and receives: see PointToPoint. A timeout_s below 0 is the group's.
  void post(const std::shared_ptr<Transfer>& transfer, Host& host);
  bool start(std::span<const std::shared_ptr<Transfer>> transfers, Host& host);
  bool look(const Transfer& transfer);
  bool wait(Transfer& transfer, Host& host, double limit_s);
  bool withdraw(Transfer& transfer);
  void end_unmet_transfers();
  // Let a thread move the open transfers while the program waits for none of them. No process waits
  // for that thread when it ends. It calls `end` once it has nothing to move. Where no thread
  // can be started, the waits for transfers move them: their peers may have seen them already.
  void drive_transfers(void (*end)() = nullptr);
  bool has_open_sends();
  // The limit of calls and transfers that give none, from the next one on.
  void set_limit(double limit_s);

  // The plans of the fast path.
  const Plan* cached_plan(Verb verb, DType dtype, Op op, uint64_t numel, int root,
                          uint64_t splits = 0, CallOptions options = {}) const {
    return cached_plan({verb, dtype, op, root, options, splits, numel});
  }
  const Plan* cached_plan(const PlanTable::Key& key) const { return plans_.find(key); }
  void cache_plan(const Plan& plan, CallOptions options, uint64_t least, uint64_t most) {
    plans_.add(plan, options, least, most);
  }

  // Known calls on the group's GPU; null while there are none.
  GpuCalls* gpu_calls() const { return gpu_calls_.get(); }
  std::shared_ptr<GpuCalls> shared_gpu_calls() const { return gpu_calls_; }
  void use_gpu(std::shared_ptr<GpuCalls> calls) { gpu_calls_ = std::move(calls); }

  // Where the ranks compute with more threads than CPUs (openmp.h). True: this call did it.
  bool shorten_openmp_waits();

  int add_arena(const std::vector<int>& fds, size_t num_bytes);
  std::byte* arena_ptr(int arena_idx);

  CallQueue& queue() { return *queue_; }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  bool idle() const { return queue_->idle(); }  // a call may run at once, ahead of nothing
  // Let a thread go on with a call of which one half is done; not in a forked child.
  void resume_queue() {
    if (!forked_.load(std::memory_order_relaxed)) queue_->go_on();
  }
  // See CallQueue::linger; not in a forked child either.
  void linger(const QueuedCall* call);
  // Wait until nothing is queued outside of Python. Throws Interrupted.
  void await_queued(Host& host);

  void check();                             // throws the verdict of a broken or closed group
  bool is_usable() const noexcept;          // whether `check` would throw nothing
  void poison(const std::string& message);  // gives up: every rank's next call or wait raises this
  // The same from any thread, at once: a call that waits in another thread raises it, too.
  void abort(const std::string& reason);
  // Make this the group's verdict, unless it has one, and throw the one that holds. From any
  // thread.
  [[noreturn]] void fail(ErrorKind kind, const std::string& text, uint64_t ranks);
  // The ranks that go on after the group has broken, as bits (bootstrap/agreement.py).
  void hold_parts(uint64_t ranks);  // publishes the ranks whose parts of the next group it has
  std::vector<uint64_t> parts_held();
  std::vector<VerbCount> counts();            // of this rank, by verb
  uint64_t decide_survivors(uint64_t ranks);  // unless decided; returns the decision

  // Throws UsageError in a handler of a signal that interrupted a call of this group.
  void refuse_handler() const;
  void refuse_child() const;          // throws UsageError in a forked child
  bool peer_is_gone(int peer) const;  // its process ended, or left the group
  void close();                       // idempotent; own arenas live on until destruction

 private:
  // Holds the group's lock and notes the thread that holds it. A signal handler runs in the thread
  // of the call that it interrupts, so it can find the lock held.
  class Turn {
   public:
    // Waits for the other half of a call, too, unless it is to do that.
    Turn(ProcessGroup& group, Host& host, bool finishes = false);
    ~Turn() { group_.in_turn_.store(std::thread::id{}, std::memory_order_relaxed); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    ProcessGroup& group_;
    std::unique_lock<std::mutex> guard_;
  };
  static void forget_in_child();
  Call<StdAtomics> call_of(const Plan& plan, const Operands& operands);
  void finish(Call<StdAtomics>& call, const RowCall* rows, Host& host);
  std::byte* room_for_plain(const Plan& plan);
  const Program* program_of(const Plan& plan) const;
  void require_usable() const;
  void limit(Transfer& transfer) const;
  void close_fds();
  void keep_memories();

  const int rank_, world_size_;
  const std::string name_;
  const bool traces_;
  std::array<std::byte*, kMaxWorld> regions_{};
  std::vector<int> fds_;                             // kept open for the life of the group
  std::vector<std::shared_ptr<PeerProcess>> peers_;  // by rank
  // Shared with the thread that drives transfers.
  std::shared_ptr<Group<StdAtomics>> group_;
  std::shared_ptr<PointToPoint<StdAtomics>> p2p_;
  std::map<uint64_t, Program> programs_;
  std::mutex mutex_;           // held during a call, by a Turn
  bool is_half_done_ = false;  // of a call
  std::unique_ptr<std::byte[]> plain_room_;
  size_t plain_room_bytes_ = 0;
  std::atomic<std::thread::id> in_turn_{};
  mutable std::mutex pads_mutex_;  // held while the pads may not go away, never during a wait
  const std::shared_ptr<CallQueue> queue_ = std::make_shared<CallQueue>();
  std::atomic<bool> closed_{false};
  std::atomic<bool> forked_{false};
  mutable PlanTable plans_;
  std::shared_ptr<GpuCalls> gpu_calls_;
  ShortOpenMpWaits openmp_waits_;
};

}  // namespace fastcoll
