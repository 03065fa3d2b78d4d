// SPDX-License-Identifier: Apache-2.0
// Runs or starts a call whose arguments are sorted, if its plan is known. Part of fast_calls.cpp.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "group/process_group.h"
#include "python/arguments.h"
#include "python/call_work.h"
#include "python/dense_copies.h"
#include "python/errors.h"
#include "python/fast_calls.h"
#include "python/gpu_calls.h"
#include "python/gpu_transfers.h"
#include "python/host.h"
#include "python/outputs.h"
#include "python/prepare.h"
#include "python/row_norm.h"
#include "python/transfers.h"

namespace fastcoll {

// Keeps the tensors of a list alive while the GIL is away.
class ListSnapshot {
 public:
  explicit ListSnapshot(PyObject* object)
      : object_(object && (PyList_CheckExact(object) || PyTuple_CheckExact(object))
                    ? PySequence_Tuple(object)
                    : nullptr) {
    PyErr_Clear();
  }
  ListSnapshot(const ListSnapshot&) = delete;
  ListSnapshot& operator=(const ListSnapshot&) = delete;
  ~ListSnapshot() { Py_XDECREF(object_); }
  // The list's copy; the given object, if it is no list.
  PyObject* or_given(PyObject* object) const { return object_ ? object_ : object; }

