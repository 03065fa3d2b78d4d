// SPDX-License-Identifier: Apache-2.0
#include "python/core_api.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>

#include "fastcoll/integrations/core_api.h"
#include "group/planned_call.h"
#include "group/threads.h"
#include "python/errors.h"
#include "python/host.h"
#include "python/read_parts.h"
#include "python/row_check.h"

namespace fastcoll {

namespace {

static_assert(sizeof(Plan) <= sizeof(FastcollPlan) && alignof(Plan) <= alignof(FastcollPlan));
static_assert(std::is_trivially_copyable_v<Plan>);
static_assert(sizeof(RowCall) <= sizeof(FastcollRows) && alignof(RowCall) <= alignof(FastcollRows));
static_assert(std::is_trivially_copyable_v<RowCall>);
static_assert(int(Verb::all_reduce) == kFastcollAllReduce &&
              int(Verb::reduce_scatter) == kFastcollReduceScatter &&
              int(Verb::all_gather) == kFastcollAllGather &&
              int(Verb::broadcast) == kFastcollBroadcast &&
              int(Verb::barrier) == kFastcollBarrier &&
              int(Verb::all_to_all) == kFastcollAllToAll && int(Verb::gather) == kFastcollGather &&
              int(Verb::scatter) == kFastcollScatter && int(Verb::reduce) == kFastcollReduce);
static_assert(int(DType::float32) == kFastcollFloat32 && int(DType::float64) == kFastcollFloat64 &&
              int(DType::float16) == kFastcollFloat16 &&
              int(DType::bfloat16) == kFastcollBfloat16 && int(DType::int8) == kFastcollInt8 &&
              int(DType::uint8) == kFastcollUint8 && int(DType::int32) == kFastcollInt32 &&
              int(DType::int64) == kFastcollInt64 && int(DType::boolean) == kFastcollBool &&
              int(DType::complex64) == kFastcollComplex64 &&
              int(DType::complex128) == kFastcollComplex128);
static_assert(sizeof(Parts) == sizeof(FastcollParts) && kMaxWorld == kFastcollMaxWorld &&
              offsetof(Parts, outputs) == offsetof(FastcollParts, outputs));
static_assert(kAnyPeer == kFastcollAnyPeer);

GroupOf* group_in_object = nullptr;

ProcessGroup& ours(FastcollGroup* group) { return *reinterpret_cast<ProcessGroup*>(group); }
const ProcessGroup& ours(const FastcollGroup* group) {
  return *reinterpret_cast<const ProcessGroup*>(group);
}

using Handle = std::shared_ptr<Transfer>;

Transfer& behind(const FastcollTransfer* transfer) {
  return **reinterpret_cast<const Handle*>(transfer);
}

void* default_group() { return default_group_of_calls(); }

FastcollGroup* group_of(void* object) {
  return reinterpret_cast<FastcollGroup*>(group_in_object(static_cast<PyObject*>(object)));
}

bool find_plan(FastcollGroup* group, const FastcollKind* kind, FastcollPlan* plan) {
  // The call's site is known in Python alone.
  if (ours(group).traces()) return false;
  if (kind->op < 0 || kind->op >= kNumOps) return false;  // a number that names none
  const Plan* known = ours(group).cached_plan(Verb(kind->verb), DType(kind->dtype), Op(kind->op),
                                              kind->numel, kind->root, kind->splits);
  if (!known || (kind->in_parts && verb_reduces(known->verb) && !takes_lists(*known))) return false;
  std::memcpy(plan->bytes, known, sizeof *known);
  return true;
}

TensorView view_of(const FastcollTensor& tensor) {
  return {static_cast<std::byte*>(tensor.ptr), tensor.numel, DType(tensor.dtype), tensor.ndim,
          tensor.shape};
}

bool read_parts(const FastcollGroup* group, const FastcollPartsCall* call, FastcollKind* kind,
                FastcollParts* parts, bool* is_whole) {
  constexpr size_t kMost = kMaxWorld;
  if (call->num_outputs > kMost || call->num_inputs > kMost) return false;
  std::array<TensorView, kMost> outputs, inputs;
  const auto views = [](std::array<TensorView, kMost>& into, const FastcollTensor* tensors,
                        size_t size) {
    for (size_t i = 0; i < size; ++i) into[i] = view_of(tensors[i]);
    return std::span<const TensorView>(into.data(), size);
  };
  const std::optional<PartsKind> found =
      fastcoll::read_parts({.verb = Verb(call->verb),
                            .rank = ours(group).rank(),
                            .world_size = ours(group).world_size(),
                            .root = call->root,
                            .outputs = views(outputs, call->outputs, call->num_outputs),
                            .inputs = views(inputs, call->inputs, call->num_inputs),
                            .cuts = call->cuts,
                            .output_sizes = {call->output_sizes, call->num_output_sizes},
                            .input_sizes = {call->input_sizes, call->num_input_sizes}},
                           *reinterpret_cast<Parts*>(parts));
  if (!found) return false;
  *kind = {call->verb,      FastcollDType(found->dtype), 0, call->root, found->numel, found->splits,
           !found->is_whole};
  *is_whole = found->is_whole;
  return true;
}

bool read_rows(const FastcollRowsCall* call, FastcollRows* rows) {
  if (call->op < 0 || call->op >= kNumOps || !op_takes_rows(Op(call->op))) return false;
  if (!is_epsilon(call->epsilon)) return false;
  const TensorView x = view_of(call->x);
  TensorView out = x, summed = x;
  out.ptr = static_cast<std::byte*>(call->out);
  summed.ptr = static_cast<std::byte*>(call->summed);
  RowCall found;
  RowCheck check(found, x, out);
  if (!check.start(false) || !check.add_summed(summed)) return false;
  if (call->residual && !check.add_residual(view_of(*call->residual), false)) return false;
  if (call->weight && !check.add_weight(view_of(*call->weight))) return false;
  if (!check.finish(call->epsilon, call->offset, call->rounds_first, call->wide_sum)) return false;
  std::memcpy(rows->bytes, &found, sizeof found);
  return true;
}

Operands operands_of(const FastcollOperands& operands) {
  return {.input = operands.input,
          .output = operands.output,
          .parts = reinterpret_cast<const Parts*>(operands.parts)};
}

void raise(const FastcollFailure* failure) {
  set_python_error(Failure(ErrorKind(failure->kind), failure->text, failure->ranks));
}

bool traces(const FastcollGroup* group) { return ours(group).traces(); }
bool closed(const FastcollGroup* group) { return ours(group).closed(); }
bool idle(const FastcollGroup* group) { return ours(group).idle(); }
bool takes_calls(FastcollGroup* group) { return ours(group).queue().takes_calls(); }

void put(FastcollFailure* into, ErrorKind kind, const char* text, uint64_t ranks) {
  into->kind = uint32_t(kind);
  into->ranks = ranks;
  const size_t length = std::min(std::strlen(text), sizeof into->text - 1);
  std::memcpy(into->text, text, length);
  into->text[length] = '\0';
}

// The outcome of a call; no exception gets through.
template <class Call>
FastcollOutcome outcome_of(FastcollFailure* failure, Call call) {
  try {
    return call();
  } catch (const Failure& error) {
    put(failure, error.kind(), error.what(), error.ranks());
  } catch (const Interrupted&) {
    return kFastcollInterrupted;
  } catch (const std::exception& error) {
    put(failure, ErrorKind::driver, error.what(), 0);
  }
  return kFastcollFailed;
}

Plan plan_of(const FastcollPlan* plan) {
  Plan copy;
  std::memcpy(static_cast<void*>(&copy), plan->bytes, sizeof copy);
  return copy;
}

FastcollOutcome run(FastcollGroup* group, const FastcollPlan* plan,
                    const FastcollOperands* operands, const FastcollRows* rows, double timeout_s,
                    FastcollFailure* failure) {
  return outcome_of(failure, [&] {
    DetachedHost host;
    Operands memory = operands_of(*operands);
    RowCall steps;
    if (rows) {
      std::memcpy(static_cast<void*>(&steps), rows->bytes, sizeof steps);
      memory.rows = &steps;
    }
    ours(group).run(plan_of(plan), memory, host, timeout_s);
    return kFastcollDone;
  });
}

class CallWithWork final : public PlannedCall {
 public:
  CallWithWork(ProcessGroup& group, const FastcollQueuedCall& call)
      : PlannedCall(group, call.timeout_s), call_(call) {
    first_ = {plan_of(call.plan), operands_of(call.operands)};
    if (!first_.operands.parts) return;
    parts_ = std::make_unique<Parts>(*first_.operands.parts);
    first_.operands.parts = parts_.get();
  }
  ~CallWithWork() override { call_.drop(call_.work); }
  CallWithWork(const CallWithWork&) = delete;
  CallWithWork& operator=(const CallWithWork&) = delete;

