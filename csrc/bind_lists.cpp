// SPDX-License-Identifier: Apache-2.0
#include "bind_lists.h"

#include <pybind11/stl.h>

#include <tuple>

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

}  // namespace

void bind_lists(py::module_& module, py::class_<ProcessGroup>& group) {
  group.def(
      "run_list",
      [](ProcessGroup& group, const Plan& plan, const PieceList& pieces, double timeout_s) {
        const Plan copy = plan;
        const List list = list_of(plan, pieces);
        PythonHost host;
        host.blocking();
        group.run(copy, list, host, timeout_s);
      },
      py::arg("plan"), py::arg("pieces"), py::arg("timeout_s"));
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
