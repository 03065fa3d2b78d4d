// SPDX-License-Identifier: Apache-2.0
// The kernel that adds rows of one rank's memory: the sums of nodes, or the parts of ranks.
#pragma once

#include "cuda/partials.cuh"
#include "draw.h"

namespace fastcoll::sim {

// swaps: adds the rows in another order, which must be seen. A row is drawn as elements, of narrow
// floats half of the time widened. Rows and output may start on a pack or on any element.
inline int run_partials(uint64_t num_seeds, bool swaps) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t seed) {
    const DType dtype = swaps ? DType::float32 : kDTypes[pick(random, std::size(kDTypes))];
    Op op = Op::sum;
    if (!swaps) do
        op = Op(pick(random, kNumOps));
      while (!op_has_meaning(dtype, op));
    const bool narrow = dtype == DType::float16 || dtype == DType::float8_e4m3fn;
    const bool widened = narrow && pick(random, 2) == 0;
    const size_t num_rows = 1 + pick(random, kMaxPartials), numel = swaps ? 200 : pick(random, 300);
    const int world = int(num_rows * (1 + pick(random, 8)));  // the divisor of an average
    const size_t elem = dtype_size(dtype), row_elem = widened ? sizeof(float) : elem;
    std::vector<std::vector<Pack>> rows(num_rows,
                                        std::vector<Pack>(numel * row_elem / kPackBytes + 2));
    const bool is_shifted = pick(random, 2) == 0;
    const size_t shift = pick(random, 2) * elem;
    std::vector<unsigned char> output(shift + numel * elem + kMarginBytes, kFiller);
    std::vector<Codes> inputs;
    PartialsCall call{};
    for (size_t row = 0; row < num_rows; ++row) {
      inputs.push_back(reference::random_codes(dtype, numel, random));
      auto* to = reinterpret_cast<std::byte*>(rows[row].data());
      if (is_shifted) to += pick(random, kPackBytes / row_elem) * row_elem;
      for (size_t i = 0; i < numel; ++i) {
        if (widened) {
          const float value =
              float(reference::decode(*reference::float_format(dtype), inputs[row][i]));
          std::memcpy(to + i * sizeof value, &value, sizeof value);
        } else {
          std::memcpy(to + i * elem, &inputs[row][i], elem);
        }
      }
      call.rows[swaps ? num_rows - 1 - row : row] = to;
    }
    call.output = reinterpret_cast<std::byte*>(output.data()) + shift;
    call.numel = numel;
    call.num_rows = int32_t(num_rows);
    call.divisor = op == Op::avg ? world : 0;
    call.op = op;
    call.widened = widened;
    Simulator simulator(1, Schedule::uniform, seed);
    using enum DType;
    const auto of_type = []<DType kDType> { return &add_partials<kDType>; };
    const auto kernel =
        kernel_for<float32, float64, float16, float8_e4m3fn, int16, boolean>(dtype, of_type);
    const int blocks = 1 + int(pick(random, 3)), threads = 1 + int(pick(random, 6));
    simulator.enqueue(0, {blocks, threads, [=] { kernel(call); }});
    bool right = simulator.run();
    for (size_t i = 0; i < numel; ++i) {
      Codes codes;
      for (const Codes& input : inputs) codes.push_back(input[i]);
      const uint64_t wanted = reference::reference(dtype, op, codes, world);
      right = right && std::memcmp(output.data() + shift + i * elem, &wanted, elem) == 0;
    }
    for (size_t i = 0; i < output.size(); ++i)
      right = right && ((i >= shift && i < shift + numel * elem) || output[i] == kFiller);
    if (!right)
      std::fprintf(stderr, "the sum of %d rows, %s %s\n", int(num_rows), op_name(op),
                   dtype_name(dtype));
    return right;
  });
}

}  // namespace fastcoll::sim
