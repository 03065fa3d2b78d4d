// SPDX-License-Identifier: Apache-2.0
// The handles of sends and receives that c10d_backend.cpp starts, and of batches of calls: part of
// that one source, compiled with it. Decides how long the memory of a transfer is kept: by its
// handle, and if that goes first, until the transfer is over.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include "c10d_threads.h"
#include "c10d_work.h"
#include "core_api.h"
#include "gil.h"

namespace {

// A call whose end is found by the thread that waits for it; for a future a thread waits.
class WaitedWork : public c10d::Work {
 public:
  using Work::Work;

  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return is_over(); }
  bool isSuccess() const override { return is_over() && !exception(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      auto future = future_of_tensors();
      run_in_thread([self = c10::intrusive_ptr<WaitedWork>::reclaim_copy(this), future] {
        complete(*future, [&] { return self->result(); });
      });
      future_ = std::move(future);
    }
    return future_;
  }

 protected:
  virtual bool is_over() const = 0;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Transfers that go on without a handle, and their memory. Guarded by the GIL: a forked child could
// inherit a mutex from a thread that it has not got.
class Dropped {
 public:
  static void keep(FastcollTransfer* transfer, Tensors tensors) {
    const fastcoll::GilHeld gil;
    all().push_back({transfer, std::move(tensors)});
    num_kept_ = all().size();
  }

  // Let Python's main thread do the next step; this one needs no GIL. Where Python has no room for
  // one more task of that thread, the next transfer does it.
  static void release_soon() {
    const auto task = [](void*) {
      release();
      return 0;
    };
    Py_AddPendingCall(task, nullptr);
  }

  // Release the tensors of transfers that are over.
  static void release() {
    if (num_kept_ == 0) return;
    const fastcoll::GilHeld gil;
    const auto over = std::partition(all().begin(), all().end(), [](const Kept& one) {
      return !core->transfer_is_over(one.transfer);
    });
    const std::vector<Kept> released(std::make_move_iterator(over),
                                     std::make_move_iterator(all().end()));
    all().erase(over, all().end());
    num_kept_ = all().size();
    for (const Kept& one : released) core->drop_transfer(one.transfer);
  }

 private:
  struct Kept {
    FastcollTransfer* transfer;
    Tensors tensors;
  };
  static std::vector<Kept>& all() {
    static auto* const kept = new std::vector<Kept>;  // never destroyed, as that may need the GIL
    return *kept;
  }
  static inline std::atomic<size_t> num_kept_{0};
};

// A send or a receive.
class TransferWork final : public WaitedWork {
 public:
  // Takes over the handle. `owner` keeps the group.
  TransferWork(c10::intrusive_ptr<c10d::Backend> owner, FastcollGroup* group,
               FastcollTransfer* transfer, c10d::OpType type, const char* title, Tensors tensors)
      : WaitedWork(owner->getRank(), type, title, tensors),
        owner_(std::move(owner)),
        group_(group),
        transfer_(transfer),
        tensors_(std::move(tensors)) {}

  ~TransferWork() override {
    finish();
    if (core->transfer_is_over(transfer_)) core->drop_transfer(transfer_);
    else if (Py_IsInitialized()) Dropped::keep(transfer_, std::move(tensors_));
    else new Tensors(std::move(tensors_));  // for ever
  }

  bool wait(Milliseconds timeout) override {
    const WithoutGil without_gil;
    FastcollFailure failure;
    const auto outcome = core->wait_for_transfer(group_, transfer_, seconds(timeout), &failure);
    if (outcome == kFastcollPending) raise_late("transfer", timeout);
    if (outcome != kFastcollInterrupted) finish();  // the profiler's event ends
    raise_unless_done(outcome, failure);
    return true;
  }

  std::exception_ptr exception() const override {
    FastcollFailure failure;
    if (!is_over() || core->wait_for_transfer(group_, transfer_, 0, &failure) != kFastcollFailed)
      return nullptr;
    const fastcoll::GilHeld gil;
    core->set_python_error(&failure);
    return std::make_exception_ptr(py::error_already_set());
  }

  int sourceRank() const override { return core->peer_of_transfer(transfer_); }

  Tensors result() override {
    wait(kNoTimeout);
    return tensors_;
  }

 protected:
  bool is_over() const override {
    const WithoutGil without_gil;
    return core->look_at_transfer(group_, transfer_);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> owner_;
  FastcollGroup* const group_;
  FastcollTransfer* const transfer_;
  Tensors tensors_;
};

// All that was started in a batch.
class BatchWork final : public WaitedWork {
 public:
  BatchWork(int rank, c10d::OpType type, const char* title, std::vector<WorkPtr> works)
      : WaitedWork(rank, type, title, Tensors()), works_(std::move(works)) {}
  ~BatchWork() override { finish(); }

  bool wait(Milliseconds timeout) override {
    for (const WorkPtr& work : works_) work->wait(timeout);
    finish();
    return true;
  }

  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_)
      if (std::exception_ptr error = work->exception()) return error;
    return nullptr;
  }

  int sourceRank() const override {
    return works_.size() == 1 ? works_[0]->sourceRank() : Work::sourceRank();
  }

  Tensors result() override {
    Tensors outputs;
    for (const WorkPtr& work : works_)
      for (at::Tensor& output : work->result()) outputs.push_back(std::move(output));
    return outputs;
  }

 protected:
  bool is_over() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const WorkPtr& work) { return work->isCompleted(); });
  }

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace
