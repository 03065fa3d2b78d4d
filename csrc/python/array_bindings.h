// SPDX-License-Identifier: Apache-2.0
// The part of fastcoll._C that computes on arrays of this process: sums, rows, coded elements.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

void bind_array_arithmetic(pybind11::module_& module);

}  // namespace fastcoll
