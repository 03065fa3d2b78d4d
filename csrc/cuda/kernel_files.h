// SPDX-License-Identifier: Apache-2.0
// The kernels' addresses, for the host. Each kernel is instantiated in one of several files, so
// that they compile side by side. A missing kernel is nullptr.
#pragma once

#include "dtypes.h"

namespace fastcoll {

template <DType kDType>
const void* reduction_kernel(Algorithm algorithm, Verb verb, bool ll);
const void* move_kernel(Verb verb, bool ll);
const void* switch_move_kernel(Verb verb, bool ll);
const void* transfer_kernel();
const void* partials_kernel(DType dtype);

}  // namespace fastcoll
