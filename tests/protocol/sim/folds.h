// SPDX-License-Identifier: Apache-2.0
// The kernel that adds parts that NCCL brought: those of all ranks in one rank's memory.
#pragma once

#include "draw.h"

namespace fastcoll::sim {

// swaps: adds the parts in another order than that of the ranks, which must be seen.
inline int run_folds(uint64_t num_seeds, bool swaps) {
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    Random random(seed);
    Step step;
    step.algorithm = Algorithm::nccl;
    step.verb = Verb::reduce_scatter;
    step.dtype = swaps ? DType::float32 : kDTypes[pick(random, std::size(kDTypes))];
    do step.op = swaps ? Op::sum : Op(pick(random, kNumOps));
    while (!op_has_meaning(step.dtype, step.op));
    step.places.resize(1 + pick(random, kMaxGpuWorld));
    step.numel = swaps ? 200 : pick(random, 300);
    const int world = step.world();
    const size_t elem = step.elem_bytes(), num_bytes = step.numel * elem;
    const size_t stride = (num_bytes + kPackBytes - 1) / kPackBytes * kPackBytes;
    // One more than fits: it must stay as it is.
    std::vector<Pack> parts(size_t(world) * stride / kPackBytes + 1);
    const size_t shift = pick(random, 2) * elem;
    std::vector<unsigned char> output(num_bytes + kPackBytes + shift, kFiller);
    std::vector<Codes> inputs;
    for (int rank = 0; rank < world; ++rank) {
      inputs.push_back(reference::random_codes(step.dtype, step.numel, random));
      const int place = swaps ? world - 1 - rank : rank;
      auto* to = reinterpret_cast<std::byte*>(parts.data()) + size_t(place) * stride;
      for (size_t i = 0; i < step.numel; ++i) std::memcpy(to + i * elem, &inputs.back()[i], elem);
    }
    DeviceCall call{};
    call.input = reinterpret_cast<const std::byte*>(parts.data());
    call.output = reinterpret_cast<std::byte*>(output.data()) + shift;
    call.numel = step.numel;
    call.tile_bytes = uint32_t(16 << pick(random, 3));
    call.world_size = world;
    call.op = step.op;
    call.verb = step.verb;
    call.dtype = step.dtype;
    call.elem_bytes = uint32_t(elem);
    Simulator simulator(1, Schedule::uniform, seed);
    const KernelFn kernel = kernel_of<Protocol>(step);
    const int blocks = 1 + int(pick(random, 3)), threads = 1 + int(pick(random, 6));
    simulator.enqueue(0, {blocks, threads, [=] { kernel(call); }});
    bool right = simulator.run();
    for (size_t i = 0; i < step.numel; ++i) {
      Codes codes;
      for (const Codes& input : inputs) codes.push_back(input[i]);
      const uint64_t wanted = reference::reference(step.dtype, step.op, codes, world);
      right = right && std::memcmp(output.data() + shift + i * elem, &wanted, elem) == 0;
    }
    for (size_t i = 0; i < output.size(); ++i)
      right = right && ((i >= shift && i < shift + num_bytes) || output[i] == kFiller);
    if (right) continue;
    std::fprintf(stderr, "WRONG: %s, seed %d\n", step.name().c_str(), int(seed));
    return 1;
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace fastcoll::sim
