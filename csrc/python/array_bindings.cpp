// SPDX-License-Identifier: Apache-2.0
#include "python/array_bindings.h"

#include <pybind11/stl.h>

#include <array>
#include <utility>

#include "check.h"
#include "cpu/local_reduce.h"
#include "cpu/rows.h"
#include "fastcoll/integrations/gil.h"

namespace py = pybind11;

namespace fastcoll {

namespace {

void* to_ptr(uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_array_arithmetic(py::module_& module) {
  const auto without_gil = py::call_guard<GilAway>();
  module.def("reduce_arrays", &reduce_arrays, py::arg("dtype"), py::arg("op"), py::arg("sources"),
             py::arg("target"), py::arg("numel"), without_gil);
  module.def("widen_array", &widen_array, py::arg("dtype"), py::arg("source"), py::arg("target"),
             py::arg("numel"), without_gil);
  module.def(
      "run_rows",
      [](std::array<int, 3> dtypes, std::array<uintptr_t, 6> addresses,
         std::pair<size_t, size_t> shape, float epsilon, float offset,
         std::pair<bool, bool> flags) {
        for (const int dtype : dtypes)
          if (dtype < 0 || dtype >= kNumDTypes)
            throw Failure(ErrorKind::usage, "run_rows: a code out of range");
        const RowFn run = row_fn(DType(dtypes[0]));
        if (!run) throw Failure(ErrorKind::usage, "run_rows: no rows of this dtype");
        run({.plain = to_ptr(addresses[0]),
             .residual = to_ptr(addresses[1]),
             .summed = to_ptr(addresses[2]),
             .weight = to_ptr(addresses[3]),
             .out = to_ptr(addresses[4]),
             .scales = reinterpret_cast<float*>(addresses[5]),
             .num_rows = shape.first,
             .columns = shape.second,
             .epsilon = epsilon,
             .offset = offset,
             .dtype = DType(dtypes[0]),
             .weight_dtype = DType(dtypes[1]),
             .out_dtype = DType(dtypes[2]),
             .rounds_first = flags.first,
             .wide_sum = flags.second});
      },
      py::arg("dtypes"), py::arg("addresses"), py::arg("shape"), py::arg("eps"), py::arg("offset"),
      py::arg("flags"), without_gil);
  module.def("finish_array", &finish_array, py::arg("dtype"), py::arg("op"), py::arg("source"),
             py::arg("target"), py::arg("numel"), py::arg("world_size"), without_gil);
  module.def("code_array", &code_array, py::arg("wire"), py::arg("source"), py::arg("coded"),
             py::arg("feedback"), py::arg("numel"), py::arg("divisor"), without_gil);
  module.def("add_coded_arrays", &add_coded_arrays, py::arg("wire"), py::arg("sources"),
             py::arg("target"), py::arg("numel"), py::arg("coded_again"), without_gil);
  module.def("coded_array_bytes", &coded_array_bytes, py::arg("wire"), py::arg("numel"));
}

}  // namespace fastcoll
