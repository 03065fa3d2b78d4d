// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.cuh"

namespace fastcoll {

template const void* reduction_kernel<DType::int32>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::uint32>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::int64>(Algorithm, Verb, bool);
template const void* reduction_kernel<DType::uint64>(Algorithm, Verb, bool);

}  // namespace fastcoll
