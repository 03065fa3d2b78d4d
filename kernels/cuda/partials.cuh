// SPDX-License-Identifier: Apache-2.0
// Adds the sums of several nodes, which lie in this rank's memory. It adds in the order of the
// nodes, in the type that has all their bits, and rounds once. No peer, no channel, no wait:
// nothing of the protocol. It takes as long as memory does, so elements are read one by one.
#pragma once

#include "cuda/arithmetic.cuh"
#include "cuda/partials.h"

namespace fastcoll {

namespace device {

template <DType kDType, bool kWidened>
FASTCOLL_DEVICE auto load_element(const std::byte* row, uint64_t at) {
  using Format = FormatOf<kDType>;
  if constexpr (kWidened) {
    return reinterpret_cast<const typename Format::Accumulator*>(row)[at];
  } else {
    return Format::widen(reinterpret_cast<const typename Format::Storage*>(row)[at]);
  }
}

// Wrapping arithmetic doesn't know the sign, and signed types must not overflow.
template <class T, bool kWraps>
struct Wrapping {
  using Type = T;
};
template <class T>
struct Wrapping<T, true> {
  using Type = std::make_unsigned_t<T>;
};

template <DType kDType, Op kOp, bool kWidened>
FASTCOLL_DEVICE void add_partials_by(const PartialsCall& call) {
  using Format = FormatOf<kDType>;
  using T = typename Format::Accumulator;
  constexpr bool kWraps = std::is_integral_v<T> && kOp != Op::min && kOp != Op::max;
  using U = typename Wrapping<T, kWraps>::Type;
  const uint64_t step = uint64_t{num_blocks()} * num_threads();
  for (uint64_t at = uint64_t{block_idx()} * num_threads() + thread_idx(); at < call.numel;
       at += step) {
    U acc = U(load_element<kDType, kWidened>(call.rows[0], at));
    for (int row = 1; row < call.num_rows; ++row)
      acc = combine<kOp, U>(acc, U(load_element<kDType, kWidened>(call.rows[row], at)));
    auto& result = reinterpret_cast<typename Format::Storage*>(call.output)[at];
    if constexpr (kOp == Op::sum) {
      if (call.divisor != 0) {
        result = finish_one<Format, true>(T(acc), Divisor<T>(call.divisor));
        continue;
      }
    }
    result = finish_one<Format, false>(T(acc), T{});
  }
}

template <DType kDType, bool kWidened>
FASTCOLL_DEVICE void add_partials_of(const PartialsCall& call) {
  switch (plain_op<kDType>(call.op)) {
    case Op::sum:
      return add_partials_by<kDType, Op::sum, kWidened>(call);
    case Op::product:
      return add_partials_by<kDType, Op::product, kWidened>(call);
    case Op::min:
      return add_partials_by<kDType, Op::min, kWidened>(call);
    case Op::max:
      return add_partials_by<kDType, Op::max, kWidened>(call);
    default:
      break;
  }
  if constexpr (std::is_integral_v<typename FormatOf<kDType>::Accumulator>) {
    switch (plain_op<kDType>(call.op)) {
      case Op::band:
        return add_partials_by<kDType, Op::band, kWidened>(call);
      case Op::bor:
        return add_partials_by<kDType, Op::bor, kWidened>(call);
      case Op::bxor:
        return add_partials_by<kDType, Op::bxor, kWidened>(call);
      default:
        break;
    }
  }
}

}  // namespace device

template <DType kDType>
FASTCOLL_KERNEL add_partials(FASTCOLL_ARGUMENT(PartialsCall) call) {
  using Format = device::FormatOf<kDType>;
  constexpr bool kNarrow = sizeof(typename Format::Accumulator) > sizeof(typename Format::Storage);
  if constexpr (kNarrow) {
    if (call.widened) return device::add_partials_of<kDType, true>(call);
  }
  device::add_partials_of<kDType, false>(call);
}

}  // namespace fastcoll
