// SPDX-License-Identifier: Apache-2.0
// The backend "fastcoll" as a c10d::Backend, so that torch can register it for some devices of a
// group, wrap it under TORCH_DISTRIBUTED_DEBUG=DETAIL, and call it from C++ without the GIL (DDP's
// reducer, functional collectives). Compiled at first use against the installed torch
// (c10d_build.py); one source for 2.11 and later.
//
// Decides which calls run here and which in Python: those whose plan is known, and sends and
// receives, which need none, on contiguous CPU tensors, run here; all others go to the process
// group of torch_group.py, which plans, checks and explains them. The protocol is that of
// fastcoll._C, reached through core_api.h.
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d_calls.h"
#include "c10d_threads.h"
#include "c10d_transfers.h"
#include "c10d_verbs.h"
#include "c10d_work.h"
#include "core_api.h"

namespace {

// FSDP and users free a tensor's memory by resizing its storage; it keeps its shape then.
bool has_memory(const at::Tensor& tensor) {
  const auto end = size_t(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  return tensor.numel() == 0 || tensor.storage().nbytes() >= end;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_neg() && !tensor.is_conj() && dtype_of(tensor.scalar_type()) &&
         has_memory(tensor);
}

// Let autograd know that a tensor is written. Tensors of inference mode have no version.
void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

class FastcollBackend final : public c10d::Backend {
 public:
  FastcollBackend(py::object group, const py::object& communicator, int rank, int size)
      : Backend(rank, size), group_(std::move(group)), core_(core->group_of(communicator.ptr())) {
    if (!core_) throw py::type_error("not a Communicator");
    traces_ = core->traces(core_);
  }

  ~FastcollBackend() override {
    if (!Py_IsInitialized()) {
      group_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    group_ = py::object();
  }

  const std::string getBackendName() const override { return "fastcoll"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}  // a communicator counts its calls itself
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void setTimeout(Milliseconds timeout) override { python("set_timeout", timeout); }
  void shutdown() override { python("shutdown"); }
  void abort() override { python("abort"); }

  // ---- DDP's buckets ----

  // On CPUs, whose devices have no index.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }

  // A symmetric tensor: the ranks reduce it where it lies. Collective, as making buckets is.
  // Hooks and users may resize it, as any gradient. Then its data moves to ordinary memory, and the
  // heap gets its block back.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
    // DDP asks for complex numbers, and then views what it gets as pairs of real ones.
    if (c10::isComplexType(dtype)) {
      dtype = c10::toRealValueType(dtype);
      size *= 2;
    }
    if (!dtype_of(dtype)) return at::empty({size}, options.dtype(dtype));
    const py::gil_scoped_acquire gil;
    const auto lent = group_.attr("communicator")
                          .attr("empty")(size, py::arg("dtype") = dtype)
                          .cast<at::Tensor>();
    if (size == 0) return lent;
    return at::for_blob(lent.mutable_data_ptr(), lent.sizes())
        .deleter([lent](void*) {})
        .options(lent.options())
        .resizeable_storage()
        .allocator(c10::GetCPUAllocator())
        .make_tensor();
  }

  // ---- verbs that may run here ----

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    std::optional<Native> native;
    if (tensors.size() == 1)
      native = reduction(kFastcollAllReduce, opts.reduceOp, tensors[0], tensors[0]);
    return run({kAllReduce, opts, tensors, tensors}, native, tensors, opts);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    std::optional<Native> native;
    if (tensors.size() == 1 && is_plain(tensors[0]) && is_rank(opts.rootRank))
      native =
          of(kFastcollBroadcast, 0, int(opts.rootRank), tensors[0].numel(), tensors[0], tensors[0]);
    return run({kBroadcast, opts, tensors, tensors}, native, tensors, opts);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return run({kAllGatherSingle, opts, {input}, {output}}, gather(output, input), output, input,
               opts);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    std::optional<Native> native;
    if (inputs.size() == 1 && outputs.size() == 1) native = gather(outputs[0], inputs[0]);
    return run({kAllGatherSingleCoalesced, opts, inputs, outputs}, native, outputs, inputs, opts);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return run({kReduceScatterSingle, opts, {input}, {output}},
               reduction(kFastcollReduceScatter, opts.reduceOp, input, output), output, input,
               opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    std::optional<Native> native;
    if (inputs.size() == 1 && outputs.size() == 1)
      native = reduction(kFastcollReduceScatter, opts.reduceOp, inputs[0], outputs[0]);
    return run({kReduceScatterSingleCoalesced, opts, inputs, outputs}, native, outputs, inputs,
               opts);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    std::optional<Native> native;
    if (tensors.size() == 1 && is_rank(opts.rootRank))
      native =
          reduction(kFastcollReduce, opts.reduceOp, tensors[0], tensors[0], int(opts.rootRank));
    return run({kReduce, opts, tensors, tensors}, native, tensors, opts);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    const Terms terms{kAllToAllSingle, opts, {input}, {output}};
    const Cut cut{output_sizes, input_sizes};
    return run(terms, in_parts(kFastcollAllToAll, 0, 0, terms.outputs, terms.inputs, &cut), output,
               input, output_sizes, input_sizes, opts);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return run({kAllToAll, opts, inputs, outputs},
               in_parts(kFastcollAllToAll, 0, 0, outputs, inputs), outputs, inputs, opts);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    const Terms terms{kAllGather, opts, inputs, one_list(outputs)};
    return run(terms, in_parts(kFastcollAllGather, 0, 0, terms.outputs, inputs), outputs, inputs,
               opts);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    const Terms terms{kGather, opts, inputs, one_list(outputs)};
    return run(terms, in_parts(kFastcollGather, 0, opts.rootRank, terms.outputs, inputs), outputs,
               inputs, opts);
  }

  // Of torch 2.14 and later.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    const Terms terms{
        kGatherSingle, opts, {input}, opts.rootRank == rank_ ? Tensors{output} : Tensors{}};
    const std::vector<int64_t> equally;
    const Cut cut{equally, equally};
    return run(terms, in_parts(kFastcollGather, 0, opts.rootRank, terms.outputs, {input}, &cut),
               output, input, opts);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    const Terms terms{kScatter, opts, one_list(inputs), outputs};
    return run(terms, in_parts(kFastcollScatter, 0, opts.rootRank, outputs, terms.inputs), outputs,
               inputs, opts);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    const Terms terms{kReduceScatter, opts, one_list(inputs), outputs};
    std::optional<Native> native;
    if (opts.reduceOp.op_ <= c10d::ReduceOp::BXOR)
      native = in_parts(kFastcollReduceScatter, int(opts.reduceOp.op_), 0, outputs, terms.inputs);
    return run(terms, native, outputs, inputs, opts);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return run({kBarrier, opts, {}, {}},
               Native{{kFastcollBarrier, kFastcollUint8, 0, 0, 0, 0, false}}, opts);
  }

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    if (may_transfer(tensors, tag) && is_rank(dst)) return transfer(kSend, tensors, dst, tag);
    return forward({kSend, tensors, {}}, tensors, dst, tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    if (may_transfer(tensors, tag) && is_rank(src)) return transfer(kRecv, tensors, src, tag);
    return forward({kRecv, tensors, {}}, tensors, src, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (may_transfer(tensors, tag)) return transfer(kRecvAnySource, tensors, kFastcollAnyPeer, tag);
    return forward({kRecvAnySource, tensors, {}}, tensors, tag);
  }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    return c10::make_intrusive<BatchWork>(rank_, kCoalesced.type, kCoalesced.title, end_batch());
  }