  void over() noexcept override {
    FastcollFailure into;
    if (failure()) put(&into, failure()->kind(), failure()->what(), failure()->ranks());
    call_.over(call_.work, failure() ? &into : nullptr);
  }

 private:
  const FastcollQueuedCall call_;
  std::unique_ptr<const Parts> parts_;
};

FastcollOutcome queue(FastcollGroup* group, const FastcollQueuedCall* call, const void** place,
                      FastcollFailure* failure) {
  return outcome_of(failure, [&] {
    const auto queued = std::make_shared<CallWithWork>(ours(group), *call);
    ours(group).refuse_child();
    *place = queued.get();
    return ours(group).queue().push(queued) ? kFastcollDone : kFastcollPending;
  });
}

FastcollOutcome finish(FastcollGroup* group, const void* place, double limit_s,
                       FastcollFailure* failure) {
  return outcome_of(failure, [&] {
    ours(group).refuse_handler();
    ours(group).refuse_child();
    WaitedTime waited(limit_s);
    WaiterHost<DetachedHost> host(waited);
    const auto* call = static_cast<const CallWithWork*>(place);
    if (ours(group).queue().finish(call, host)) return kFastcollDone;
    return host.was_interrupted() ? kFastcollInterrupted : kFastcollPending;
  });
}

void go_on(FastcollGroup* group) { ours(group).resume_queue(); }
void linger(FastcollGroup* group, const void* place) {
  ours(group).linger(static_cast<const CallWithWork*>(place));
}

void run_task(void (*task)(void* context), void* context) {
  CallQueue::run_callback([task, context] { task(context); });
}

FastcollTransfer* start_transfer(FastcollGroup* group, const FastcollTransferCall* call,
                                 bool* must_drive, FastcollFailure* failure) {
  std::unique_ptr<Handle> handle;
  const auto outcome = outcome_of(failure, [&] {
    handle = std::make_unique<Handle>(std::make_shared<Transfer>());
    Transfer& transfer = **handle;
    transfer.sends = call->sends;
    transfer.peer = call->peer;
    transfer.tag = call->tag;
    transfer.dtype = DType(call->dtype);
    transfer.numel = call->numel;
    transfer.data = static_cast<std::byte*>(call->data);
    transfer.num_bytes = transfer.numel * dtype_size(transfer.dtype);
    transfer.timeout_s = call->timeout_s;
    DetachedHost host;
    *must_drive = ours(group).start({handle.get(), 1}, host);
    return kFastcollDone;
  });
  return reinterpret_cast<FastcollTransfer*>(outcome == kFastcollDone ? handle.release() : nullptr);
}

void drive_transfers(FastcollGroup* group, void (*end)()) { ours(group).drive_transfers(end); }

bool look_at_transfer(FastcollGroup* group, const FastcollTransfer* transfer) {
  return ours(group).look(behind(transfer));
}

FastcollOutcome wait_for_transfer(FastcollGroup* group, FastcollTransfer* transfer, double limit_s,
                                  FastcollFailure* failure) {
  return outcome_of(failure, [&] {
    DetachedHost host;
    const bool is_over = ours(group).wait(behind(transfer), host, limit_s);
    return is_over ? kFastcollDone : kFastcollPending;
  });
}

bool transfer_is_over(const FastcollTransfer* transfer) { return behind(transfer).done; }
int peer_of_transfer(const FastcollTransfer* transfer) { return behind(transfer).peer; }
void drop_transfer(FastcollTransfer* transfer) { delete reinterpret_cast<Handle*>(transfer); }

constexpr FastcollCoreApi kApi = {
    kFastcollCoreApiVersion,
    group_of,
    default_group,
    find_plan,
    raise,
    traces,
    closed,
    idle,
    run,
    read_parts,
    read_rows,
    takes_calls,
    queue,
    finish,
    go_on,
    linger,
    run_task,
    drain_threads,
    start_transfer,
    look_at_transfer,
    wait_for_transfer,
    transfer_is_over,
    peer_of_transfer,
    drop_transfer,
    drive_transfers,
};

}  // namespace

bool add_core_api(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  PyObject* capsule =
      PyCapsule_New(const_cast<FastcollCoreApi*>(&kApi), kFastcollCoreApiName, nullptr);
  const int failed = PyModule_AddObjectRef(module, "core_api", capsule);
  Py_XDECREF(capsule);
  return failed == 0;
}

}  // namespace fastcoll
