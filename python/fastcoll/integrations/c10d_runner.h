// SPDX-License-Identifier: Apache-2.0
// How the backend carries out a call: here if its plan is known, else in Python. Part of
// c10d_backend.cpp, compiled with it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "c10d_calls.h"
#include "c10d_threads.h"
#include "c10d_transfers.h"
#include "c10d_verbs.h"
#include "c10d_work.h"
#include "core_api.h"
#include "gil.h"

namespace {

// FSDP and users free a tensor's memory by resizing its storage; it keeps its shape then. Zeros
// that autograd makes have none.
bool has_memory(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return false;
  const auto end = size_t(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  return tensor.numel() == 0 || tensor.storage().nbytes() >= end;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_neg() && !tensor.is_conj() && dtype_of(tensor.scalar_type()) &&
         has_memory(tensor);
}

// The facts of a plain tensor, whose memory is read unless `ptr` is there.
FastcollTensor facts_of(const at::Tensor& tensor, void* ptr = nullptr) {
  if (!ptr) ptr = const_cast<void*>(tensor.const_data_ptr());
  return {ptr, uint64_t(tensor.numel()), *dtype_of(tensor.scalar_type()), int32_t(tensor.dim()),
          tensor.sizes().data()};
}

// Let autograd know that a tensor is written. Tensors of inference mode have no version.
void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// A c10d::Backend without verbs.
class Runner : public c10d::Backend {
 public:
  Runner(py::object group, const py::object& communicator, int rank, int size)
      : Backend(rank, size), group_(std::move(group)), core_(core->group_of(communicator.ptr())) {
    if (!core_) throw py::type_error("not a Communicator");
    traces_ = core->traces(core_);
    stands_in_ = group_.attr("events").cast<std::string>() == "gloo";
    coalesces_ = group_.attr("supports_coalescing").cast<bool>();
  }

  ~Runner() override {
    if (!Py_IsInitialized()) {
      group_.release();
      return;
    }
    const fastcoll::GilHeld gil;
    group_ = py::object();
  }

 protected:
  // ---- which calls may run here ----

  static Native of(FastcollVerb verb, int op, int root, int64_t numel, const at::Tensor& input,
                   const at::Tensor& output) {
    const FastcollKind kind{verb, *dtype_of(input.scalar_type()), op, root, uint64_t(numel), 0,
                            false};
    return {kind, {input.const_data_ptr(), output.mutable_data_ptr(), nullptr}};
  }

  // A part and the whole: apart, or in place, where it is this rank's part of it.
  bool may_be_part(const at::Tensor& part, const at::Tensor& whole) const {
    if (!is_plain(part) || !is_plain(whole) || part.scalar_type() != whole.scalar_type() ||
        whole.numel() != part.numel() * size_)
      return false;
    const auto* a = static_cast<const char*>(part.const_data_ptr());
    const auto* b = static_cast<const char*>(whole.const_data_ptr());
    return a == b + size_t(rank_) * part.nbytes() || a + part.nbytes() <= b ||
           b + whole.nbytes() <= a;
  }

  std::optional<Native> reduction(FastcollVerb verb, const c10d::ReduceOp& op,
                                  const at::Tensor& input, const at::Tensor& output,
                                  int root = 0) const {
    if (op.op_ > c10d::ReduceOp::BXOR || !is_plain(input)) return std::nullopt;
    const bool scatters = verb == kFastcollReduceScatter;
    if (scatters && !may_be_part(output, input)) return std::nullopt;
    return of(verb, int(op.op_), root, output.numel(), input, output);
  }

  std::optional<Native> gathering(const at::Tensor& output, const at::Tensor& input) const {
    if (!may_be_part(input, output)) return std::nullopt;
    return of(kFastcollAllGather, 0, 0, input.numel(), input, output);
  }

  // The tensors of the one list that a call takes, if it does.
  static Tensors one_list(const std::vector<Tensors>& lists) {
    return lists.size() == 1 ? lists[0] : Tensors{};
  }

  // By how many rows each tensor is cut; none: equally.
  struct Cut {
    const std::vector<int64_t>&output_sizes, &input_sizes;
  };

  std::optional<Native> in_parts(FastcollVerb verb, int op, int64_t root, const Tensors& outputs,
                                 const Tensors& inputs, const Cut* cut = nullptr) const {
    std::vector<FastcollTensor> facts;
    facts.reserve(outputs.size() + inputs.size());
    // Outputs first: a lazy clone gets memory of its own then, also for inputs that share it.
    for (const Tensors* side : {&outputs, &inputs})
      for (const at::Tensor& tensor : *side) {
        if (!is_plain(tensor)) return std::nullopt;
        facts.push_back(facts_of(tensor, side == &outputs ? tensor.mutable_data_ptr() : nullptr));
      }
    if (!is_rank(root)) return std::nullopt;
    FastcollPartsCall call{};
    call.verb = verb;
    call.root = int(root);
    call.outputs = facts.data();
    call.inputs = facts.data() + outputs.size();
    call.num_outputs = outputs.size();
    call.num_inputs = inputs.size();
    call.cuts = cut != nullptr;
    if (cut) {
      call.output_sizes = cut->output_sizes.data();
      call.input_sizes = cut->input_sizes.data();
      call.num_output_sizes = cut->output_sizes.size();
      call.num_input_sizes = cut->input_sizes.size();
    }
    Native native{};
    native.parts = std::make_unique_for_overwrite<FastcollParts>();
    bool is_whole = false;
    if (!core->read_parts(core_, &call, &native.kind, native.parts.get(), &is_whole))
      return std::nullopt;
    native.kind.op = op;
    if (is_whole) native.operands.input = call.inputs[0].ptr;
    else native.operands.parts = native.parts.get();
    if (is_whole || verb == kFastcollReduceScatter) native.operands.output = call.outputs[0].ptr;
    return native;
  }

  bool is_rank(int64_t peer) const { return peer >= 0 && peer < size_; }

  bool may_transfer(const Tensors& tensors, int tag) const {
    return tensors.size() == 1 && is_plain(tensors[0]) && tag >= 0 && !traces_;
  }

  // Of the event of an asynchronous call in torch's profiler.
  const char* title_of(const Verb& verb) const { return stands_in_ ? verb.for_gloo : verb.title; }

  // ---- running them ----

  template <class... Args>
  WorkPtr run(const Terms& terms, const std::optional<Native>& native, Args&&... args) {
    const std::optional<FastcollPlan> plan =
        native && !is_coalescing_ ? plans_.find(native->kind) : std::nullopt;
    if (plan && !terms.is_async && core->idle(core_)) return run_now(terms, *native, *plan);
    if (plan && terms.is_async && core->takes_calls(core_))
      if (WorkPtr work = queue(terms, *native, *plan)) return work;
    return in_python(terms, std::forward<Args>(args)...);
  }

  // Below 0: the group's.
  static double limit_s(Milliseconds own) { return own > kNoTimeout ? seconds(own) : -1; }

  // Tell autograd the tensors that a call writes on this rank. Python does so for its own calls.
  void count_writes(const FastcollKind& kind, const Tensors& outputs) const {
    const bool is_root = kind.root == rank_;
    if (kind.verb == kFastcollBroadcast ? is_root : kind.verb == kFastcollReduce && !is_root)
      return;
    for (const at::Tensor& tensor : outputs) count_write(tensor);
  }

  WorkPtr run_now(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    ++sequence_;
    count_writes(call.kind, terms.outputs);
    const Event event(terms, stands_in_);
    const WithoutGil without_gil;
    FastcollFailure failure;
    const auto outcome =
        core->run(core_, &plan, &call.operands, nullptr, limit_s(terms.timeout), &failure);
    raise_unless_done(outcome, failure);
    return {};
  }

  // Null where it has to go behind calls that are queued in Python.
  WorkPtr queue(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    auto handle = c10::make_intrusive<NativeWork>(c10::intrusive_ptr<Runner>::reclaim_copy(this),
                                                  core_, terms.verb.type, title_of(terms.verb),
                                                  terms.inputs, terms.outputs);
    FastcollQueuedCall queued{};
    queued.plan = &plan;
    queued.operands = call.operands;
    queued.timeout_s = limit_s(terms.timeout);
    const WorkPtr work = NativeWork::queue(std::move(handle), queued);
    if (!work) return work;
    ++sequence_;
    count_writes(call.kind, terms.outputs);
    return work;
  }

  WorkPtr transfer(const Verb& verb, const Tensors& tensors, int peer, int tag) {
    return in_batch([&]() -> WorkPtr {
      const WithoutGil without_gil;
      Dropped::release();
      const at::Tensor& tensor = tensors[0];
      const bool sends = verb.type == OpType::SEND;
      if (!sends) count_write(tensor);
      const FastcollTransferCall call{
          sends,
          peer,
          uint32_t(tag),
          *dtype_of(tensor.scalar_type()),
          uint64_t(tensor.numel()),
          sends ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr(),
          limit_s(kNoTimeout)};
      bool must_drive = false;
      FastcollFailure failure;
      FastcollTransfer* started = core->start_transfer(core_, &call, &must_drive, &failure);
      if (!started) CallFailed(failure).raise();
      auto work =
          c10::make_intrusive<TransferWork>(c10::intrusive_ptr<Runner>::reclaim_copy(this), core_,
                                            started, verb.type, title_of(verb), tensors);
      if (must_drive) core->drive_transfers(core_, Dropped::release_soon);
      return work;
    });
  }

  // ---- batches ----

  // Start a call. Within a batch its Work is kept, as torch drops it. torch does not end a batch
  // in which a call raises.
  template <class Start>
  WorkPtr in_batch(Start start) {
    if (!is_coalescing_) return start();
    try {
      WorkPtr work = start();
      const std::lock_guard lock(batch_mutex_);
      if (work) batch_.push_back(work);
      return work;
    } catch (...) {
      end_batch();
      throw;
    }
  }

  std::vector<WorkPtr> end_batch() {
    is_coalescing_ = false;
    if (python_coalesces_.exchange(false)) python("_end_coalescing", at::Device(at::kCPU));
    const std::lock_guard lock(batch_mutex_);
    return std::exchange(batch_, {});
  }

  // ---- running the others ----

  template <class... Args>
  void python(const char* method, Args&&... args) {
    const fastcoll::GilHeld gil;
    group_.attr(method)(std::forward<Args>(args)...);
  }

  template <class... Args>
  WorkPtr in_python(const Terms& terms, Args&&... args) {
    ++sequence_;
    return forward(terms, std::forward<Args>(args)...);
  }

  template <class... Args>
  WorkPtr forward(const Terms& terms, Args&&... args) {
    return in_batch([&]() -> WorkPtr {
      const Event event(terms, stands_in_);
      const fastcoll::GilHeld gil;
      // Python then only starts the calls of the batch, and waits for none.
      if (is_coalescing_ && !python_coalesces_.exchange(true))
        group_.attr("_start_coalescing")(at::Device(at::kCPU));
      py::object work = group_.attr(terms.verb.method)(std::forward<Args>(args)...);
      if (work.is_none()) return {};
      return c10::make_intrusive<PythonWork>(rank_, terms.verb.type, title_of(terms.verb),
                                             terms.inputs, std::move(work));
    });
  }

  py::object group_;
  FastcollGroup* const core_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> is_coalescing_{false}, python_coalesces_{false};
  bool stands_in_ = false;  // for Gloo
  bool coalesces_ = false;  // transfers of a batch become one call

 private:
  bool traces_ = false;
  std::mutex batch_mutex_;
  std::vector<WorkPtr> batch_;  // since startCoalescing
  KnownPlans plans_{core_};
};

}  // namespace
