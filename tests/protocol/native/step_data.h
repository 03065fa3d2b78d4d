// SPDX-License-Identifier: Apache-2.0
// The tensors of a step of random_steps.h: where they lie, and the check of a call's output.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/halves.h"
#include "random_steps.h"

namespace steps {

inline constexpr size_t kArenaBytes = size_t{8} << 20;  // two halves, each for 7 x 100,000 elements

// One rank's input and output for a step, private or in its arena, apart or in place.
struct Buffers {
  std::vector<int32_t> private_input, private_output;
  int32_t* input;
  int32_t* output;
};

inline void place(Buffers& buffers, const Step& step, int world_size, int rank, std::byte* arena,
                  std::minstd_rand& random) {
  const size_t in = step.plan.numel * num_input_parts(step.plan.verb, world_size);
  const size_t out = step.plan.numel * num_output_parts(step.plan.verb, world_size);
  buffers.private_input.assign(in + 1, 0);
  buffers.private_output.assign(out + 1, -1);
  const size_t half = kArenaBytes / 2 / sizeof(int32_t);
  auto* shared = reinterpret_cast<int32_t*>(arena);
  buffers.input = random() % 2 ? buffers.private_input.data() : shared + random() % 16;
  const size_t behind = random() % 4 ? half + random() % 16 : 2 * half - out;  // or at the end
  buffers.output = random() % 2 ? buffers.private_output.data() : shared + behind;
  const bool in_place =
      step.plan.verb == Verb::broadcast || (step.plan.verb == Verb::all_reduce && random() % 2);
  if (in_place) buffers.output = buffers.input;
  for (size_t i = 0; i < in; ++i)
    buffers.input[i] = is_average(step) ? std::bit_cast<int32_t>(float_of(step.salt, rank, i))
                                        : value_of(step.salt, rank, i);
  if (!in_place) std::fill_n(buffers.output, out, -1);
}

inline void require(bool right, const Step& step, int world_size, int rank, size_t i) {
  if (right) return;
  std::fprintf(stderr, "WRONG: rank %d of %d, %s by %s: element %zu\n", rank, world_size,
               describe(step.plan).c_str(), describe_choice(step.plan).c_str(), i);
  std::exit(1);
}

inline void verify_parts(const Step& step, int world_size, int rank, const int32_t* output) {
  size_t at = 0;
  for (int peer = 0; peer < world_size; ++peer) {
    size_t start = 0;  // of this rank's part in the peer's message
    for (int to = 0; step.numels.empty() && to < rank; ++to) start += part_numel(step, peer, to);
    for (size_t i = 0; i < part_numel(step, peer, rank); ++i, ++at)
      require(output[at] == value_of(step.salt, peer, start + i), step, world_size, rank, at);
  }
}

// Whether a call takes its message in parts, and has as many on one side as there are ranks.
inline bool takes_parts(const Plan& plan) {
  if (plan.verb == Verb::reduce_scatter)
    return plan.algorithm == Algorithm::one_shot || plan.algorithm == Algorithm::two_shot;
  return plan.verb == Verb::all_gather || plan.verb == Verb::gather || plan.verb == Verb::scatter ||
         plan.verb == Verb::all_to_all;
}
// `apart`: where the parts of the input lie, each behind a gap.
inline Parts parts_of(const Step& step, int world_size, int rank, const Buffers& buffers,
                      std::vector<int32_t>& apart) {
  Parts parts{};
  int32_t *in = buffers.input, *out = buffers.output;
  const bool splits = num_input_parts(step.plan.verb, world_size) != 1;
  const bool joins = num_output_parts(step.plan.verb, world_size) != 1;
  for (int peer = 0; peer < world_size; ++peer) {
    const size_t gives = part_numel(step, rank, peer), gets = part_numel(step, peer, rank);
    parts.inputs[size_t(peer)] = {reinterpret_cast<std::byte*>(in), gives * sizeof *in};
    parts.outputs[size_t(peer)] = {reinterpret_cast<std::byte*>(out), gets * sizeof *out};
    if (splits) in += gives;
    if (joins) out += gets;
  }
  if (!splits || apart.empty()) return parts;
  const size_t room = apart.size() / size_t(world_size);
  for (size_t peer = 0; peer < size_t(world_size); ++peer) {
    std::byte* place = reinterpret_cast<std::byte*>(apart.data() + peer * room);
    Part& part = parts.inputs[peer];
    std::memcpy(place, part.ptr, part.num_bytes);
    part.ptr = place;
  }
  return parts;
}

// The same tensors, each in a place of its own.
class Tensors {
 public:
  Tensors(const Step& step, int world_size, const Buffers& buffers)
      : numel_(step.plan.numel),
        in_(num_input_parts(step.plan.verb, world_size)),
        out_(num_output_parts(step.plan.verb, world_size)) {
    const bool in_place = buffers.input == buffers.output;
    size_t at = 0;
    for (const TensorSize& size : sizes_of_list(step.salt, numel_)) {
      inputs_.emplace_back(in_ * size.numel);
      for (size_t part = 0; part < in_; ++part)
        std::copy_n(buffers.input + part * numel_ + at, size.numel,
                    inputs_.back().data() + part * size.numel);
      outputs_.emplace_back(in_place ? 0 : out_ * size.numel);
      auto& output = in_place ? inputs_.back() : outputs_.back();
      list.push_back({reinterpret_cast<std::byte*>(inputs_.back().data()),
                      reinterpret_cast<std::byte*>(output.data()), at, size.numel});
      at += size.numel;
    }
  }
  void put_together(int32_t* output) const {
    for (const Piece& piece : list)
      for (size_t part = 0; part < out_; ++part)
        std::copy_n(reinterpret_cast<const int32_t*>(piece.output) + part * piece.numel,
                    piece.numel, output + part * numel_ + piece.start);
  }
  List list;

