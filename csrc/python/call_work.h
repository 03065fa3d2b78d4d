// SPDX-License-Identifier: Apache-2.0
// fastcoll._C.CallWork: the quick part of the handle of an asynchronous call that C++ carries out.
// Programs get its subclass, a class in work.py. Decides how long the memory of such a call
// is kept: by its handle, and if that goes first, until the call is over.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <vector>

#include "group/planned_call.h"
#include "python/dense_copies.h"
#include "python/prepare.h"
#include "python/work_type.h"

namespace fastcoll {

// A fast call for a group's queue.
class AsyncCall final : public PlannedCall {
 public:
  using PlannedCall::PlannedCall;

  Places places;       // of its arguments
  DenseCopies copies;  // of those that are not contiguous
  void set_steps(const Prepared& one);
  void set_steps(std::vector<PreparedList> lists);  // one at least
  void over() noexcept override;
  void before() noexcept override { copies.read(); }
  void after() noexcept override { copies.write(); }

  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  // False if it is not over after that many seconds; 0: without a limit. Throws Interrupted.
  bool wait(double limit_s);

  // Its handle is gone, and `kept` is its memory.
  static void abandon(const std::shared_ptr<AsyncCall>& call, PyObject* kept);

 private:
  std::vector<PreparedList> lists_;
  // Each side writes its own flag and then reads the other's, so these are sequentially consistent.
  std::atomic<bool> is_over_{false}, is_abandoned_{false};
  std::atomic<uint32_t> has_waiter_{0};
};

// Queue a call whose memory belongs to `kept` and whose results are in the list `outputs`; return
// its handle. Null where it has to go behind calls that are queued in Python. Throws Interrupted
// where a Python error is set.
PyObject* queue_call(const Caller& caller, const std::shared_ptr<AsyncCall>& call, PyObject* kept,
                     PyObject* outputs);

// Go on in this thread with the call that rests in a queue: with `call`, or any if that is null.
// False if it does not rest, or is not over after that many seconds; 0: without a limit. Throws
// Interrupted; a thread goes on with it then.
bool finish_here(CallQueue& queue, const QueuedCall* call, WaitedTime& waited);

// Add the type to the module. False with a Python error set.
bool add_call_work(PyObject* module);

// The class of the handles: fastcoll.calls.work.CallWork.
PyObject* set_call_work(PyObject*, PyObject* object);

}  // namespace fastcoll