 private:
  PyObject* object_;
};

// A call that is none of contiguous tensors alone. Apart, so that those keep their code.
template <FastVerb kVerb>
[[gnu::noinline]] Prepared prepare_other(const ProcessGroup& group, const Args& args, Op op,
                                         Places& places) {
  if constexpr (takes_rows(kVerb)) {
    if (given(args[kThen])) return prepare_rows(kVerb, group, args, op, places.rows);
  }
  return prepare_strided(kVerb, group, args, op, places.strided);
}

constexpr bool is_known_on_gpu(FastVerb verb) {
  const Signature& signature = signature_of(verb);
  return (signature.kind == VerbKind::tensors || signature.kind == VerbKind::parts) &&
         signature.core != Verb::barrier;
}

// Whether it was a fast call on a GPU, which then has started.
template <FastVerb kVerb>
[[gnu::noinline]] bool start_there(ProcessGroup& group, const Args& args, Op op) {
  if constexpr (is_known_on_gpu(kVerb)) {
    const PreparedOnGpu prepared = prepare_on_gpu(kVerb, group, args, op);
    if (!prepared.call.is_fast()) return false;
    count_writes(written_by<kVerb>(group, args));
    start_on_gpu(group, prepared, args.timeout_s);
    return true;
  } else if constexpr (takes_lists(kVerb)) {
    const std::vector<PreparedOnGpu> calls = prepare_list_on_gpu(kVerb, group, args, op);
    if (calls.empty()) return false;
    count_writes(written_by<kVerb>(group, args));
    for (const PreparedOnGpu& call : calls) start_on_gpu(group, call, args.timeout_s);
    return true;
  }
  return false;
}

template <FastVerb kVerb>
PyObject* start_all_beside(const Caller& caller, std::span<const PreparedOnGpu> calls,
                           const Args& args) {
  const Owned outputs(outputs_of<kVerb>(caller.group, args));
  if (!outputs.get()) throw Interrupted{};
  count_writes(written_by<kVerb>(caller.group, args));
  return start_beside(caller, calls, args, outputs.get());
}

// As start_collective, of a call on a GPU.
template <FastVerb kVerb>
[[gnu::noinline]] PyObject* start_beside_there(const Caller& caller, const Args& args, Op op) {
  if constexpr (is_known_on_gpu(kVerb)) {
    const PreparedOnGpu prepared = prepare_on_gpu(kVerb, caller.group, args, op, true);
    return prepared.call.is_fast() ? start_all_beside<kVerb>(caller, {&prepared, 1}, args)
                                   : nullptr;
  } else if constexpr (takes_lists(kVerb)) {
    const auto calls = prepare_list_on_gpu(kVerb, caller.group, args, op, true);
    return calls.empty() ? nullptr : start_all_beside<kVerb>(caller, calls, args);
  }
  return nullptr;
}

// As run_one, of parts that are not all contiguous.
template <FastVerb kVerb>
[[gnu::noinline]] bool run_copied(ProcessGroup& group, const Args& args, Op op, Places& places) {
  DenseCopies copies;
  const Prepared call = prepare_copied_parts(kVerb, group, args, op, places.parts, copies);
  if (!call.is_fast()) return false;
  count_writes(written_by<kVerb>(group, args));
  PythonHost host;
  if (call.num_bytes >= kGilFreeBytes) host.blocking();
  copies.read();
  group.run(call.plan, call.operands(places), host, args.timeout_s);
  copies.write();
  return true;
}

// The same of lists.
template <FastVerb kVerb>
[[gnu::noinline]] bool run_copied_lists(ProcessGroup& group, const Args& args, Op op) {
  DenseCopies copies;
  const auto lists = prepare_lists(signature_of(kVerb).core, group, args[kTensor], args[kSecond],
                                   op, args.options, &copies);
  if (lists.empty()) return false;
  count_writes(written_by<kVerb>(group, args));
  PythonHost host;
  if (copies.num_bytes() >= kGilFreeBytes) host.blocking();
  copies.read();
  run_lists(group, lists, host, args.timeout_s);
  copies.write();
  return true;
}

// Whether it was a fast call, which then has run.
template <FastVerb kVerb>
bool run_one(ProcessGroup& group, const Args& args, Op op) {
  Places places;
  Prepared call = prepare(kVerb, group, args, op, places.parts);
  if (!call.is_fast()) [[unlikely]] {
    if (group.gpu_calls() && start_there<kVerb>(group, args, op)) return true;
    if constexpr (signature_of(kVerb).kind == VerbKind::parts)
      return run_copied<kVerb>(group, args, op, places);
    call = prepare_other<kVerb>(group, args, op, places);
  }
  if (!call.is_fast()) [[unlikely]]
    return false;
  count_writes(written_by<kVerb>(group, args));
  if (call.has_rows) [[unlikely]]
    count_row_writes(args[kThen]);
  PythonHost host;
  if (call.num_bytes >= kGilFreeBytes) host.blocking();
  group.run(call.plan, call.operands(places), host, args.timeout_s);
  return true;
}

// Null if it is no fast call; then nothing has happened.
template <FastVerb kVerb>
PyObject* start_collective(const Caller& caller, const Args& args, Op op) {
  ProcessGroup& group = caller.group;
  group.refuse_handler();  // a handler would wait for itself
  group.refuse_child();
  if (group.traces()) return nullptr;  // its site is known in this thread only
  const auto call = std::make_shared<AsyncCall>(group, args.timeout_s);
  if constexpr (!takes_lists(kVerb)) {
    Prepared one = prepare(kVerb, group, args, op, call->places.parts);
    if constexpr (signature_of(kVerb).kind == VerbKind::parts) {
      if (!one.is_fast())
        one = prepare_copied_parts(kVerb, group, args, op, call->places.parts, call->copies);
    } else if (!one.is_fast()) {
      one = prepare_other<kVerb>(group, args, op, call->places);
    }
    if (!one.is_fast()) return nullptr;
    call->set_steps(one);
  } else {
    auto lists = prepare_lists(signature_of(kVerb).core, group, args[kTensor], args[kSecond], op,
                               args.options);
    if (lists.empty())
      lists = prepare_lists(signature_of(kVerb).core, group, args[kTensor], args[kSecond], op,
                            args.options, &call->copies);
    if (lists.empty()) return nullptr;
    call->set_steps(std::move(lists));
  }
  const Owned outputs(outputs_of<kVerb>(group, args));
  PyObject* const then = takes_rows(kVerb) ? args[kThen] : nullptr;
  const Owned kept(PyTuple_Pack(then ? 3 : 2, args[kTensor] ? args[kTensor] : Py_None,
                                args[kSecond] ? args[kSecond] : Py_None, then));
  if (!outputs.get() || !kept.get()) throw Interrupted{};
  count_writes(written_by<kVerb>(group, args));
  if (takes_rows(kVerb) && given(then)) count_row_writes(then);
  return queue_call(caller, call, kept.get(), outputs.get());
}

// Whether a call may run now. Finishes the calls that C++ has queued before it. A call behind
// Python's queue goes into that queue.
inline bool may_run_now(ProcessGroup& group) {
  if (group.idle()) [[likely]]
    return true;
  group.refuse_handler();  // it would wait for the call that it interrupted
  group.refuse_child();
  WaitedTime waited(0);
  if (finish_here(group.queue(), nullptr, waited) && group.idle()) return true;
  PythonHost host;
  host.blocking();
  group.await_queued(host);
  return group.idle();
}

// As start_collective.
template <FastVerb kVerb>
PyObject* run_collective(const Caller& caller, Args& args) {
  ProcessGroup& group = caller.group;
  const bool is_async = args[kAsyncOp] == Py_True;
  const std::optional<Op> op = op_of(args[kOp]);
  if (!op) return nullptr;
  if (!is_async && !may_run_now(group)) return nullptr;
  const auto start = [&] {
    PyObject* work = group.gpu_calls() ? start_beside_there<kVerb>(caller, args, *op) : nullptr;
    return work ? work : start_collective<kVerb>(caller, args, *op);
  };
  if constexpr (!signature_of(kVerb).takes_sequences) {
    if (is_async) return start();
    return run_one<kVerb>(group, args, *op) ? Py_NewRef(Py_None) : nullptr;
  } else {
    const ListSnapshot first(args[kTensor]), second(args[kSecond]);
    args[kTensor] = first.or_given(args[kTensor]);
    args[kSecond] = second.or_given(args[kSecond]);
    if (is_async) return start();
    if constexpr (!takes_lists(kVerb)) {
      return run_one<kVerb>(group, args, *op) ? Py_NewRef(Py_None) : nullptr;
    } else {
      const auto lists = prepare_lists(signature_of(kVerb).core, group, args[kTensor],
                                       args[kSecond], *op, args.options);
      if (lists.empty()) {
        const bool has_started = (group.gpu_calls() && start_there<kVerb>(group, args, *op)) ||
                                 run_copied_lists<kVerb>(group, args, *op);
        return has_started ? Py_NewRef(Py_None) : nullptr;
      }
      count_writes(written_by<kVerb>(group, args));
      PythonHost host;
      run_lists(group, lists, host, args.timeout_s);
      return Py_NewRef(Py_None);
    }
  }
}

// A new reference to the result; null if it is no fast call. Transfers go beside the group's calls,
// queued ones too.
template <FastVerb kVerb>
PyObject* run_fast(const Caller& caller, Args& args) {
  constexpr bool kSends = kVerb == FastVerb::send || kVerb == FastVerb::isend;
  if constexpr (kVerb == FastVerb::send || kVerb == FastVerb::recv) {
    PyObject* result = run_transfer(kSends, caller.group, args);
    if (result || !caller.group.gpu_calls()) return result;
    return run_transfer_on_gpu(kSends, caller.group, args);
  } else if constexpr (kVerb == FastVerb::isend || kVerb == FastVerb::irecv) {
    PyObject* work = start_transfer(kSends, caller, args);
    if (work || !caller.group.gpu_calls()) return work;
    return start_transfer_on_gpu(kSends, caller, args);
  } else if constexpr (kVerb == FastVerb::batch_isend_irecv) {
    PyObject* works = start_batch(caller, args);
    if (works || !caller.group.gpu_calls()) return works;
    return start_batch_on_gpu(caller, args);
  } else return run_collective<kVerb>(caller, args);
}

}  // namespace fastcoll
