// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/call.h"
#include "group/gpu_batches.h"
#include "group/gpu_calls.h"
#include "group/gpu_journal.h"
#include "python/status_dict.h"

namespace py = pybind11;

namespace fastcoll {

namespace {

// number -> (text, site)
py::dict to_dict(const std::vector<GpuJournal::Text>& texts) {
  py::dict found;
  for (const GpuJournal::Text& one : texts)
    found[py::int_(one.number)] = py::make_tuple(decoded(one.call), decoded(one.site));
  return found;
}

void bind_journal(py::module_& module) {
  py::class_<GpuJournal, std::shared_ptr<GpuJournal>>(module, "GpuJournal")
      .def(py::init<int, const std::vector<int>&>(), py::arg("rank"), py::arg("fds"))
      .def_static("create", &GpuJournal::create, py::arg("world_size"))
      .def(
          "write",
          [](GpuJournal& journal, const Plan& plan, const std::string& site) {
            journal.write(plan, site);
          },
          py::arg("plan"), py::arg("site") = "")
      .def(
          "write_message",
          [](GpuJournal& journal, bool sends, uint64_t numel, int dtype, int peer, uint32_t tag,
             const std::string& site) {
            journal.write_message(sends, peer, DType(dtype), numel, tag, site);
          },
          py::arg("sends"), py::arg("numel"), py::arg("dtype"), py::arg("peer"), py::arg("tag"),
          py::arg("site") = "")
      .def("finish", &GpuJournal::finish)
      .def("started", [](const GpuJournal& journal) { return decoded(journal.started()); })
      .def("note_started", &GpuJournal::note_started, py::arg("text"))
      .def(
          "calls", [](const GpuJournal& journal, int rank) { return to_dict(journal.calls(rank)); },
          py::arg("rank"))
      .def(
          "messages",
          [](const GpuJournal& journal, int rank, bool sends, int peer) {
            return to_dict(journal.messages(rank, sends, peer));
          },
          py::arg("rank"), py::arg("sends"), py::arg("peer"))
      .def("has_finished", &GpuJournal::has_finished, py::arg("rank"))
      .def("num_calls", &GpuJournal::num_calls)
      .def("num_messages", &GpuJournal::num_messages, py::arg("sends"), py::arg("peer"))
      .def("close", &GpuJournal::close);
}

SideStream to_side_stream(const py::object& object) {
  const auto release = [](void* owner) {
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(owner));
  };
  const auto stream = object.attr("cuda_stream").cast<uintptr_t>();
  void* const owner = py::object(object).release().ptr();
  return {reinterpret_cast<void*>(stream), std::shared_ptr<void>(owner, release)};
}

}  // namespace

void bind_gpu_calls(py::module_& module) {
  bind_journal(module);
  module.def(
      "takes_parts_apart", [](int algorithm) { return takes_parts_apart(Algorithm(algorithm)); },
      py::arg("algorithm"));
  module.def(
      "transfer_kernels",
      [](const std::vector<std::pair<bool, int>>& transfers, int rank, int world_size, int channels,
         int blocks) {
        std::vector<TransferPair> pairs;
        for (const auto& [sends, peer] : transfers) pairs.push_back({sends, peer});
        return transfer_kernels(pairs, rank, world_size, channels, blocks);
      },
      py::arg("pairs"), py::arg("rank"), py::arg("world_size"), py::arg("channels"),
      py::arg("blocks"));
  py::class_<GpuCalls, std::shared_ptr<GpuCalls>>(module, "GpuCalls")
      .def(py::init([](const py::object& side, int device, std::shared_ptr<GpuJournal> journal,
                       double limit_s, const py::object& beside, int num_channels) {
             void* pointer = PyCapsule_GetPointer(side.ptr(), kDeviceSideName);
             if (!pointer) throw py::error_already_set();
             return std::make_shared<GpuCalls>(*static_cast<DeviceSide*>(pointer), device,
                                               std::move(journal), limit_s, to_side_stream(beside),
                                               num_channels);
           }),
           py::arg("side"), py::arg("device"), py::arg("journal"), py::arg("limit_s"),
           py::arg("beside"), py::arg("num_channels"), py::keep_alive<1, 2>())
      .def("pause", &GpuCalls::pause, py::arg("pauses"))
      .def("is_paused", &GpuCalls::is_paused)
      .def("use_symmetric", &GpuCalls::use_symmetric, py::arg("begin"), py::arg("end"))
      .def("note_use", &GpuCalls::note_use, py::arg("ptr"), py::arg("stream"));
}

void bind_gpu_side(py::class_<ProcessGroup>& group) {
  group.def("use_gpu", &ProcessGroup::use_gpu, py::arg("calls"), py::keep_alive<1, 2>())
      .def(
          "cache_gpu_plan",
          [](ProcessGroup& self, const Plan& plan, bool asks_algorithm, std::optional<bool> fast) {
            if (GpuCalls* calls = self.gpu_calls())
              calls->add_plan(plan, call_options(plan, asks_algorithm, fast));
          },
          py::arg("plan"), py::arg("asks_algorithm"), py::arg("fast_numerics"));
}

}  // namespace fastcoll
