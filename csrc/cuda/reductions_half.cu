// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.cuh"

namespace fastcoll {

template const void* reduction_kernel<DType::float16>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::bfloat16>(Algorithm, Verb, bool);

}  // namespace fastcoll
