// SPDX-License-Identifier: Apache-2.0
// The part of fastcoll._C by which Python sets up a group's calls on its GPU.
#pragma once

#include <pybind11/pybind11.h>

#include "group/process_group.h"

namespace fastcoll {

void bind_gpu_calls(pybind11::module_& module);
// The functions of a group for them.
void bind_gpu_side(pybind11::class_<ProcessGroup>& group);

}  // namespace fastcoll