  // ---- verbs of Python ----

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return in_python({kAllReduceCoalesced, opts, tensors, tensors}, tensors, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return in_python({kAllGatherCoalesced, opts, inputs, {}}, outputs, inputs, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const bool has_limit = opts.timeout >= kNoTimeout;
    python("monitored_barrier", has_limit ? std::optional(opts.timeout) : std::nullopt,
           wait_all_ranks);
  }

 private:
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

  std::optional<Native> gather(const at::Tensor& output, const at::Tensor& input) const {
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
        void* ptr = side == &outputs ? tensor.mutable_data_ptr()
                                     : const_cast<void*>(tensor.const_data_ptr());
        facts.push_back({ptr, uint64_t(tensor.numel()), *dtype_of(tensor.scalar_type()),
                         int32_t(tensor.dim()), tensor.sizes().data()});
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

  // Let autograd know what a call writes on this rank; Python does so for the calls that it runs.
  void count_writes(const FastcollKind& kind, const Tensors& outputs) const {
    const bool is_root = kind.root == rank_;
    if (kind.verb == kFastcollBroadcast ? is_root : kind.verb == kFastcollReduce && !is_root)
      return;
    for (const at::Tensor& tensor : outputs) count_write(tensor);
  }

  WorkPtr run_now(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    ++sequence_;
    count_writes(call.kind, terms.outputs);
    const Event event(terms);
    const WithoutGil without_gil;
    FastcollFailure failure;
    const auto outcome = core->run(core_, &plan, &call.operands, limit_s(terms.timeout), &failure);
    raise_unless_done(outcome, failure);
    return {};
  }

  // Null where it has to go behind what is queued in Python.
  WorkPtr queue(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    auto handle = c10::make_intrusive<NativeWork>(
        c10::intrusive_ptr<FastcollBackend>::reclaim_copy(this), core_, terms.verb.type,
        terms.verb.title, terms.inputs, terms.outputs);
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
          c10::make_intrusive<TransferWork>(c10::intrusive_ptr<FastcollBackend>::reclaim_copy(this),
                                            core_, started, verb.type, verb.title, tensors);
      if (must_drive) {
        const py::gil_scoped_acquire gil;
        group_.attr("communicator").attr("drive_transfers")();
      }
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
    const py::gil_scoped_acquire gil;
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
      const Event event(terms);
      const py::gil_scoped_acquire gil;
      // Python starts what it would otherwise carry out at once.
      if (is_coalescing_ && !python_coalesces_.exchange(true))
        group_.attr("_start_coalescing")(at::Device(at::kCPU));
      py::object work = group_.attr(terms.verb.method)(std::forward<Args>(args)...);
      if (work.is_none()) return {};
      return c10::make_intrusive<PythonWork>(rank_, terms.verb.type, terms.verb.title, terms.inputs,
                                             std::move(work));
    });
  }

