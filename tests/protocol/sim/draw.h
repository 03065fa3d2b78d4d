// SPDX-License-Identifier: Apache-2.0
// Which kernels are simulated, and calls drawn at random for them.
#pragma once

#include "machine.h"

namespace fastcoll::sim {

// Verbs in which some rank does not wait are the ones after which reuse goes wrong.
struct Choice {
  Algorithm algorithm;
  Verb verb;
  bool ll;
};
inline Step step_of(const Choice& choice, int world) {
  Step step;
  step.algorithm = choice.algorithm;
  step.verb = choice.verb;
  step.ll = choice.ll;
  step.places.resize(size_t(world));
  return step;
}

constexpr Choice kChoices[] = {
    {Algorithm::one_shot, Verb::all_reduce, true},
    {Algorithm::one_shot, Verb::all_reduce, false},
    {Algorithm::two_shot, Verb::all_reduce, false},
    {Algorithm::one_shot, Verb::reduce_scatter, true},
    {Algorithm::one_shot, Verb::reduce_scatter, false},
    {Algorithm::ring, Verb::all_reduce, false},
    {Algorithm::ring, Verb::reduce_scatter, false},
    {Algorithm::multimem, Verb::all_reduce, false},
    {Algorithm::multimem, Verb::reduce_scatter, false},
    {Algorithm::chain, Verb::all_reduce, false},
    {Algorithm::chain, Verb::reduce_scatter, false},
    {Algorithm::direct, Verb::reduce, false},
    {Algorithm::direct, Verb::all_gather, true},
    {Algorithm::direct, Verb::all_gather, false},
    {Algorithm::multimem, Verb::all_gather, false},
    {Algorithm::multimem, Verb::broadcast, false},
    {Algorithm::direct, Verb::all_to_all, true},
    {Algorithm::direct, Verb::all_to_all, false},
    {Algorithm::direct, Verb::broadcast, false},
    {Algorithm::direct, Verb::broadcast, false},
    {Algorithm::direct, Verb::gather, false},
    {Algorithm::direct, Verb::scatter, false},
    {Algorithm::direct, Verb::barrier, false},
};

template <class P, DType kDType>
KernelFn kernel_of_type(const Step& step) {
  if (step.algorithm == Algorithm::copy_engine) return moving_kernel<P>(Verb::barrier, step.ll);
  const KernelFn kernel = reducing_kernel<P, kDType>(step.algorithm, step.verb, step.ll);
  if (kernel != nullptr) return kernel;
  if (step.algorithm == Algorithm::multimem) return switch_moving_kernel<P>(step.verb, step.ll);
  return moving_kernel<P>(step.verb, step.ll);
}

template <class P, DType kDType>
KernelFn kernel_of_switch(const Step& step) {
  if (step.algorithm != Algorithm::multimem) return nullptr;
  return step.reduces() ? multimem<P, kDType> : switch_moving_kernel<P>(step.verb, step.ll);
}

// The kernel that `make` has for a type, null if the type is none of kDTypes.
template <DType... kDTypes, class Make>
auto kernel_for(DType dtype, const Make& make) {
  auto found = make.template operator()<DType::float32>();
  found = nullptr;
  const auto try_one = [&](DType type, auto kernel) {
    if (type == dtype) found = kernel;
  };
  (try_one(kDTypes, make.template operator()<kDTypes>()), ...);
  return found;
}

template <class P>
KernelFn kernel_of(const Step& step) {
  using enum DType;
  const DType dtype = kernel_dtype(step.dtype);
  const auto of_type = [&]<DType kDType> { return kernel_of_type<P, kDType>(step); };
  if constexpr (std::is_same_v<P, Protocol>) {
    const auto of_switch = [&]<DType kDType> { return kernel_of_switch<P, kDType>(step); };
    const KernelFn kernel =
        kernel_for<float32, float64, float16, float8_e4m3fn, int16, boolean>(dtype, of_type);
    if (kernel != nullptr) return kernel;
    return kernel_for<bfloat16, int32, uint32, int64, uint64>(dtype, of_switch);
  } else {
    return kernel_for<float32>(dtype, of_type);
  }
}

constexpr DType kDTypes[] = {DType::float32,       DType::float64, DType::float16,
                             DType::float8_e4m3fn, DType::int16,   DType::boolean};

// 0, 1, odd, a pack and a segment, each with its neighbours.
inline uint64_t draw_numel(Random& random, const Step& step, int world) {
  const uint64_t pack = kPackBytes / step.elem_bytes();
  const uint64_t segment = step.tile_bytes * uint64_t(world * step.blocks) / step.elem_bytes();
  const uint64_t base[] = {0, 1, 7, pack, segment, 3 * segment, 9 * segment};
  const uint64_t drawn = base[pick(random, 7)] + pick(random, 3);
  const uint64_t numel = drawn == 0 ? 0 : drawn - pick(random, 2);
  const uint64_t most = uint64_t(kLlPacks) * kLlBytes / step.elem_bytes();
  return step.ll && numel > most ? most : numel;
}

// Takes the shape that a launch would choose for a larger message; fewer threads: each is a fiber.
inline void take_real_shape(Random& random, Step& step, int world) {
  if (!step.ll) step.numel = pick(random, 40000) / uint64_t(world);
  const bool per_rank = splits_message(step.algorithm, step.verb) && step.verb == Verb::all_reduce;
  const uint64_t part_bytes = step.numel * step.elem_bytes() / uint64_t(per_rank ? world : 1);
  const LaunchShape shape = shape_for(step.algorithm, step.verb, step.dtype, step.ll, part_bytes,
                                      world, 1 + int(pick(random, 4)));
  step.blocks = shape.blocks;
  step.threads = std::min(shape.threads, 32);
  step.tile_bytes = shape.tile_bytes;
}

// Half of the time all equal, which is then known without counts. An all_gather gives every rank
// the same.
inline void draw_splits(Random& random, Step& step) {
  step.even = step.ll || step.algorithm == Algorithm::multimem || pick(random, 2) == 0;
  step.splits = even_splits(step);
  if (step.even) return;
  for (auto& row : step.splits) {
    for (uint64_t& count : row)
      if (pick(random, 3) != 0) count = pick(random, 2 * step.numel + 2);
    if (step.verb == Verb::all_gather) row.assign(row.size(), row[0]);
  }
}

// only: "ring reduce_scatter" draws nothing else; "" draws all.
inline Choice draw_choice(Random& random, const std::string& only) {
  for (;;) {
    const Choice choice = kChoices[pick(random, std::size(kChoices))];
    const std::string name =
        std::string(algorithm_name(choice.algorithm)) + " " + verb_name(choice.verb);
    if (only.empty() || only == name) return choice;
  }
}

// The tensors of a list: on some ranks alone, as peers do not know.
inline void draw_apart(Random& random, const Step& step, int rank, Placement& place) {
  const bool is_elsewhere =
      (step.verb == Verb::scatter || step.verb == Verb::gather) && rank != step.root;
  if (!takes_parts_apart(step.algorithm) || is_elsewhere) return;
  place.input_apart = verb_gives_parts(step.verb) && pick(random, 3) == 0;
  place.output_apart = verb_gets_parts(step.verb) && pick(random, 3) == 0;
  place.symmetric_input = place.symmetric_input && !place.input_apart;
  place.symmetric_output = place.symmetric_output && !place.output_apart;
}

// The algorithm and verb, an element type that has them, and an operation.
template <class P>
void draw_kind(Random& random, Step& step, const Choice& choice) {
  step.algorithm = choice.algorithm;
  step.verb = choice.verb;
  step.ll = choice.ll;
  constexpr bool kAllTypes = std::is_same_v<P, Protocol>;
  step.dtype = kAllTypes ? kDTypes[pick(random, std::size(kDTypes))] : DType::float32;
  constexpr DType kBySwitch[] = {DType::float32, DType::float16, DType::bfloat16, DType::int32,
                                 DType::uint32,  DType::int64,   DType::uint64};
  if (step.algorithm == Algorithm::multimem)
    step.dtype = kBySwitch[pick(random, kAllTypes ? std::size(kBySwitch) : 1)];
  const bool counts = dtype_kind(step.dtype) == Kind::integer;
  do step.op = Op(pick(random, kNumOps));
  while (!op_has_meaning(step.dtype, step.op) ||
         (step.algorithm == Algorithm::multimem && step.op == Op::product));
  // The switch rounds before a division.
  if (step.algorithm == Algorithm::multimem && !counts)
    step.op = step.dtype == DType::float32 ? Op(pick(random, 2)) : Op::sum;
}

// The memory of every rank, and what lies in it.
inline void draw_tensors(Random& random, Step& step, int world) {
  step.places.resize(size_t(world));
  if (step.verb == Verb::all_to_all || step.verb == Verb::all_gather) draw_splits(random, step);
  for (int rank = 0; rank < world; ++rank) {
    Placement& place = step.places[size_t(rank)];
    place.symmetric_input = pick(random, 2) == 0;
    place.symmetric_output = pick(random, 2) == 0;
    place.in_place = pick(random, 3) == 0 && step.verb != Verb::all_to_all &&
                     step.verb != Verb::gather && step.verb != Verb::scatter;
    const size_t grain = pick(random, 2) == 0 ? kPackBytes : step.elem_bytes();
    place.input_shift_bytes = pick(random, kPackBytes) / grain * grain;
    place.output_shift_bytes = pick(random, kPackBytes) / grain * grain;
    draw_apart(random, step, rank, place);
  }
  // One place on all ranks, which the switch can use.
  if (step.algorithm == Algorithm::multimem && pick(random, 2) == 0)
    step.places.assign(size_t(world), step.places[0]);
  draw_inputs(random, step);
}

template <class P>
Step draw_step(Random& random, int world, const std::string& only) {
  Step step;
  draw_kind<P>(random, step, draw_choice(random, only));
  step.blocks = 1 + int(pick(random, 2));
  step.threads = 1 + int(pick(random, 6));
  step.tile_bytes = uint32_t(16 << pick(random, 3));
  step.root = int(pick(random, uint64_t(world)));
  step.numel = draw_numel(random, step, world);
  if (pick(random, 16) == 0) take_real_shape(random, step, world);
  draw_tensors(random, step, world);
  return step;
}

inline Transfer draw_transfer(Random& random, const Step& step, int from, int to) {
  const uint64_t most =
      std::min<uint64_t>(20 * step.tile_bytes, kPairHeapBytes) / step.elem_bytes();
  return {from,
          to,
          reference::random_codes(step.dtype, pick(random, most), random),
          pick(random, kPackBytes),
          pick(random, 4) == 0,
          1 + uint32_t(pick(random, kPairChannels))};
}

}  // namespace fastcoll::sim
