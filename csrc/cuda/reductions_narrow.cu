// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.cuh"

namespace fastcoll {

template const void* reduction_kernel<DType::boolean>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::int8>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::uint8>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::int16>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::uint16>(Algorithm, Verb, bool);

}  // namespace fastcoll
