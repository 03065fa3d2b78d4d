// SPDX-License-Identifier: Apache-2.0
// The public verbs as C functions (METH_FASTCALL): a call whose plan is known, on contiguous CPU
// tensors, runs without a Python frame. Every other call goes to the Python function of the same
// name (set_fallback), which checks, plans and explains.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcoll {

void bind_fast_calls(pybind11::module_& module);

}  // namespace fastcoll
