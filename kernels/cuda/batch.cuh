// SPDX-License-Identifier: Apache-2.0
// Several sends and receives for one kernel. They come as an argument, so that a captured graph
// keeps them. The kernel here writes them where send_recv reads its batch. No protocol here: the
// two kernels follow each other in one stream.
#pragma once

#include "cuda/call.h"

namespace fastcoll {

inline constexpr int kMaxBatch = 2 * kMaxGpuWorld;

// The own fields of one send or receive; see DeviceCall.
struct PairPart {
  std::byte* data;
  uint64_t numel;
  uint32_t location, tile_bytes, plan_hash, elem_bytes, pair_channels;
  int32_t peer;
  Verb verb;
  DType dtype;
};

struct BatchCall {
  DeviceCall common;
  DeviceCall* batch;
  PairPart parts[kMaxBatch];
};
static_assert(sizeof(BatchCall) <= 4096, "a kernel's arguments have 4 KiB on older drivers");

__host__ __device__ inline void set_part(DeviceCall& call, const PairPart& part) {
  call.input = part.data;
  call.output = part.data;
  call.numel = part.numel;
  call.input_location = call.output_location = part.location;
  call.tile_bytes = part.tile_bytes;
  call.plan_hash = part.plan_hash;
  call.elem_bytes = part.elem_bytes;
  call.pair_channels = part.pair_channels;
  call.root = part.peer;
  call.verb = part.verb;
  call.dtype = part.dtype;
}

// One thread for each part.
__global__ void write_batch_kernel(const __grid_constant__ BatchCall call) {
  DeviceCall& to = call.batch[threadIdx.x];
  to = call.common;
  set_part(to, call.parts[threadIdx.x]);
}

}  // namespace fastcoll
