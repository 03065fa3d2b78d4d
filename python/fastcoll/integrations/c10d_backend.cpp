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
#include <unistd.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>

#include "c10d_work.h"
#include "core_api.h"

namespace {

std::optional<FastcollDType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kFastcollFloat32;
    case at::kDouble:
      return kFastcollFloat64;
    case at::kHalf:
      return kFastcollFloat16;
    case at::kBFloat16:
      return kFastcollBfloat16;
    case at::kChar:
      return kFastcollInt8;
    case at::kByte:
      return kFastcollUint8;
    case at::kInt:
      return kFastcollInt32;
    case at::kLong:
      return kFastcollInt64;
    case at::kBool:
      return kFastcollBool;
    default:
      return std::nullopt;
  }
}

// Calls of one kind have one plan.
struct Kind {
  FastcollVerb verb;
  FastcollDType dtype;
  int op;
  int root;
  uint64_t numel;
  bool operator==(const Kind&) const = default;
};

struct HashOfKind {
  size_t operator()(const Kind& kind) const {
    return kind.numel * 0x9e3779b97f4a7c15ULL ^
           size_t(kind.verb | kind.dtype << 8 | kind.op << 16 | kind.root << 24);
  }
};

// A call that may run here.
struct Native {
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;
};

// What all calls have in common.
struct Terms {
  const char* title;   // of the profiler's event
  const char* method;  // of the Python group
  c10d::OpType type;
  bool is_async;
  Milliseconds timeout;
  Tensors inputs;
  Tensors outputs;
};

