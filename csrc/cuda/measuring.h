// SPDX-License-Identifier: Apache-2.0
// What measurements alone ask of fastcoll._cuda.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

// Behind Group, whose methods some of it would be.
void bind_measuring(pybind11::module_& module);

}  // namespace fastcoll