  py::object group_;
  FastcollGroup* const core_;
  std::atomic<uint64_t> sequence_{0};
  bool traces_ = false;
  std::atomic<bool> is_coalescing_{false}, python_coalesces_{false};
  std::mutex batch_mutex_;
  std::vector<WorkPtr> batch_;  // since startCoalescing
  KnownPlans plans_{core_};
};

// Python gets a handle as one of its own class, not of torch's base.
template <class Handle>
void add_handle(const py::module_& module, const char* name) {
  py::class_<Handle, c10d::Work, c10::intrusive_ptr<Handle>>(module, name)
      .def("exception", &error_of);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const py::capsule capsule = py::module_::import("fastcoll._C").attr("core_api");
  core = static_cast<const FastcollCoreApi*>(
      PyCapsule_GetPointer(capsule.ptr(), kFastcollCoreApiName));
  if (!core) throw py::error_already_set();
  if (core->version != kFastcollCoreApiVersion)
    throw py::import_error("built for another version of fastcoll");
  py::module_::import("torch.distributed");  // registers the base class
  py::class_<FastcollBackend, c10d::Backend, c10::intrusive_ptr<FastcollBackend>>(module,
                                                                                  "FastcollBackend")
      .def(py::init<py::object, const py::object&, int, int>(), py::arg("group"),
           py::arg("communicator"), py::arg("rank"), py::arg("size"))
      .def("_set_default_timeout", &FastcollBackend::setTimeout, py::arg("timeout"));
  add_handle<NativeWork>(module, "NativeWork");
  add_handle<PythonWork>(module, "PythonWork");
  add_handle<TransferWork>(module, "TransferWork");
  add_handle<BatchWork>(module, "BatchWork");
  module.def("finish", [] {
    const WithoutGil without_gil;
    core->drain_threads();
  });
}
