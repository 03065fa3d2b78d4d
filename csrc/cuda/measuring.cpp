// SPDX-License-Identifier: Apache-2.0
#include "cuda/measuring.h"

#include "cuda/device_group.h"
#include "cuda/launch.h"
#include "memory/cuda_driver.h"

namespace py = pybind11;

namespace fastcoll {

namespace {

cudaStream_t to_stream(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

void bind_gauges(py::module_& module) {
  py::enum_<Gauge>(module, "Gauge")
      .value("signal", Gauge::signal)
      .value("ll_pack", Gauge::ll_pack)
      .value("put", Gauge::put)
      .value("get", Gauge::get);
  module.def(
      "gauge_there_and_back",
      [](DeviceGroup& group, Gauge step, int peer, uint32_t rounds, uint64_t token,
         uintptr_t answer, uintptr_t stream, double limit_s) {
        if (step != Gauge::signal && step != Gauge::ll_pack)
          throw Failure(ErrorKind::usage, "packs are copied one way");
        GaugeCall call{};
        call.peer = peer;
        call.rounds = rounds;
        call.token = token;
        call.answer = reinterpret_cast<uint64_t*>(answer);
        call.limit_ns = uint64_t(limit_s * 1e9);
        const py::gil_scoped_release release;
        group.gauge(step, call, nullptr, 1, to_stream(stream));
      },
      py::arg("group"), py::arg("step"), py::arg("peer"), py::arg("rounds"), py::arg("token"),
      py::arg("answer_ptr"), py::arg("stream"), py::arg("limit_s"));
  module.def(
      "gauge_copy",
      [](DeviceGroup& group, Gauge step, int peer, uintptr_t local, uintptr_t symmetric,
         uint64_t num_bytes, int blocks, uintptr_t stream) {
        if (step != Gauge::put && step != Gauge::get)
          throw Failure(ErrorKind::usage, "a word or an LL pack goes there and back");
        GaugeCall call{};
        call.peer = peer;
        call.local = reinterpret_cast<std::byte*>(local);
        call.num_bytes = num_bytes;
        const py::gil_scoped_release release;
        group.gauge(step, call, reinterpret_cast<const std::byte*>(symmetric), blocks,
                    to_stream(stream));
      },
      py::arg("group"), py::arg("step"), py::arg("peer"), py::arg("local_ptr"),
      py::arg("symmetric_ptr"), py::arg("num_bytes"), py::arg("blocks"), py::arg("stream"));
}

}  // namespace

void bind_measuring(py::module_& module) {
  bind_gauges(module);
  module.def(
      "shape_of",
      [](const Plan& plan, int world_size) {
        const LaunchShape shape = shape_of(plan, world_size);
        return py::make_tuple(shape.blocks, shape.threads, shape.tile_bytes);
      },
      py::arg("plan"), py::arg("world_size"));
  // A graph gets its device resources now, not at its first launch.
  module.def(
      "upload_graph",
      [](uintptr_t graph, uintptr_t stream) {
        check_cuda(cudaGraphUpload(reinterpret_cast<cudaGraphExec_t>(graph), to_stream(stream)),
                   "uploading a graph");
      },
      py::arg("graph"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace fastcoll
