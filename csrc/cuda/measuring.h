// SPDX-License-Identifier: Apache-2.0
// The functions of fastcoll._cuda that only measurements call.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

// Behind Group, whose methods some of it would be.
void bind_measuring(pybind11::module_& module);

}  // namespace fastcoll
