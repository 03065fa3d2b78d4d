// SPDX-License-Identifier: Apache-2.0
// fastcoll._C: everything Python can reach. Integers for addresses and descriptors; no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "cpu/copy.h"
#include "cpu/reduce.h"
#include "fastcoll/integrations/gil.h"
#include "group/first_touch.h"
#include "group/process_group.h"
#include "memory/memfd.h"
#include "python/array_bindings.h"
#include "python/call_site.h"
#include "python/core_api.h"
#include "python/errors.h"
#include "python/fast_calls.h"
#include "python/gpu_bindings.h"
#include "python/host.h"
#include "python/jax_calls.h"
#include "python/kept_memory.h"
#include "python/status_dict.h"
#include "python/transfer_work.h"

namespace py = pybind11;
using namespace fastcoll;

namespace {

std::byte* to_ptr(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

template <class Enum>
std::vector<std::string> names(int count, const char* (*name)(Enum)) {
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i) all.emplace_back(name(Enum(i)));
  return all;
}

using PieceList = std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>;  // input, output, numel

// The tensors of a list that have elements, end to end.
List list_of(const Plan& plan, const PieceList& pieces) {
  List list;
  size_t start = 0;
  for (const auto& [input, output, numel] : pieces) {
    if (numel == 0) continue;
    list.push_back({to_ptr(input), to_ptr(output), start, numel});
    start += numel;
  }
  if (start != plan.numel || !takes_lists(plan))
    throw Failure(ErrorKind::usage, std::to_string(start) + " elements of a list do not fit " +
                                        describe(plan) + " by " + describe_choice(plan));
  return list;
}

void bind_plan(py::module_& module) {
  py::class_<Plan>(module, "Plan")
      .def(py::init([](int verb, int dtype, int op, int algorithm, uint64_t numel, int root,
                       uint32_t segment_bytes, bool fast_numerics, bool inline_, uint64_t splits,
                       uint8_t channels) {
             const bool on_gpu = channels != 0;
             if (verb < 0 || verb >= (on_gpu ? kNumGpuVerbs : kNumVerbs) || dtype < 0 ||
                 dtype >= kNumDTypes || op < 0 || op >= kNumOps || algorithm < 0 ||
                 algorithm >= (on_gpu ? kNumGpuAlgorithms : kNumAlgorithms))
               throw Failure(ErrorKind::usage, "Plan: a code out of range");
             Plan plan;
             plan.verb = Verb(verb);
             plan.dtype = DType(dtype);
             plan.op = Op(op);
             plan.algorithm = Algorithm(algorithm);
             plan.numel = numel;
             plan.root = root;
             plan.segment_bytes = segment_bytes;
             plan.fast_numerics = fast_numerics;
             plan.inlined = inline_;
             plan.splits = splits;
             plan.channels = channels;
             if (verb_reduces(plan.verb) && !op_has_meaning(plan.dtype, plan.op))
               throw Failure(
                   ErrorKind::unsupported,
                   std::string(op_name(plan.op)) + " has no meaning for " + dtype_name(plan.dtype));
             return make_plan(plan);
           }),
           py::arg("verb"), py::arg("dtype"), py::arg("op"), py::arg("algorithm"), py::arg("numel"),
           py::arg("root"), py::arg("segment_bytes"), py::arg("fast_numerics"), py::arg("inline"),
           py::arg("splits") = 0, py::arg("channels") = 0)
      .def_property_readonly("verb", [](const Plan& plan) { return int(plan.verb); })
      .def_property_readonly("dtype", [](const Plan& plan) { return int(plan.dtype); })
      .def_property_readonly("op", [](const Plan& plan) { return int(plan.op); })
      .def_property_readonly("algorithm", [](const Plan& plan) { return int(plan.algorithm); })
      .def_readonly("numel", &Plan::numel)
      .def_readonly("root", &Plan::root)
      .def_readonly("segment_bytes", &Plan::segment_bytes)
      .def_readonly("fast_numerics", &Plan::fast_numerics)
      .def_readonly("inline", &Plan::inlined)
      .def_readonly("splits", &Plan::splits)
      .def_readonly("channels", &Plan::channels)
      .def("__repr__",
           [](const Plan& plan) { return describe(plan) + " by " + describe_choice(plan); });
}

using PartList = std::vector<std::pair<uintptr_t, size_t>>;  // address and bytes, by rank

// An empty list: this rank gives or gets nothing.
void put_parts(const ProcessGroup& group, const PartList& list, std::array<Part, kMaxWorld>& into) {
  if (!list.empty() && list.size() != size_t(group.world_size()))
    throw Failure(ErrorKind::usage, std::to_string(list.size()) + " parts in a group of " +
                                        std::to_string(group.world_size()));
  for (size_t rank = 0; rank < list.size(); ++rank)
    into[rank] = {to_ptr(list[rank].first), list[rank].second};
}

void bind_group(py::module_& module) {
  // A function that takes the group's lock must not hold the GIL: the lock's holder may need it.
  const auto without_gil = py::call_guard<GilAway>();
  py::class_<ProcessGroup> bound(module, "Group");
  bind_gpu_side(bound);
  bound
      .def(py::init([](int rank, int world_size, const std::string& name,
                       std::vector<int> region_fds, std::vector<int> socket_fds,
                       std::vector<int> pidfds, double timeout_s, int num_cpus,
                       std::vector<int> pids, bool traces) {
             if (!keep_error_classes()) throw py::error_already_set();
             if (pids.empty()) pids.assign(socket_fds.size(), 0);
             return std::make_unique<ProcessGroup>(rank, world_size, name,
                                                   GroupFds{region_fds, socket_fds, pidfds, pids},
                                                   timeout_s, num_cpus, traces);
           }),
           py::arg("rank"), py::arg("world_size"), py::arg("name"), py::arg("region_fds"),
           py::arg("socket_fds"), py::arg("pidfds"), py::arg("timeout_s"), py::arg("num_cpus"),
           py::arg("pids") = std::vector<int>{}, py::arg("traces") = false)
      .def_property_readonly("rank", &ProcessGroup::rank)
      .def_property_readonly("world_size", &ProcessGroup::world_size)
      .def_property_readonly("name", &ProcessGroup::name)
      .def_property_readonly("traces", &ProcessGroup::traces)
      .def_property_readonly("_pidfds", &ProcessGroup::pidfds)
      .def(
          "run",
          [](ProcessGroup& group, const Plan& plan, uintptr_t input, uintptr_t output,
             double timeout_s) {
            const Plan copy = plan;  // the object may change hands while the GIL is away
            PythonHost host;
            host.blocking();
            group.run(copy, {to_ptr(input), to_ptr(output)}, host, timeout_s);
          },
          py::arg("plan"), py::arg("input_ptr"), py::arg("output_ptr"), py::arg("timeout_s"))
      .def(
          "run_parts",
          [](ProcessGroup& group, const Plan& plan, const PartList& inputs, const PartList& outputs,
             double timeout_s) {
            if (verb_reduces(plan.verb) || plan.verb == Verb::barrier)
              throw Failure(ErrorKind::usage, std::string(verb_name(plan.verb)) + " has no parts");
            const Plan copy = plan;
            Parts parts{};
            put_parts(group, inputs, parts.inputs);
            put_parts(group, outputs, parts.outputs);
            PythonHost host;
            host.blocking();
            group.run(copy, {.parts = &parts}, host, timeout_s);
          },
          py::arg("plan"), py::arg("inputs"), py::arg("outputs"), py::arg("timeout_s"))
      .def(
          "run_list",
          [](ProcessGroup& group, const Plan& plan, const PieceList& pieces, double timeout_s) {
            const Plan copy = plan;
            const List list = list_of(plan, pieces);
            PythonHost host;
            host.blocking();
            group.run(copy, {.list = &list}, host, timeout_s);
          },
          py::arg("plan"), py::arg("pieces"), py::arg("timeout_s"))
      .def(
          "drive_transfers", [](ProcessGroup& group) { group.drive_transfers(release_kept_soon); },
          without_gil)
      .def("refuse_handler", &ProcessGroup::refuse_handler)
      .def("has_open_sends", &ProcessGroup::has_open_sends, without_gil)
      .def("end_unmet_transfers", &ProcessGroup::end_unmet_transfers, without_gil)
      .def("set_limit", &ProcessGroup::set_limit, py::arg("limit_s"))
      .def("_shorten_openmp_waits", &ProcessGroup::shorten_openmp_waits)
      .def(
          "cache_plan",
          [](ProcessGroup& group, const Plan& plan, bool asks_algorithm, std::optional<bool> fast,
             std::pair<uint64_t, uint64_t> numels) {
            group.cache_plan(plan, call_options(plan, asks_algorithm, fast), numels.first,
                             numels.second);
          },
          py::arg("plan"), py::arg("asks_algorithm"), py::arg("fast_numerics"), py::arg("numels"))
      .def(
          "add_program",
          [](ProcessGroup& group, uint64_t hash, std::array<uint32_t, 3> blocks,
             const std::vector<uint32_t>& words) {
            group.add_program(hash, {blocks[0], blocks[1], blocks[2]}, words);
          },
          py::arg("hash"), py::arg("blocks"), py::arg("words"), without_gil)
      .def(
          "try_single_copy",
          [](ProcessGroup& group, bool is_wanted, bool always) {
            PythonHost host;
            host.blocking();
            return group.try_single_copy(is_wanted, always, host);
          },
          py::arg("is_wanted"), py::arg("always"))
      .def("add_arena", &ProcessGroup::add_arena, py::arg("fds"), py::arg("num_bytes"), without_gil)
      .def("arena_ptr",
           [](ProcessGroup& group, int arena_idx) { return uintptr_t(group.arena_ptr(arena_idx)); })
      .def("async_begin", [](ProcessGroup& group) { group.queue().begin_in_python(); })
      .def("async_end", [](ProcessGroup& group) { group.queue().end_in_python(); })
      .def(
          "await_native",
          [](ProcessGroup& group) {
            Host host;
            group.await_queued(host);
          },
          without_gil)
      .def("idle", &ProcessGroup::idle)
      .def("check", &ProcessGroup::check)
      .def("poison", &ProcessGroup::poison, py::arg("message"), without_gil)
      .def("abort", &ProcessGroup::abort, py::arg("reason"), without_gil)
      .def(
          "fail",
          [](ProcessGroup& group, int kind, const std::string& text,
             const std::vector<int>& ranks) {
            if (kind < int(ErrorKind::usage) || kind > int(ErrorKind::driver))
              throw Failure(ErrorKind::usage, "fail(): no such kind of error");
            uint64_t bits = 0;
            for (const int rank : ranks) bits |= uint64_t{1} << (rank & 63);
            group.fail(ErrorKind(kind), text, bits);
          },
          py::arg("kind"), py::arg("text"), py::arg("ranks"), without_gil)
      .def("peer_is_gone", &ProcessGroup::peer_is_gone, py::arg("peer"))
      .def("hold_parts", &ProcessGroup::hold_parts, py::arg("ranks"), without_gil)
      .def("counts", [](ProcessGroup& group) { return counts_of(group.counts()); })
      .def("parts_held", &ProcessGroup::parts_held, without_gil)
      .def("decide_survivors", &ProcessGroup::decide_survivors, py::arg("ranks"), without_gil)
      .def("close", &ProcessGroup::close, without_gil);

  // `meeting` and `source`: see Rewriting. A pair of a pointer and its bytes.
  module.def(
      "time_calls",
      [](ProcessGroup& group, const Plan& plan, uintptr_t input, uintptr_t output,
         std::optional<Plan> meeting, std::pair<uintptr_t, size_t> source, int iterations) {
        const Plan copy = plan;
        PythonHost host;
        host.blocking();
        return group.time_calls(
            copy, {to_ptr(input), to_ptr(output)}, iterations,
            {meeting ? &*meeting : nullptr, to_ptr(source.first), source.second}, host);
      },
      py::arg("group"), py::arg("plan"), py::arg("input_ptr"), py::arg("output_ptr"),
      py::arg("meeting"), py::arg("source"), py::arg("iterations"));
  module.def(
      "time_exchanges",
      [](ProcessGroup& group, int to, int from, int dtype, size_t numel, uintptr_t input,
         uintptr_t output, std::optional<Plan> meeting, std::pair<uintptr_t, size_t> source,
         int iterations) {
        Transfer sent, received;
        sent.peer = to;
        received.peer = from;
        sent.dtype = received.dtype = DType(dtype);
        sent.numel = received.numel = numel;
        sent.data = static_cast<std::byte*>(to_ptr(input));
        received.data = static_cast<std::byte*>(to_ptr(output));
        PythonHost host;
        host.blocking();
        return group.time_exchanges(
            sent, received, iterations,
            {meeting ? &*meeting : nullptr, to_ptr(source.first), source.second}, host);
      },
      py::arg("group"), py::arg("to"), py::arg("from_"), py::arg("dtype"), py::arg("numel"),
      py::arg("input_ptr"), py::arg("output_ptr"), py::arg("meeting"), py::arg("source"),
      py::arg("iterations"));
  module.def(
      "time_one_way_flag",
      [](ProcessGroup& group, int iterations) {
        PythonHost host;
        host.blocking();
        return group.time_one_way_flag(iterations, host);
      },
      py::arg("group"), py::arg("iterations"));
}

void bind_machine(py::module_& module) {
  module.def(
      "read_status",
      [](int fd) {
        // The number of ranks is not known yet; the words to read lie in the region's first part.
        const size_t num_bytes = std::max(memfd_bytes(fd), kRegionBytes);
        const auto close = [num_bytes](const std::byte* region) { memfd_close(region, num_bytes); };
        const std::unique_ptr<const std::byte, decltype(close)> region(memfd_view(fd, num_bytes),
                                                                       close);
        return status_of(*reinterpret_cast<const Pad*>(region.get()));
      },
      py::arg("fd"));
  module.def(
      "list_splits",
      [](const std::vector<std::pair<int, uint64_t>>& tensors, int dtype) {
        std::vector<TensorSize> sizes;
        for (const auto& [kind, numel] : tensors) sizes.push_back({DType(kind), numel});
        return list_splits(sizes, DType(dtype));
      },
      py::arg("tensors"), py::arg("dtype"));
  module.def(
      "uneven_splits", [](const std::vector<uint64_t>& numels) { return uneven_splits(numels); },
      py::arg("numels"));
  module.def("printable", [](const py::bytes& text) { return decoded(text); }, py::arg("text"));
  module.def("find_call_site", [] { return decoded(find_call_site()); });
  module.def(
      "set_call_site", [](const std::string& site) { return decoded(set_call_site(site)); },
      py::arg("site"));
  module.def("hide_folders", &hide_folders, py::arg("folders"));
  module.def("region_bytes", [] { return kRegionBytes; });
  module.def("create_region", &create_region, py::arg("world_size"));
  module.def("memfd_create", &memfd_create_sealed, py::arg("name"), py::arg("num_bytes"));
  module.def("limit_behind", &limit_behind, py::arg("error"));
  module.def("simd_levels", [] {
    std::vector<std::string> levels;
    for (int level = int(best_simd_level()); level >= 0; --level)
      levels.emplace_back(simd_level_name(SimdLevel(level)));
    return levels;
  });
  module.def("simd_level", [] { return simd_level_name(simd_level()); });
  module.def("set_simd_level", [](const std::string& name) {
    for (int level = int(best_simd_level()); level >= 0; --level)
      if (name == simd_level_name(SimdLevel(level))) return set_simd_level(SimdLevel(level));
    throw Failure(ErrorKind::usage, "SIMD level \"" + name + "\" is not one of this machine's");
  });
  module.def("ring_ways", [] {
    return std::string(copy_ways.answers_in_place ? "answers in place" : "own scratch alone") +
           (copy_ways.in_long_rings ? ", long rings" : ", short rings");
  });
  module.attr("K_INLINE_MAX_BYTES") = kInlineMaxBytes;
  module.attr("K_SLOT_BYTES") = kSlotBytes;
  module.attr("K_NUM_SLOTS") = kNumSlots;
  module.attr("K_MAX_WORLD") = kMaxWorld;
  module.attr("K_FAREWELL") = kFarewell;
  module.def("dtype_names", [] {
    return names<DType>(kNumDTypes, [](DType dtype) { return dtype_name(dtype); });
  });
  module.def("op_names", [] { return names<Op>(kNumOps, [](Op op) { return op_name(op); }); });
  module.def("wire_names",
             [] { return names<Wire>(kNumWires, [](Wire wire) { return wire_name(wire); }); });
  module.def("verb_names",
             [] { return names<Verb>(kNumVerbs, [](Verb verb) { return verb_name(verb); }); });
  module.def("algorithm_names", [] {
    return names<Algorithm>(kNumGpuAlgorithms, [](Algorithm name) { return algorithm_name(name); });
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of fastcoll. Use the functions of the package instead.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      set_python_error(failure);
    } catch (const Interrupted&) {  // its Python error is set already
    }
  });
  bind_plan(module);
  bind_gpu_calls(module);
  bind_group(module);
  bind_machine(module);
  bind_array_arithmetic(module);
  const auto group_of = [](PyObject* object) {
    return py::isinstance<ProcessGroup>(object) ? py::cast<ProcessGroup*>(py::handle(object))
                                                : nullptr;
  };
  if (!add_fast_calls(module.ptr(), group_of) || !add_core_api(module.ptr(), group_of) ||
      !add_jax_calls(module.ptr(), group_of))
    throw py::error_already_set();
}
