// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the reductions on arrays of one process, for Python: what a rank does itself
// with bytes that came from other nodes.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

void bind_local_reduce(pybind11::module_& module);

}  // namespace fastcoll
