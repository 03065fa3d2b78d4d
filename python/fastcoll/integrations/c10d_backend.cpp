// SPDX-License-Identifier: Apache-2.0
// The backend "fastcoll" as a c10d::Backend, so that torch can register it for some devices of a
// group, wrap it under TORCH_DISTRIBUTED_DEBUG=DETAIL, and call it from C++ without the GIL (DDP's
// reducer, functional collectives). Compiled at first use against the installed torch
// (c10d_build.py); one source for 2.11 and later.
//
// Decides which calls run here and which in Python: those whose plan is known, on contiguous CPU
// tensors, run here; all others go to the process group of torch_group.py, which plans, checks and
// explains them. The protocol is that of fastcoll._C, reached through core_api.h.
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d_calls.h"
#include "c10d_threads.h"
#include "c10d_work.h"
#include "core_api.h"

namespace {

// A verb's names.
struct Verb {
  const char* title;   // of the profiler's event
  const char* method;  // of the Python group
  c10d::OpType type;
};

using c10d::OpType;
constexpr Verb kAllReduce{"fastcoll:all_reduce", "allreduce", OpType::ALLREDUCE};
constexpr Verb kAllReduceCoalesced{"fastcoll:all_reduce", "allreduce_coalesced",
                                   OpType::ALLREDUCE_COALESCED};
constexpr Verb kBroadcast{"fastcoll:broadcast", "broadcast", OpType::BROADCAST};
constexpr Verb kReduce{"fastcoll:reduce", "reduce", OpType::REDUCE};
constexpr Verb kAllGather{"fastcoll:all_gather", "allgather", OpType::ALLGATHER};
constexpr Verb kAllGatherCoalesced{"fastcoll:all_gather", "allgather_coalesced",
                                   OpType::ALLGATHER_COALESCED};
constexpr Verb kAllGatherSingle{"fastcoll:_all_gather_base", "all_gather_single",
                                OpType::_ALLGATHER_BASE};
// COALESCED, here and below: torch 2.11 has no types of their own for these.
constexpr Verb kAllGatherSingleCoalesced{"fastcoll:all_gather_into_tensor_coalesced",
                                         "all_gather_single_coalesced", OpType::COALESCED};
constexpr Verb kReduceScatter{"fastcoll:reduce_scatter", "reduce_scatter", OpType::REDUCE_SCATTER};
constexpr Verb kReduceScatterSingle{"fastcoll:_reduce_scatter_base", "reduce_scatter_single",
                                    OpType::_REDUCE_SCATTER_BASE};
constexpr Verb kReduceScatterSingleCoalesced{"fastcoll:reduce_scatter_tensor_coalesced",
                                             "reduce_scatter_single_coalesced", OpType::COALESCED};
constexpr Verb kGather{"fastcoll:gather", "gather", OpType::GATHER};
constexpr Verb kScatter{"fastcoll:scatter", "scatter", OpType::SCATTER};
constexpr Verb kAllToAll{"fastcoll:all_to_all", "alltoall", OpType::ALLTOALL};
constexpr Verb kAllToAllSingle{"fastcoll:all_to_all", "all_to_all_single", OpType::ALLTOALL_BASE};
constexpr Verb kBarrier{"fastcoll:barrier", "barrier", OpType::BARRIER};
constexpr Verb kSend{"fastcoll:send", "send", OpType::SEND};
constexpr Verb kRecv{"fastcoll:recv", "recv", OpType::RECV};
constexpr Verb kRecvAnySource{"fastcoll:recv", "recv_anysource", OpType::RECVANYSOURCE};
constexpr Verb kCoalesced{"fastcoll:coalesced", "_end_coalescing", OpType::COALESCED};

// What the profiler and a Work know of a call.
struct Terms {
  const Verb& verb;
  Tensors inputs;
  Tensors outputs;
  bool is_async = true;
  Milliseconds timeout = kNoTimeout;

  Terms(const Verb& verb, Tensors inputs, Tensors outputs)
      : verb(verb), inputs(std::move(inputs)), outputs(std::move(outputs)) {}
  template <class Options>
  Terms(const Verb& verb, const Options& opts, Tensors inputs, Tensors outputs)
      : Terms(verb, std::move(inputs), std::move(outputs)) {
    is_async = opts.asyncOp;
    timeout = opts.timeout;
  }
};

// The profiler's event of a synchronous call; an asynchronous one's belongs to its Work.
class Event {
 public:
  explicit Event(const Terms& terms) : event_(at::RecordScope::USER_SCOPE) {
    if (terms.is_async || !event_.isActive()) return;
    const std::vector<c10::IValue> inputs(terms.inputs.begin(), terms.inputs.end());
    event_.before(terms.verb.title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }

 private:
  at::RecordFunction event_;
};

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.is_neg() && dtype_of(tensor.scalar_type());
}

class FastcollBackend final : public c10d::Backend {
 public:
  FastcollBackend(py::object group, const py::object& communicator, int rank, int size)
      : Backend(rank, size), group_(std::move(group)), core_(core->group_of(communicator.ptr())) {
    if (!core_) throw py::type_error("not a Communicator");
  }

  ~FastcollBackend() override {
    queue_.join();
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

  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    python("set_timeout", timeout);
  }
  void shutdown() override {
    queue_.join();
    python("shutdown");
  }
  void abort() override {
    python("abort");
    queue_.join();
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
    if (tensors.size() == 1 && is_plain(tensors[0]) && opts.rootRank >= 0 && opts.rootRank < size_)
      native = of(kFastcollBroadcast, 0, int(opts.rootRank), tensors[0], tensors[0], tensors[0]);
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

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return run({kBarrier, opts, {}, {}}, Native{{kFastcollBarrier, kFastcollUint8, 0, 0, 0}}, opts);
  }

