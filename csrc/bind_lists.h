// SPDX-License-Identifier: Apache-2.0
// The part of fastcoll._C that makes calls on lists of tensors.
#pragma once

#include <pybind11/pybind11.h>

#include "process_group.h"

namespace fastcoll {

void bind_lists(pybind11::module_& module, pybind11::class_<ProcessGroup>& group);

}  // namespace fastcoll