 private:
  const size_t numel_, in_, out_;
  std::vector<std::vector<int32_t>> inputs_, outputs_;
};

// The same elements with others between them: every third, or a matrix by its columns.
class Apart {
 public:
  Apart(const int32_t* values, size_t numel, bool by_columns)
      : num_rows_(by_columns && numel % kColumns == 0 ? numel / kColumns : numel),
        num_columns_(numel / num_rows_),
        memory_(num_columns_ == 1 ? 3 * numel : numel, kGap) {
    for (size_t i = 0; i < numel; ++i) memory_[place_of(i)] = values[i];
    const int64_t shape[] = {int64_t(num_rows_), int64_t(num_columns_)};
    const int64_t strides[] = {int64_t(4 * place_of(num_columns_)), int64_t(4 * num_rows_)};
    strided.set(reinterpret_cast<std::byte*>(memory_.data()), 4, 2, shape, strides);
  }
  void put_together(int32_t* output) const {
    for (size_t i = 0; i < num_rows_ * num_columns_; ++i) output[i] = memory_[place_of(i)];
  }
  bool gaps_are_whole() const {
    for (size_t i = 0; i < memory_.size(); ++i)
      if (num_columns_ == 1 && i % 3 != 0 && memory_[i] != kGap) return false;
    return true;
  }
  Strided strided;

 private:
  static constexpr size_t kColumns = 24;
  static constexpr int32_t kGap = 77;
  size_t place_of(size_t i) const {
    return num_columns_ == 1 ? 3 * i : i % num_columns_ * num_rows_ + i / num_columns_;
  }
  const size_t num_rows_, num_columns_;
  std::vector<int32_t> memory_;
};

inline void require_average(const Step& step, int world_size, int rank, size_t at, int32_t output) {
  float sum = 0;
  for (int peer = 0; peer < world_size; ++peer) sum += float_of(step.salt, peer, at);
  const float average = sum / float(world_size), seen = std::bit_cast<float>(output);
  require(std::abs(seen - average) <= 1e-3f, step, world_size, rank, at);
}

inline void verify(const Step& step, int world_size, int rank, const int32_t* output) {
  const Plan& plan = step.plan;
  const size_t outputs = plan.numel * num_output_parts(plan.verb, world_size);
  if ((plan.verb == Verb::gather || plan.verb == Verb::reduce) && rank != plan.root) {
    for (size_t i = 0; i < outputs; ++i)
      require(output[i] == -1, step, world_size, rank, i);  // it gets nothing
    return;
  }
  if (plan.verb == Verb::all_to_all || !step.numels.empty())
    return verify_parts(step, world_size, rank, output);
  for (size_t i = 0; i < outputs; ++i) {
    uint32_t expected = 0;
    switch (plan.verb) {
      case Verb::all_gather:
      case Verb::gather:
        expected = uint32_t(value_of(step.salt, int(i / plan.numel), i % plan.numel));
        break;
      case Verb::broadcast:
        expected = uint32_t(value_of(step.salt, plan.root, i));
        break;
      case Verb::scatter:
        expected = uint32_t(value_of(step.salt, plan.root, size_t(rank) * plan.numel + i));
        break;
      default: {
        const size_t at = i + (plan.verb == Verb::reduce_scatter ? size_t(rank) * plan.numel : 0);
        if (is_average(step)) {
          require_average(step, world_size, rank, at, output[i]);
          continue;
        }
        expected = uint32_t(value_of(step.salt, 0, at));
        for (int peer = 1; peer < world_size; ++peer) {
          const int32_t value = value_of(step.salt, peer, at);
          expected = plan.op == Op::max ? uint32_t(std::max(int32_t(expected), value))
                                        : expected + uint32_t(value);
        }
      }
    }
    require(uint32_t(output[i]) == expected, step, world_size, rank, i);
  }
}

}  // namespace steps