// The profiler's event of a synchronous call; an asynchronous one's belongs to its Work.
class Event {
 public:
  explicit Event(const Terms& terms) : event_(at::RecordScope::USER_SCOPE) {
    if (terms.is_async || !event_.isActive()) return;
    const std::vector<c10::IValue> inputs(terms.inputs.begin(), terms.inputs.end());
    event_.before(terms.title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
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
    stop();
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
    stop();
    python("shutdown");
  }
  void abort() override {
    python("abort");
    stop();
  }

  // ---- verbs that may run here ----

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    std::optional<Native> native;
    if (tensors.size() == 1)
      native = reduction(kFastcollAllReduce, opts.reduceOp, tensors[0], tensors[0]);
    return run({"fastcoll:all_reduce", "allreduce", c10d::OpType::ALLREDUCE, opts.asyncOp,
                opts.timeout, tensors, tensors},
               native, tensors, opts);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    std::optional<Native> native;
    if (tensors.size() == 1 && is_plain(tensors[0]) && opts.rootRank >= 0 && opts.rootRank < size_)
      native = of(kFastcollBroadcast, 0, int(opts.rootRank), tensors[0], tensors[0], tensors[0]);
    return run({"fastcoll:broadcast", "broadcast", c10d::OpType::BROADCAST, opts.asyncOp,
                opts.timeout, tensors, tensors},
               native, tensors, opts);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return run({"fastcoll:_all_gather_base",
                "all_gather_single",
                c10d::OpType::_ALLGATHER_BASE,
                opts.asyncOp,
                opts.timeout,
                {input},
                {output}},
               gather(output, input), output, input, opts);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    std::optional<Native> native;
    if (inputs.size() == 1 && outputs.size() == 1) native = gather(outputs[0], inputs[0]);
    return run({"fastcoll:all_gather_into_tensor_coalesced", "all_gather_single_coalesced",
                c10d::OpType::COALESCED, opts.asyncOp, opts.timeout, inputs, outputs},
               native, outputs, inputs, opts);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return run({"fastcoll:_reduce_scatter_base",
                "reduce_scatter_single",
                c10d::OpType::_REDUCE_SCATTER_BASE,
                opts.asyncOp,
                opts.timeout,
                {input},
                {output}},
               reduction(kFastcollReduceScatter, opts.reduceOp, input, output), output, input,
               opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    std::optional<Native> native;
    if (inputs.size() == 1 && outputs.size() == 1)
      native = reduction(kFastcollReduceScatter, opts.reduceOp, inputs[0], outputs[0]);
    return run({"fastcoll:reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
                c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, opts.asyncOp, opts.timeout, inputs,
                outputs},
               native, outputs, inputs, opts);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return run(
        {"fastcoll:barrier", "barrier", c10d::OpType::BARRIER, opts.asyncOp, opts.timeout, {}, {}},
        Native{{kFastcollBarrier, kFastcollUint8, 0, 0, 0}}, opts);
  }

  // ---- verbs of Python ----

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return in_python(
        {"fastcoll:all_reduce", "allreduce_coalesced", c10d::OpType::ALLREDUCE_COALESCED,
         opts.asyncOp, opts.timeout, tensors, tensors},
        tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return in_python({"fastcoll:reduce", "reduce", c10d::OpType::REDUCE, opts.asyncOp, opts.timeout,
                      tensors, tensors},
                     tensors, opts);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return in_python({"fastcoll:all_gather",
                      "allgather",
                      c10d::OpType::ALLGATHER,
                      opts.asyncOp,
                      opts.timeout,
                      inputs,
                      {}},
                     outputs, inputs, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return in_python({"fastcoll:all_gather",
                      "allgather_coalesced",
                      c10d::OpType::ALLGATHER_COALESCED,
                      opts.asyncOp,
                      opts.timeout,
                      inputs,
                      {}},
                     outputs, inputs, opts);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return in_python(
        {"fastcoll:gather", "gather", c10d::OpType::GATHER, opts.asyncOp, opts.timeout, inputs, {}},
        outputs, inputs, opts);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return in_python({"fastcoll:scatter", "scatter", c10d::OpType::SCATTER, opts.asyncOp,
                      opts.timeout, inputs.empty() ? outputs : inputs[0], outputs},
                     outputs, inputs, opts);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return in_python({"fastcoll:reduce_scatter", "reduce_scatter", c10d::OpType::REDUCE_SCATTER,
                      opts.asyncOp, opts.timeout, outputs, outputs},
                     outputs, inputs, opts);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    return in_python({"fastcoll:all_to_all",
                      "all_to_all_single",
                      c10d::OpType::ALLTOALL_BASE,
                      opts.asyncOp,
                      opts.timeout,
                      {input},
                      {output}},
                     output, input, output_sizes, input_sizes, opts);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return in_python({"fastcoll:all_to_all", "alltoall", c10d::OpType::ALLTOALL, opts.asyncOp,
                      opts.timeout, inputs, outputs},
                     outputs, inputs, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const bool has_limit = opts.timeout >= kNoTimeout;
    python("monitored_barrier", has_limit ? std::optional(opts.timeout) : std::nullopt,
           wait_all_ranks);
  }
  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return transfer({"fastcoll:send", "send", c10d::OpType::SEND, true, {}, tensors, {}}, tensors,
                    dst, tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return transfer({"fastcoll:recv", "recv", c10d::OpType::RECV, true, {}, tensors, {}}, tensors,
                    src, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return transfer(
        {"fastcoll:recv", "recv_anysource", c10d::OpType::RECVANYSOURCE, true, {}, tensors, {}},
        tensors, tag);
  }
  void startCoalescing() override {
    is_coalescing_ = true;
    python("_start_coalescing", at::Device(at::kCPU));
  }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    return transfer(
        {"fastcoll:coalesced", "_end_coalescing", c10d::OpType::COALESCED, true, {}, {}, {}},
        at::Device(at::kCPU));
  }

 private:
  struct Task {
    FastcollPlan plan;
    Native call;
    double limit_s;
    c10::intrusive_ptr<NativeWork> work;
  };

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

  std::optional<FastcollPlan> known(const Kind& kind) {
    const std::lock_guard lock(plans_mutex_);
    const auto found = plans_.find(kind);
    return found == plans_.end() ? std::nullopt : std::optional(found->second);
  }

  void learn(const Kind& kind) {         // with the GIL
    constexpr size_t kMostPlans = 4096;  // a program of ever new shapes must not grow without end
    FastcollPlan plan;
    if (!core->find_plan(core_, kind.verb, kind.dtype, kind.op, kind.numel, kind.root, &plan))
      return;
    const std::lock_guard lock(plans_mutex_);
    if (plans_.size() >= kMostPlans) plans_.clear();
    plans_[kind] = plan;
  }

  // ---- running them ----

  template <class... Args>
  WorkPtr run(const Terms& terms, const std::optional<Native>& native, Args&&... args) {
    const std::optional<FastcollPlan> plan =
        native && !is_coalescing_ ? known(native->kind) : std::nullopt;
    if (plan && !terms.is_async && core->idle(core_)) return run_now(terms, *native, *plan);
    if (plan && terms.is_async && core->begin_async(core_)) return queue(terms, *native, *plan);
    WorkPtr work = in_python(terms, std::forward<Args>(args)...);
    if (native && !plan) {
      const py::gil_scoped_acquire gil;
      learn(native->kind);
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
    auto work = c10::make_intrusive<NativeWork>(rank_, terms.type, terms.title, terms.inputs,
                                                terms.outputs);
    {
      const std::lock_guard lock(tasks_mutex_);
      tasks_.push_back({plan, call, limit_s(terms), work});
      if (!worker_.joinable()) {
        is_stopping_ = false;
        owner_ = getpid();
        worker_ = std::thread([this] { work_off(); });
      }
    }
    tasks_changed_.notify_one();
    return work;
  }

  void work_off() {
    for (;;) {
      Task task;
      {
        std::unique_lock lock(tasks_mutex_);
        tasks_changed_.wait(lock, [this] { return !tasks_.empty() || is_stopping_; });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      FastcollFailure failure;
      const auto outcome =
          core->run(core_, &task.plan, task.call.input, task.call.output, task.limit_s, &failure);
      core->end_async(core_);  // who waited for it finds the group idle
      task.work->complete(outcome == kFastcollDone ? nullptr : &failure);
    }
  }

  // Complete what was queued, and end the thread. A forked child has not got it.
  void stop() {
    if (!worker_.joinable()) return;
    if (owner_ != getpid()) return worker_.detach();
    {
      const std::lock_guard lock(tasks_mutex_);
      is_stopping_ = true;
    }
    tasks_changed_.notify_one();
    const WithoutGil without_gil;
    worker_.join();
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
    py::object work = group_.attr(terms.method)(std::forward<Args>(args)...);
    if (work.is_none()) return {};
    return c10::make_intrusive<PythonWork>(rank_, terms.type, terms.title, terms.inputs,
                                           std::move(work));
  }

  py::object group_;
  FastcollGroup* const core_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<Milliseconds> timeout_{kNoTimeout};  // of calls that give none; 0: the group's
  std::atomic<bool> is_coalescing_{false};
  std::mutex plans_mutex_;
  std::unordered_map<Kind, FastcollPlan, HashOfKind> plans_;
  std::mutex tasks_mutex_;
  std::condition_variable tasks_changed_;
  std::deque<Task> tasks_;
  std::thread worker_;
  bool is_stopping_ = false;
  pid_t owner_ = 0;
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
}