  // ---- verbs of Python ----

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return in_python({kAllReduceCoalesced, opts, tensors, tensors}, tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return in_python({kReduce, opts, tensors, tensors}, tensors, opts);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return in_python({kAllGather, opts, inputs, {}}, outputs, inputs, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return in_python({kAllGatherCoalesced, opts, inputs, {}}, outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return in_python({kGather, opts, inputs, {}}, outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return in_python({kScatter, opts, inputs.empty() ? outputs : inputs[0], outputs}, outputs,
                     inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return in_python({kReduceScatter, opts, outputs, outputs}, outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    return in_python({kAllToAllSingle, opts, {input}, {output}}, output, input, output_sizes,
                     input_sizes, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return in_python({kAllToAll, opts, inputs, outputs}, outputs, inputs, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const bool has_limit = opts.timeout >= kNoTimeout;
    python("monitored_barrier", has_limit ? std::optional(opts.timeout) : std::nullopt,
           wait_all_ranks);
  }
  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return transfer({kSend, tensors, {}}, tensors, dst, tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return transfer({kRecv, tensors, {}}, tensors, src, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return transfer({kRecvAnySource, tensors, {}}, tensors, tag);
  }
  void startCoalescing() override {
    is_coalescing_ = true;
    python("_start_coalescing", at::Device(at::kCPU));
  }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    return transfer({kCoalesced, {}, {}}, at::Device(at::kCPU));
  }

 private:
  // ---- which calls may run here ----

  static Native of(FastcollVerb verb, int op, int root, const at::Tensor& message,
                   const at::Tensor& input, const at::Tensor& output) {
    const Kind kind{verb, *dtype_of(message.scalar_type()), op, root, uint64_t(message.numel())};
    return {kind, input.const_data_ptr(), output.mutable_data_ptr()};
  }

  static bool may_be_two(const at::Tensor& one, const at::Tensor& other) {
    const auto* a = static_cast<const char*>(one.const_data_ptr());
    const auto* b = static_cast<const char*>(other.const_data_ptr());
    return is_plain(one) && is_plain(other) && one.scalar_type() == other.scalar_type() &&
           (a + one.nbytes() <= b || b + other.nbytes() <= a);
  }

  std::optional<Native> reduction(FastcollVerb verb, const c10d::ReduceOp& op,
                                  const at::Tensor& input, const at::Tensor& output) const {
    if (op.op_ > c10d::ReduceOp::BXOR || !is_plain(input)) return std::nullopt;
    const bool scatters = verb == kFastcollReduceScatter;
    if (scatters && (!may_be_two(input, output) || input.numel() != output.numel() * size_))
      return std::nullopt;
    return of(verb, int(op.op_), 0, output, input, output);
  }

  std::optional<Native> gather(const at::Tensor& output, const at::Tensor& input) const {
    if (!may_be_two(output, input) || output.numel() != input.numel() * size_) return std::nullopt;
    return of(kFastcollAllGather, 0, 0, input, input, output);
  }

  // ---- running them ----

  template <class... Args>
  WorkPtr run(const Terms& terms, const std::optional<Native>& native, Args&&... args) {
    const std::optional<FastcollPlan> plan =
        native && !is_coalescing_ ? plans_.find(native->kind) : std::nullopt;
    if (plan && !terms.is_async && core->idle(core_)) return run_now(terms, *native, *plan);
    if (plan && terms.is_async && core->begin_async(core_)) return queue(terms, *native, *plan);
    WorkPtr work = in_python(terms, std::forward<Args>(args)...);
    if (native && !plan) {
      const py::gil_scoped_acquire gil;
      plans_.learn(native->kind);
    }
    return work;
  }

  double limit_s(const Terms& terms) const {
    const Milliseconds own = terms.timeout > kNoTimeout ? terms.timeout : timeout_.load();
    return own > kNoTimeout ? double(own.count()) * 1e-3 : -1;
  }

  WorkPtr run_now(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    ++sequence_;
    const Event event(terms);
    const WithoutGil without_gil;
    FastcollFailure failure;
    const auto outcome = core->run(core_, &plan, call.input, call.output, limit_s(terms), &failure);
    if (outcome == kFastcollInterrupted) {
      const py::gil_scoped_acquire gil;
      throw py::error_already_set();
    }
    if (outcome == kFastcollFailed) CallFailed(failure).raise();
    return {};
  }

  WorkPtr queue(const Terms& terms, const Native& call, const FastcollPlan& plan) {
    ++sequence_;
    auto work = c10::make_intrusive<NativeWork>(rank_, terms.verb.type, terms.verb.title,
                                                terms.inputs, terms.outputs);
    queue_.push({plan, call, limit_s(terms), work});
    return work;
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
    return transfer(terms, std::forward<Args>(args)...);
  }

  template <class... Args>
  WorkPtr transfer(const Terms& terms, Args&&... args) {
    const Event event(terms);
    const py::gil_scoped_acquire gil;
    py::object work = group_.attr(terms.verb.method)(std::forward<Args>(args)...);
    if (work.is_none()) return {};
    return c10::make_intrusive<PythonWork>(rank_, terms.verb.type, terms.verb.title, terms.inputs,
                                           std::move(work));
  }

  py::object group_;
  FastcollGroup* const core_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<Milliseconds> timeout_{kNoTimeout};  // of calls that give none; 0: the group's
  std::atomic<bool> is_coalescing_{false};
  KnownPlans plans_{core_};
  CallQueue queue_{core_};
};

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
           py::arg("communicator"), py::arg("rank"), py::arg("size"));
  module.def("finish", [] {
    const WithoutGil without_gil;
    Threads::drain();
  });
}
