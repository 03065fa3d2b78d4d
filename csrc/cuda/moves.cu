// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernel_files.h"
#include "cuda/kernels.cuh"

namespace fastcoll {

const void* move_kernel(Verb verb, bool ll) {
  return reinterpret_cast<const void*>(moving_kernel<Protocol>(verb, ll));
}

const void* switch_move_kernel(Verb verb, bool ll) {
  return reinterpret_cast<const void*>(switch_moving_kernel<Protocol>(verb, ll));
}

const void* transfer_kernel() { return reinterpret_cast<const void*>(&send_recv<Protocol>); }

}  // namespace fastcoll
