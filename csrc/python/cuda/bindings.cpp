// SPDX-License-Identifier: Apache-2.0
// fastcoll._cuda: the GPU side, as Python reaches it. Integers for addresses, streams and
// descriptors; no torch. Plans are those of fastcoll._C, which must be imported first.
//
// It is an extension of its own, built only where nvcc is. It needs no driver to load, and its
// failure leaves the CPU side as it is.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/device_group.h"
#include "cuda/launch.h"
#include "cuda/launch_table.h"
#include "cuda/measuring.h"
#include "fastcoll/integrations/gil.h"
#include "memory/cuda_driver.h"
#include "memory/cuda_ipc.h"
#include "memory/cuda_multicast.h"
#include "memory/cuda_vmm.h"
#include "python/errors.h"

namespace py = pybind11;
using namespace fastcoll;

namespace {

std::byte* to_ptr(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
uintptr_t to_int(const std::byte* ptr) { return reinterpret_cast<uintptr_t>(ptr); }
std::vector<std::byte*> to_ptrs(const std::vector<uintptr_t>& addresses) {
  std::vector<std::byte*> ptrs;
  for (const uintptr_t address : addresses) ptrs.push_back(to_ptr(address));
  return ptrs;
}
cudaStream_t to_stream(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// A function that waits for the device, or for other ranks through it, must not hold the GIL. Ranks
// that are threads may need the GIL to make progress.
using WithoutGil = py::call_guard<GilAway>;

void bind_devices(py::module_& module) {
  module.def("device_count", [] {
    std::string reason;
    const int count = device_count(&reason);
    return py::make_tuple(count, reason);
  });
  module.def("driver_version", &driver_version);
  module.def("can_access_peer", &can_access_peer, py::arg("device"), py::arg("peer"));
  module.def("enable_peer_access", &enable_peer_access, py::arg("device"), py::arg("peer"),
             WithoutGil());
  module.def(
      "device_facts",
      [](int device) {
        const DeviceFacts facts = device_facts(device);
        py::dict result;
        result["name"] = facts.name;
        result["uuid"] = facts.uuid;
        result["capability"] = facts.capability;
        result["num_sms"] = facts.num_sms;
        result["has_vmm_fds"] = facts.has_vmm_fds;
        result["has_multicast"] = facts.has_multicast;
        return result;
      },
      py::arg("device"));
  module.def(
      "load_kernels",
      [](int device) {
        const OnDevice on(device);
        return load_kernels(device);
      },
      py::arg("device"), WithoutGil());
}

void bind_memory(py::module_& module) {
  module.def("vmm_granularity", &cuda_vmm_granularity, py::arg("device"), WithoutGil());
  module.def(
      "vmm_reserve",
      [](int device, size_t num_bytes) { return to_int(cuda_vmm_reserve(device, num_bytes)); },
      py::arg("device"), py::arg("num_bytes"), WithoutGil());
  module.def(
      "vmm_unreserve",
      [](int device, uintptr_t ptr, size_t num_bytes) {
        cuda_vmm_unreserve(device, to_ptr(ptr), num_bytes);
      },
      py::arg("device"), py::arg("ptr"), py::arg("num_bytes"), WithoutGil());
  module.def(
      "vmm_create",
      [](int device, size_t num_bytes, uintptr_t at) {
        const CudaVmmMemory memory = cuda_vmm_create(device, num_bytes, to_ptr(at));
        return std::pair(to_int(memory.ptr), memory.fd);
      },
      py::arg("device"), py::arg("num_bytes"), py::arg("at") = 0, WithoutGil());
  module.def(
      "vmm_open",
      [](int device, int fd, size_t num_bytes, uintptr_t at) {
        return to_int(cuda_vmm_open(device, fd, num_bytes, to_ptr(at)));
      },
      py::arg("device"), py::arg("fd"), py::arg("num_bytes"), py::arg("at") = 0, WithoutGil());
  module.def(
      "vmm_close",
      [](int device, uintptr_t ptr, size_t num_bytes, bool is_placed) {
        cuda_vmm_close(device, to_ptr(ptr), num_bytes, is_placed);
      },
      py::arg("device"), py::arg("ptr"), py::arg("num_bytes"), py::arg("is_placed") = false,
      WithoutGil());
  module.def(
      "ipc_create",
      [](int device, size_t num_bytes) {
        CudaIpcMemory memory;
        {
          const GilAway release;
          memory = cuda_ipc_create(device, num_bytes);
        }
        return py::make_tuple(to_int(memory.ptr), py::bytes(memory.handle));
      },
      py::arg("device"), py::arg("num_bytes"));
  module.def(
      "ipc_open",
      [](int device, const std::string& handle) { return to_int(cuda_ipc_open(device, handle)); },
      py::arg("device"), py::arg("handle"), WithoutGil());
  module.def(
      "ipc_close", [](int device, uintptr_t ptr) { cuda_ipc_close(device, to_ptr(ptr)); },
      py::arg("device"), py::arg("ptr"), WithoutGil());
  module.def(
      "ipc_destroy", [](int device, uintptr_t ptr) { cuda_ipc_destroy(device, to_ptr(ptr)); },
      py::arg("device"), py::arg("ptr"), WithoutGil());
}

void bind_multicast(py::module_& module) {
  module.def("multicast_granularity", &cuda_multicast_granularity, py::arg("world_size"),
             py::arg("least_bytes"), WithoutGil());
  py::class_<CudaMulticast>(module, "Multicast")
      .def(py::init<int, int, size_t, int>(), py::arg("device"), py::arg("world_size"),
           py::arg("num_bytes"), py::arg("fd") = -1, WithoutGil())
      .def("export_fd", &CudaMulticast::export_fd, WithoutGil())
      .def("add_device", &CudaMulticast::add_device, WithoutGil())
      .def(
          "bind",
          [](CudaMulticast& multicast, uintptr_t region) { multicast.bind(to_ptr(region)); },
          py::arg("region"), WithoutGil())
      .def(
          "map",
          [](CudaMulticast& multicast, uintptr_t at) { return to_int(multicast.map(to_ptr(at))); },
          py::arg("at") = 0, WithoutGil())
      .def("close", &CudaMulticast::close, WithoutGil());
}

Regions to_regions(const std::vector<uintptr_t>& ptrs) {
  if (ptrs.size() > kMaxGpuWorld)
    throw Failure(ErrorKind::usage, "a group on GPUs has at most " + std::to_string(kMaxGpuWorld) +
                                        " ranks, not " + std::to_string(ptrs.size()));
  Regions regions{};
  for (size_t i = 0; i < ptrs.size(); ++i) regions[i] = to_ptr(ptrs[i]);
  return regions;
}

// sends, ptr, numel, dtype, peer, tag
using PairRow = std::tuple<bool, uintptr_t, uint64_t, int, int, uint32_t>;

std::vector<PairTransfer> to_transfers(const std::vector<PairRow>& rows) {
  std::vector<PairTransfer> transfers;
  for (const auto& [sends, ptr, numel, dtype, peer, tag] : rows)
    transfers.push_back({sends, to_ptr(ptr), numel, DType(dtype), peer, tag, 0});
  return transfers;
}

void bind_partials(py::module_& module) {
  module.def(
      "add_partials",
      [](int device, int dtype, int op, bool widened, const std::vector<uintptr_t>& rows,
         uintptr_t output, uint64_t numel, int divisor, uintptr_t stream) {
        if (dtype < 0 || dtype >= kNumDTypes || op < 0 || op >= kNumOps || rows.empty() ||
            rows.size() > kMaxPartials || !op_has_meaning(DType(dtype), Op(op)))
          throw Failure(ErrorKind::usage, "no such sum of the nodes");
        PartialsCall call{};
        for (size_t i = 0; i < rows.size(); ++i) call.rows[i] = to_ptr(rows[i]);
        call.output = to_ptr(output);
        call.numel = numel;
        call.num_rows = int32_t(rows.size());
        call.divisor = divisor;
        call.op = Op(op);
        call.widened = widened;
        const GilAway release;  // a full queue blocks
        const OnDevice on(device);
        launch_partials(DType(dtype), call, to_stream(stream));
      },
      py::arg("device"), py::arg("dtype"), py::arg("op"), py::arg("widened"), py::arg("rows"),
      py::arg("output"), py::arg("numel"), py::arg("divisor"), py::arg("stream"));
  // This thread may query events of a device while another one captures a graph.
  module.def(
      "ignore_captures",
      [](int device) {
        const OnDevice on(device);
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "telling that a thread only asks");
      },
      py::arg("device"));
  module.attr("K_MAX_PARTIALS") = kMaxPartials;
}

// blocks, threads, tile bytes
using ShapeRow = std::tuple<int, int, uint32_t>;

std::optional<LaunchShape> to_shape(const std::optional<ShapeRow>& row) {
  if (!row) return std::nullopt;
  const auto [blocks, threads, tile_bytes] = *row;
  return LaunchShape{blocks, threads, tile_bytes};
}

void bind_group(py::module_& module) {
  py::enum_<Probe>(module, "Probe")
      .value("put", Probe::put)
      .value("get", Probe::get)
      .value("operands", Probe::operands)
      .value("reduce", Probe::reduce)
      .value("stored", Probe::stored);
  py::class_<DeviceGroup>(module, "Group", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](int device, int rank, const std::vector<uintptr_t>& regions,
                       int num_channels, bool shares, bool starts_early) {
             if (!keep_error_classes()) throw py::error_already_set();
             const DeviceGroupOptions options{
                 device,       rank,   int(regions.size()), to_regions(regions),
                 num_channels, shares, starts_early};
             const GilAway release;  // not of the registration that follows
             return std::make_unique<DeviceGroup>(options);
           }),
           py::arg("device"), py::arg("rank"), py::arg("regions"), py::arg("num_channels"),
           py::arg("shares") = false, py::kw_only(), py::arg("starts_early") = true)
      .def(
          "probe",
          [](DeviceGroup& group, Probe step, uint64_t token) {
            const auto seen = group.probe(step, token);
            return std::vector<uint32_t>(seen.begin(), seen.end());
          },
          py::arg("step"), py::arg("token"), WithoutGil())
      .def(
          "use_multicast",
          [](DeviceGroup& group, uintptr_t ptr) { group.use_multicast(to_ptr(ptr)); },
          py::arg("ptr"))
      .def(
          "use_heap",
          [](DeviceGroup& group, const std::vector<uintptr_t>& ptrs, uint64_t num_bytes,
             uintptr_t multicast) {
            const Regions heaps = to_regions(ptrs);
            const GilAway release;  // a launch may hold the lock
            group.use_heap(heaps, num_bytes, to_ptr(multicast));
          },
          py::arg("ptrs"), py::arg("num_bytes"), py::arg("multicast"))
      .def(
          "launch",
          [](DeviceGroup& group, const Plan& plan, uintptr_t input, uintptr_t output,
             uintptr_t stream, double limit_s, const std::vector<uint64_t>& counts,
             const std::optional<ShapeRow>& shape, const std::vector<uintptr_t>& input_parts,
             const std::vector<uintptr_t>& output_parts) {
            const Plan copy = plan;  // the object may change hands while the GIL is away
            const std::vector<std::byte*> inputs = to_ptrs(input_parts),
                                          taken = to_ptrs(output_parts);
            const std::vector<const std::byte*> given(inputs.begin(), inputs.end());
            const DeviceOperands operands{to_ptr(input), to_ptr(output), counts, given, taken};
            const LaunchOptions options{limit_s, to_shape(shape)};
            const GilAway release;  // a full queue blocks
            group.launch(copy, operands, to_stream(stream), options);
          },
          py::arg("plan"), py::arg("input_ptr"), py::arg("output_ptr"), py::arg("stream"),
          py::arg("limit_s"), py::arg("counts") = std::vector<uint64_t>{},
          py::arg("shape") = py::none(), py::arg("input_parts") = std::vector<uintptr_t>{},
          py::arg("output_parts") = std::vector<uintptr_t>{})
      .def(
          "transfer",
          [](DeviceGroup& group, const std::vector<PairRow>& rows, int most_channels,
             uintptr_t stream, double limit_s) {
            const std::vector<PairTransfer> transfers = to_transfers(rows);
            const GilAway release;
            group.transfer(transfers, most_channels, to_stream(stream), limit_s);
          },
          py::arg("transfers"), py::arg("most_channels"), py::arg("stream"), py::arg("limit_s"))
      .def(
          "copy",
          [](const DeviceGroup& group,
             const std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>& rows, uintptr_t stream) {
            std::vector<DeviceCopy> copies;
            for (const auto& [target, source, num_bytes] : rows)
              copies.push_back({to_ptr(target), to_ptr(source), num_bytes});
            const GilAway release;
            group.copy(copies, to_stream(stream));
          },
          py::arg("copies"), py::arg("stream"))
      .def("side",
           [](const py::object& self) {
             DeviceSide* side = self.cast<DeviceGroup*>();
             const auto release = [](PyObject* capsule) {
               Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule)));
             };
             py::object capsule =
                 py::reinterpret_steal<py::object>(PyCapsule_New(side, kDeviceSideName, release));
             if (!capsule) throw py::error_already_set();
             PyCapsule_SetContext(capsule.ptr(), self.inc_ref().ptr());
             return capsule;
           })
      .def("report_after", &DeviceGroup::report_after, py::arg("report_s"))
      .def("late", [](const DeviceGroup& group) { return group.late(); })
      .def("busy", &DeviceGroup::busy, WithoutGil())
      .def("give_up", &DeviceGroup::give_up, py::arg("peer"))
      .def("verdict",
           [](const DeviceGroup& group) -> py::object {
             const std::optional<DeviceVerdict> found = group.verdict();
             if (!found) return py::none();
             return py::make_tuple(found->kind, found->raiser, found->rank, found->channel,
                                   found->epoch, found->expected_stamp, found->seen_stamp,
                                   found->phase);
           })
      .def("close", &DeviceGroup::close, WithoutGil());
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "The GPU side of fastcoll. Use the functions of the package instead.";
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      set_python_error(failure);
    }
  });
  bind_devices(module);
  bind_memory(module);
  bind_multicast(module);
  bind_partials(module);
  bind_group(module);
  bind_measuring(module);
  module.def(
      "region_bytes",
      [](int num_channels, int world_size) {
        return GpuLayout::of(num_channels, world_size).num_bytes();
      },
      py::arg("num_channels"), py::arg("world_size"));
  module.def("layout", [] {
    return std::to_string(kGpuLayoutMagic) + "/" +
           std::to_string(GpuLayout::of(kMaxChannels, kMaxGpuWorld).num_bytes());
  });
  module.def(
      "has_kernel",
      [](int algorithm, int verb, int dtype, bool ll) {
        return has_kernel(Algorithm(algorithm), Verb(verb), DType(dtype), ll);
      },
      py::arg("algorithm"), py::arg("verb"), py::arg("dtype"), py::arg("ll"));
  module.def("max_ll_bytes", &max_ll_bytes, py::arg("max_blocks"));
  module.attr("K_MAX_WORLD") = kMaxGpuWorld;
  module.attr("K_MAX_CHANNELS") = kMaxChannels;
  module.attr("K_PAIR_CHANNELS") = kPairChannels;
  module.attr("K_PROBE_OK") = kProbePushed | kProbePulled;
}
