// SPDX-License-Identifier: Apache-2.0
#include "bind_lists.h"

#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "fast_calls.h"
#include "fast_prepare.h"
#include "python_host.h"

namespace fastcoll {

namespace py = pybind11;

namespace {

using PieceList = std::vector<std::tuple<uintptr_t, uintptr_t, size_t>>;  // input, output, numel

// The tensors of a list that have elements, end to end.
List list_of(const Plan& plan, const PieceList& pieces) {
  List list;
  size_t start = 0;
  for (const auto& [input, output, numel] : pieces) {
    if (numel == 0) continue;
    list.push_back(
        {reinterpret_cast<std::byte*>(input), reinterpret_cast<std::byte*>(output), start, numel});
    start += numel;
  }
  if (start != plan.numel || !takes_lists(plan))
    throw Failure(ErrorKind::usage, std::to_string(start) + " elements of a list do not fit " +
                                        describe(plan) + " by " + describe_choice(plan));
  return list;
}

// A call on lists that was looked at and may be made later.
struct ListRun {
  std::vector<PreparedList> lists;
  py::tuple outputs, inputs;  // kept alive, whatever becomes of the user's lists
};

}  // namespace

void bind_lists(py::module_& module, py::class_<ProcessGroup>& group) {
  py::class_<ListRun>(module, "ListRun")
      .def(
          "run",
          [](const ListRun& run, ProcessGroup& group, double timeout_s) {
            PythonHost host;
            run_lists(group, run.lists, host, timeout_s);
          },
          py::arg("group"), py::arg("timeout_s"));
  group
      .def(
          "run_list",
          [](ProcessGroup& group, const Plan& plan, const PieceList& pieces, double timeout_s) {
            const Plan copy = plan;
            const List list = list_of(plan, pieces);
            PythonHost host;
            host.blocking();
            group.run(copy, list, host, timeout_s);
          },
          py::arg("plan"), py::arg("pieces"), py::arg("timeout_s"))
      .def(
          "prepare_lists",
          [](ProcessGroup& group, int verb, const py::object& outputs, const py::object& inputs,
             const py::object& op) -> std::optional<ListRun> {
            const std::optional<Op> known = op_of(op.ptr());
            const auto is_list = [](const py::object& object) {
              return PyList_CheckExact(object.ptr()) || PyTuple_CheckExact(object.ptr());
            };
            if (!known || !is_list(outputs) || !is_list(inputs)) return {};
            ListRun run{{}, py::tuple(outputs), py::tuple(inputs)};
            run.lists = prepare_lists(Verb(verb), group, run.outputs.ptr(), run.inputs.ptr(),
                                      verb_reduces(Verb(verb)) ? *known : Op::sum, {});
            if (run.lists.empty()) return {};
            return run;
          },
          py::arg("verb"), py::arg("outputs"), py::arg("inputs"), py::arg("op"));
  module.def(
      "list_splits",
      [](const std::vector<std::pair<int, uint64_t>>& tensors, int dtype) {
        std::vector<TensorSize> sizes;
        for (const auto& [kind, numel] : tensors) sizes.push_back({DType(kind), numel});
        return list_splits(sizes, DType(dtype));
      },
      py::arg("tensors"), py::arg("dtype"));
}

}  // namespace fastcoll
