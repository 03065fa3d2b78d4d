// SPDX-License-Identifier: Apache-2.0
// The operations of a group while it lives. Its beginning and end are in lifetime.cpp.
#include "group/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

#include "cpu/halves.h"
#include "cpu/p2p.h"
#include "group/peer_process.h"
#include "group/threads.h"
#include "memory/memfd.h"

namespace fastcoll {

ProcessGroup::Turn::Turn(ProcessGroup& group, Host& host, bool finishes) : group_(group) {
  // A forked child may have inherited the lock, held by a thread that the child does not have.
  group.refuse_child();
  guard_ = std::unique_lock(group.mutex_, std::try_to_lock);
  if (!guard_.owns_lock()) [[unlikely]] {
    group.refuse_handler();
    host.blocking();  // the holder may need the GIL to progress
    guard_.lock();
  }
  while (group.is_half_done_ && !finishes) [[unlikely]] {
    guard_.unlock();
    host.blocking();
    group.await_queued(host);
    guard_.lock();
  }
  group.in_turn_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

void ProcessGroup::refuse_handler() const {
  if (in_turn_.load(std::memory_order_relaxed) == std::this_thread::get_id())
    throw Failure(ErrorKind::usage,
                  "group \"" + name_ +
                      "\" is in a call of this thread, which a signal handler has interrupted: the "
                      "handler can't use the group; it may call abort(), or set a flag for the "
                      "program to look at");
}

void ProcessGroup::refuse_child() const {
  if (forked_.load(std::memory_order_relaxed)) [[unlikely]]
    throw Failure(ErrorKind::usage,
                  "group \"" + name_ +
                      "\" belongs to the process from which this one was forked, and this one "
                      "is no rank of it. Call fastcoll in the parent, or make a group of this "
                      "process's own: fastcoll.destroy(), then fastcoll.init(store=..., rank=..., "
                      "world_size=...)");
}

void ProcessGroup::require_usable() const {
  refuse_child();
  if (closed_.load(std::memory_order_relaxed)) [[unlikely]]
    throw Failure(ErrorKind::usage, "group \"" + name_ + "\" was destroyed");
}

namespace {

// Behind a call: the steps on the rows of its result.
void run_rows(const RowCall& rows, const void* plain) {
  RowCall call = rows;
  call.plain = plain;
  row_fn(call.dtype)(call);
}

}  // namespace

// Memory for a result of which only codes are wanted; kept, as large as the largest one.
std::byte* ProcessGroup::room_for_plain(const Plan& plan) {
  const size_t num_bytes = plan.numel * dtype_size(plan.dtype);
  if (num_bytes > plain_room_bytes_) {
    plain_room_.reset(new (std::nothrow) std::byte[num_bytes]);
    plain_room_bytes_ = plain_room_ ? num_bytes : 0;
    if (!plain_room_)  // the others may wait in this call already
      group_->fail(ErrorKind::driver,
                   "rank " + std::to_string(rank_) + " has no memory for the " +
                       std::to_string(num_bytes) + " bytes of a result before it is quantised",
                   uint64_t{1} << rank_);
  }
  return plain_room_.get();
}

Call<StdAtomics> ProcessGroup::call_of(const Plan& plan, const Operands& operands) {
  auto* output = static_cast<std::byte*>(operands.output);
  if (operands.rows && !output) [[unlikely]]
    output = room_for_plain(plan);
  return {*group_,
          plan,
          static_cast<const std::byte*>(operands.input),
          output,
          operands.parts,
          operands.list,
          operands.strided,
          program_of(plan)};
}

void ProcessGroup::run(const Plan& plan, const Operands& operands, Host& host, double timeout_s) {
  const Turn turn(*this, host);
  require_usable();
  Call<StdAtomics> call = call_of(plan, operands);
  fastcoll::run(call, host, timeout_s);
  if (operands.rows) [[unlikely]]
    run_rows(*operands.rows, call.output);
}

void ProcessGroup::run(const Plan& plan, const Operands& operands, Host& host, double timeout_s,
                       std::atomic<uint64_t>& number) {
  const Turn turn(*this, host);
  require_usable();
  Call<StdAtomics> call = call_of(plan, operands);
  number = group_->call() + 1;
  fastcoll::run(call, host, timeout_s);
  if (operands.rows) run_rows(*operands.rows, call.output);
}

QueuedCall::Begun ProcessGroup::begin_half(const Plan& plan, const Operands& operands,
                                           double timeout_s, std::atomic<uint64_t>& number) {
  const std::unique_lock guard(mutex_, std::try_to_lock);
  if (!guard.owns_lock() || is_half_done_) return QueuedCall::Begun::no;
  require_usable();
  Call<StdAtomics> call = call_of(plan, operands);
  Host host;
  if (!fastcoll::begin_half(call, host, timeout_s)) return QueuedCall::Begun::no;
  number = group_->call();
  is_half_done_ = true;
  if (!may_finish(call)) return QueuedCall::Begun::half;
  finish(call, operands.rows, host);
  return QueuedCall::Begun::all;
}

void ProcessGroup::finish(const Plan& plan, const Operands& operands, Host& host) {
  const Turn turn(*this, host, true);
  Call<StdAtomics> call = call_of(plan, operands);
  finish(call, operands.rows, host);
}

bool ProcessGroup::finish_if_ready(const Plan& plan, const Operands& operands) {
  const std::unique_lock guard(mutex_, std::try_to_lock);
  if (!guard.owns_lock() || closed_.load(std::memory_order_relaxed)) return false;
  Call<StdAtomics> call = call_of(plan, operands);
  if (!may_finish(call)) return false;
  Host host;
  finish(call, operands.rows, host);
  return true;
}

// Under the group's lock.
void ProcessGroup::finish(Call<StdAtomics>& call, const RowCall* rows, Host& host) {
  try {
    require_usable();
    fastcoll::finish(call, host);
    is_half_done_ = false;
    if (rows) run_rows(*rows, call.output);
  } catch (const SteppedOut&) {
    throw;
  } catch (...) {
    is_half_done_ = false;
    throw;
  }
}

// Not under the group's lock: a transfer must make progress while a call waits, and the other way
// round.
void ProcessGroup::post(const std::shared_ptr<Transfer>& transfer, Host& host) {
  require_usable();
  limit(*transfer);
  p2p_->post(transfer, host);
}

bool ProcessGroup::start(std::span<const std::shared_ptr<Transfer>> transfers, Host& host) {
  require_usable();
  for (const auto& transfer : transfers) limit(*transfer);
  return p2p_->start(transfers, host);
}

// A forked child has the handles of its parent's transfers, but not the memory of the channels.
bool ProcessGroup::look(const Transfer& transfer) {
  return forked_.load(std::memory_order_relaxed) ? transfer.done.load() : p2p_->look(transfer);
}

bool ProcessGroup::wait(Transfer& transfer, Host& host, double limit_s) {
  if (!forked_.load(std::memory_order_relaxed)) [[likely]]
    return p2p_->wait(transfer, host, limit_s);
  if (!transfer.done) refuse_child();
  if (transfer.error) std::rethrow_exception(transfer.error);
  return true;
}

bool ProcessGroup::withdraw(Transfer& transfer) {
  return !forked_.load(std::memory_order_relaxed) && p2p_->withdraw(transfer);
}

void ProcessGroup::linger(const QueuedCall* call) {
  if (!forked_.load(std::memory_order_relaxed)) queue_->linger(call, group_->company());
}

void ProcessGroup::end_unmet_transfers() {
  if (!forked_.load(std::memory_order_relaxed)) p2p_->end_unmet();
}

void ProcessGroup::drive_transfers(void (*end)()) {
  if (!p2p_->claim_drive()) return;
  try {
    run_in_thread(
        [group = group_, p2p = p2p_, end] {
          Host host;
          p2p->drive(host);
          if (end) end();
        },
        Draining::ignores);
  } catch (const std::system_error&) {  // there is no thread
    p2p_->give_up_drive();
  }
}

bool ProcessGroup::has_open_sends() {
  return !forked_.load(std::memory_order_relaxed) && p2p_->has_open_sends();
}

void ProcessGroup::set_limit(double limit_s) {
  require_usable();
  group_->set_limit(limit_s);
  if (gpu_calls_) gpu_calls_->set_limit(limit_s);
}

void ProcessGroup::limit(Transfer& transfer) const {
  if (transfer.timeout_s < 0) transfer.timeout_s = group_->limit_s();
}

void ProcessGroup::add_program(uint64_t hash, const ProgramBlocks& blocks,
                               const std::vector<uint32_t>& words) {
  Program program(world_size_, rank_, blocks, words);
  Host host;
  const Turn turn(*this, host);
  programs_.try_emplace(hash, std::move(program));
}

const Program* ProcessGroup::program_of(const Plan& plan) const {
  if (plan.algorithm != Algorithm::schedule) return nullptr;
  const auto found = programs_.find(plan.splits);
  return found == programs_.end() ? nullptr : &found->second;
}

std::vector<int> ProcessGroup::try_single_copy(bool is_wanted, bool always, Host& host) {
  const Turn turn(*this, host);
  require_usable();
  const auto errors = group_->try_single_copy(is_wanted, host);
  const auto end = errors.begin() + world_size_;
  if (std::all_of(errors.begin(), end, [](int error) { return error == 0; })) {
    p2p_->allow_single_copy(always);
    keep_memories();
  }
  return {errors.begin(), end};
}

// A rank that loses the permission to read the others can then still finish its calls.
void ProcessGroup::keep_memories() {
  for (int peer = 0; peer < world_size_; ++peer) {
    const int pid = group_->options().links[size_t(peer)].pid;
    if (pid == group_->options().links[size_t(rank_)].pid) continue;  // ranks that are threads
    group_->keep_memory(peer, peers_[size_t(peer)]->open_memory());
  }
}

std::vector<int> ProcessGroup::pidfds() const {
  std::vector<int> found;
  for (const auto& peer : peers_) found.push_back(peer->pidfd());
  return found;
}

bool ProcessGroup::shorten_openmp_waits() {
  return openmp_waits_.hold_if_crowded(world_size_, group_->options().num_cpus);
}

int ProcessGroup::add_arena(const std::vector<int>& fds, size_t num_bytes) {
  Host host;
  const Turn turn(*this, host);
  Arena arena;
  arena.num_bytes = num_bytes;
  try {
    require_usable();
    if (fds.size() != size_t(world_size_))
      throw Failure(ErrorKind::usage, "an arena needs a descriptor of every rank");
    for (size_t peer = 0; peer < fds.size(); ++peer)
      arena.bases[peer] = memfd_open(fds[peer], num_bytes);
  } catch (...) {
    for (std::byte* base : arena.bases) memfd_close(base, num_bytes);
    for (int fd : fds) ::close(fd);
    throw;
  }
  for (size_t peer = 0; peer < fds.size(); ++peer)
    if (peer != size_t(rank_)) ::close(fds[peer]);
  arena.fd = fds[size_t(rank_)];
  group_->arenas().push_back(arena);
  return int(group_->arenas().size()) - 1;
}

std::byte* ProcessGroup::arena_ptr(int arena_idx) {
  if (arena_idx < 0 || size_t(arena_idx) >= group_->arenas().size())
    throw Failure(ErrorKind::usage, "no arena " + std::to_string(arena_idx));
  return group_->arenas()[size_t(arena_idx)].bases[rank_];
}

void ProcessGroup::await_queued(Host& host) {
  constexpr std::chrono::milliseconds kLook(50);  // for Ctrl-C
  // A forked child lacks the thread that finishes them.
  while (!forked_.load(std::memory_order_relaxed) && !queue_->await(kLook))
    if (host.interrupted()) throw Interrupted{};
}

void ProcessGroup::check() {
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  group_->check();
}

bool ProcessGroup::is_usable() const noexcept {
  const std::lock_guard pads(pads_mutex_);
  return !forked_.load(std::memory_order_relaxed) && !closed_.load(std::memory_order_relaxed) &&
         !group_->is_broken();
}

void ProcessGroup::poison(const std::string& message) {
  Host host;
  const Turn turn(*this, host);
  require_usable();
  try {
    group_->fail(ErrorKind::peer_lost, group_->call_name() + ": " + message, uint64_t{1} << rank_);
  } catch (const Failure&) {  // the verdict is for the calls to come
  }
}

void ProcessGroup::fail(ErrorKind kind, const std::string& text, uint64_t ranks) {
  refuse_child();
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  group_->fail(kind, text, ranks);
}

bool ProcessGroup::peer_is_gone(int peer) const {
  require_usable();
  if (peer < 0 || peer >= world_size_)
    throw Failure(ErrorKind::usage, std::to_string(peer) + " is no rank of this group");
  return fastcoll::peer_is_gone(group_->options().links[size_t(peer)]);
}

// Relaxed: such a word publishes no other memory.
void ProcessGroup::hold_parts(uint64_t ranks) {
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  StdAtomics::store_relaxed(group_->pad(rank_).parts_held.value, ranks);
}

std::vector<VerbCount> ProcessGroup::counts() {
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  return read_counts<StdAtomics>(group_->pad(rank_));
}

std::vector<uint64_t> ProcessGroup::parts_held() {
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  std::vector<uint64_t> held;
  for (int peer = 0; peer < world_size_; ++peer)
    held.push_back(StdAtomics::load_relaxed(group_->pad(peer).parts_held.value));
  return held;
}

uint64_t ProcessGroup::decide_survivors(uint64_t ranks) {
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  return StdAtomics::set_once(group_->pad(0).survivors.value, ranks);
}

void ProcessGroup::abort(const std::string& reason) {
  refuse_child();
  const std::lock_guard pads(pads_mutex_);
  require_usable();
  group_->decide_verdict(ErrorKind::aborted,
                         "group \"" + name_ + "\" was aborted by rank " + std::to_string(rank_) +
                             " of " + std::to_string(world_size_) + ": " + reason,
                         uint64_t{1} << rank_);
}

}  // namespace fastcoll
