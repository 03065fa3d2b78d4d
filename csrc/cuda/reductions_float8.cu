// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.cuh"

namespace fastcoll {

template const void* reduction_kernel<DType::float8_e4m3fn>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::float8_e5m2>(Algorithm, Verb, bool);

}  // namespace fastcoll
