// SPDX-License-Identifier: Apache-2.0
// The table of C functions for code that is compiled later (fastcoll/integrations/core_api.h). It
// reaches that code as a capsule of the module, so no symbol is exported.
#pragma once

#include <Python.h>

#include "python/fast_calls.h"

namespace fastcoll {

// Add the capsule to the module. False with a Python error set.
bool add_core_api(PyObject* module, GroupOf* group_of_object);

}  // namespace fastcoll
