// SPDX-License-Identifier: Apache-2.0
// The backend "fastcoll" as a c10d::Backend. As such torch can register it for some devices of a
// group and wrap it under TORCH_DISTRIBUTED_DEBUG=DETAIL. It can be called from C++ without the GIL
// (DDP's reducer, functional collectives). Compiled at first use against the installed torch
// (c10d_build.py); one source for 2.11 and later.
//
// Decides which calls run here and which in Python. Calls on contiguous CPU tensors run here if
// their plan is known. Sends and receives need no plan. All others go to the process group of
// torch_group.py. It plans, checks and explains them. The protocol is that of fastcoll._C, reached
// through core_api.h.
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d_calls.h"
#include "c10d_direct.h"
#include "c10d_negated.h"
#include "c10d_runner.h"
#include "c10d_threads.h"
#include "c10d_verbs.h"
#include "c10d_work.h"
#include "core_api.h"
#include "gil.h"

namespace {

class FastcollBackend final : public Runner {
 public:
  using Runner::Runner;

  const std::string getBackendName() const override { return "fastcoll"; }
  bool supportsCoalescing() const override { return coalesces_; }
  void setSequenceNumberForGroup() override {}  // a communicator counts its calls itself
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void enableCollectivesTiming() override {}  // Gloo's programs may ask; it measures none, too

  void setTimeout(Milliseconds timeout) override { python("set_timeout", timeout); }
  void shutdown() override { python("shutdown"); }
  void abort() override { python("abort"); }

  // Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper has the method whatever it wraps. Programs
  // that look for it then call it (torchrec).
  c10d::ErrorType getError() override {
    const fastcoll::GilHeld gil;
    return group_.attr("get_error")().cast<c10d::ErrorType>();
  }

  py::object shrink_in_python(const py::args& args) { return group_.attr("shrink")(*args); }
  py::object communicator() const { return group_.attr("communicator"); }
  py::object options() const { return group_.attr("options"); }

  // ---- parts of the group, for torch's split_group ----

  c10::intrusive_ptr<Options> getBackendOptions() override {
    const fastcoll::GilHeld gil;
    const auto limit_s = group_.attr("communicator").attr("timeout_s").cast<double>();
    return c10::make_intrusive<Options>(getBackendName(), Milliseconds(int64_t(limit_s * 1e3)));
  }

  // Null on the ranks that are not in it.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override {
    const fastcoll::GilHeld gil;
    const py::object part =
        group_.attr("split")(store, ranks, opts->group_name, seconds(opts->timeout));
    if (part.is_none()) return {};
    return part.cast<c10::intrusive_ptr<c10d::Backend>>();
  }

  // ---- DDP's buckets ----

  // On CPUs, whose devices have no index.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }

  // A symmetric tensor: the ranks reduce it where it lies. Collective, as making buckets is.
  // Hooks and users may resize it, as any gradient. Then its data moves to ordinary memory, and the
  // heap gets its block back.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
    // DDP asks for complex numbers, and then views the memory as pairs of real ones.
    if (c10::isComplexType(dtype)) {
      dtype = c10::toRealValueType(dtype);
      size *= 2;
    }
    if (!dtype_of(dtype)) return at::empty({size}, options.dtype(dtype));
    const fastcoll::GilHeld gil;
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
    return run({kAllreduce, opts, tensors, tensors}, native, tensors, opts);
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
    return run({kAllGatherSingle, opts, {input}, {output}}, gathering(output, input), output, input,
               opts);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    std::optional<Native> native;
    if (inputs.size() == 1 && outputs.size() == 1) native = gathering(outputs[0], inputs[0]);
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
    return run({kAlltoall, opts, inputs, outputs},
               in_parts(kFastcollAllToAll, 0, 0, outputs, inputs), outputs, inputs, opts);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    const Terms terms{kAllgather, opts, inputs, one_list(outputs)};
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
    if (may_transfer(tensors, tag)) return transfer(kRecvAnysource, tensors, kFastcollAnyPeer, tag);
    return forward({kRecvAnysource, tensors, {}}, tensors, tag);
  }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    return c10::make_intrusive<BatchWork>(rank_, kEndCoalescing.type, title_of(kEndCoalescing),
                                          end_batch());
  }

  // ---- verbs of Python ----

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return in_python({kAllreduceCoalesced, opts, tensors, tensors}, tensors, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return in_python({kAllgatherCoalesced, opts, inputs, {}}, outputs, inputs, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const bool has_limit = opts.timeout != c10d::kUnsetTimeout;  // Python refuses a negative one
    python("monitored_barrier", has_limit ? std::optional(opts.timeout) : std::nullopt,
           wait_all_ranks);
  }
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
      .def("_set_default_timeout", &FastcollBackend::setTimeout, py::arg("timeout"))
      // Not the base's virtual functions, which torch 2.11 declares otherwise.
      .def_property_readonly("supports_shrinking", [](const FastcollBackend&) { return true; })
      .def("shrink", &FastcollBackend::shrink_in_python)
      .def("get_error", &FastcollBackend::getError)
      .def_property_readonly("options", &FastcollBackend::options)
      .def_property_readonly("communicator", &FastcollBackend::communicator);
  add_handle<NativeWork>(module, "NativeWork");
  add_handle<PythonWork>(module, "PythonWork");
  add_handle<TransferWork>(module, "TransferWork");
  add_handle<BatchWork>(module, "BatchWork");
  take_negated();
  module.def("serve_operators", &serve_operators, py::arg("operators"), py::arg("functions"),
             py::arg("gradients"), py::arg("named"));
  module.def("finish", [] {
    const WithoutGil without_gil;
    core->drain_threads();
  });
}
