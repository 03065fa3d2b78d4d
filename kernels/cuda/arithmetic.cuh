// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the CPU kernels (csrc/cpu/reduce_ops.inc, the same source), on packs.
#pragma once

#include <type_traits>

#include "cpu/convert.h"
#include "cuda/call.h"
#include "prim.cuh"

namespace fastcoll::device {

#include "cpu/reduce_ops.inc"

// Half floats are widened and narrowed by the hardware, which has the same bits.
struct HardwareFloat16 {
  using Storage = std::uint16_t;
  using Accumulator = float;
  static FASTCOLL_DEVICE float widen(Storage code) { return widen_fp16(code); }
  static FASTCOLL_DEVICE Storage narrow(float value) { return narrow_fp16(value); }
};

template <DType kDType>
constexpr auto format_of() {
  if constexpr (kDType == DType::float32) return Plain<float>{};
  if constexpr (kDType == DType::float64) return Plain<double>{};
  if constexpr (kDType == DType::float16) return HardwareFloat16{};
  if constexpr (kDType == DType::bfloat16) return Bfloat16{};
  if constexpr (kDType == DType::float8_e4m3fn) return Float8E4m3fn{};
  if constexpr (kDType == DType::float8_e5m2) return Float8E5m2{};
  if constexpr (kDType == DType::int8) return Plain<std::int8_t>{};
  if constexpr (kDType == DType::uint8) return Plain<std::uint8_t>{};
  if constexpr (kDType == DType::int16) return Plain<std::int16_t>{};
  if constexpr (kDType == DType::int32) return Plain<std::int32_t>{};
  if constexpr (kDType == DType::int64) return Plain<std::int64_t>{};
  if constexpr (kDType == DType::boolean) return Bool{};
  if constexpr (kDType == DType::uint16) return Plain<std::uint16_t>{};
  if constexpr (kDType == DType::uint32) return Plain<std::uint32_t>{};
  if constexpr (kDType == DType::uint64) return Plain<std::uint64_t>{};
}

template <DType kDType>
using FormatOf = decltype(format_of<kDType>());

// The plain form of an operation: booleans have only bits, and AVG is a sum until the end.
template <DType kDType>
FASTCOLL_DEVICE Op plain_op(Op op) {
  if (op == Op::avg) return Op::sum;
  if constexpr (kDType == DType::boolean) {
    if (op == Op::sum || op == Op::max) return Op::bor;
    if (op == Op::product || op == Op::min) return Op::band;
  }
  return op;
}

// Element i of some words, read or written. Words that take elements of less than 4 bytes start as
// zeros.
template <class U>
FASTCOLL_DEVICE U get_element(const uint32_t* words, int i) {
  if constexpr (sizeof(U) == 8) {
    return __builtin_bit_cast(U, uint64_t{words[2 * i + 1]} << 32 | words[2 * i]);
  } else if constexpr (sizeof(U) == 4) {
    return __builtin_bit_cast(U, words[i]);
  } else {
    constexpr int kPerWord = 4 / int(sizeof(U));
    return U(words[i / kPerWord] >> (i % kPerWord * 8 * int(sizeof(U))));
  }
}

template <class U>
FASTCOLL_DEVICE void put_element(uint32_t* words, int i, U value) {
  if constexpr (sizeof(U) == 8) {
    uint64_t bits = __builtin_bit_cast(uint64_t, value);  // const: nvcc 13.0 crashes on doubles
    words[2 * i] = uint32_t(bits);
    words[2 * i + 1] = uint32_t(bits >> 32);
  } else if constexpr (sizeof(U) == 4) {
    words[i] = __builtin_bit_cast(uint32_t, value);
  } else {
    using Unsigned = std::conditional_t<sizeof(U) == 1, uint8_t, uint16_t>;
    constexpr int kPerWord = 4 / int(sizeof(U));
    words[i / kPerWord] |= uint32_t(Unsigned(value)) << (i % kPerWord * 8 * int(sizeof(U)));
  }
}

// The elements of kNumWords words of one rank, reduced one after the other.
template <DType kDType, int kNumWords>
class Reducer {
 public:
  using Format = FormatOf<kDType>;
  using Storage = typename Format::Storage;
  using T = typename Format::Accumulator;
  static constexpr int kNumel = kNumWords * 4 / int(sizeof(Storage));
  // The accumulators of a pack take so many packs.
  static constexpr uint32_t kPartialPacks = sizeof(T) / sizeof(Storage);

  FASTCOLL_DEVICE void load(const uint32_t* words) {
    FASTCOLL_UNROLL
    for (int i = 0; i < kNumel; ++i) acc_[i] = Format::widen(get_element<Storage>(words, i));
  }

  // op: a result of plain_op.
  FASTCOLL_DEVICE void accumulate(Op op, const uint32_t* words) {
    switch (op) {
      case Op::sum:
        return step<Op::sum>(words);
      case Op::product:
        return step<Op::product>(words);
      case Op::min:
        return step<Op::min>(words);
      case Op::max:
        return step<Op::max>(words);
      default:
        break;
    }
    if constexpr (!std::is_floating_point_v<T>) {
      if (op == Op::band) return step<Op::band>(words);
      if (op == Op::bor) return step<Op::bor>(words);
      if (op == Op::bxor) return step<Op::bxor>(words);
    }
  }

  // divisor: of AVG, else 0.
  FASTCOLL_DEVICE void finish(uint32_t* words, int divisor) const {
    FASTCOLL_UNROLL
    for (int w = 0; w < kNumWords; ++w) words[w] = 0;
    FASTCOLL_UNROLL
    for (int i = 0; i < kNumel; ++i) put_element<Storage>(words, i, result(acc_[i], divisor));
  }

  // Accumulators on their way from rank to rank: kPartialPacks packs.
  FASTCOLL_DEVICE void load_partial(const std::byte* from) {
    FASTCOLL_UNROLL
    for (int p = 0; p < int(kPartialPacks); ++p) {
      const Pack pack = load_data<Pack>(from + p * kPackBytes);
      FASTCOLL_UNROLL
      for (int i = 0; i < kPerPack; ++i) acc_[p * kPerPack + i] = get_element<T>(pack.words, i);
    }
  }
  FASTCOLL_DEVICE void store_partial(std::byte* to) const {
    FASTCOLL_UNROLL
    for (int p = 0; p < int(kPartialPacks); ++p) {
      Pack pack{};
      FASTCOLL_UNROLL
      for (int i = 0; i < kPerPack; ++i) put_element<T>(pack.words, i, acc_[p * kPerPack + i]);
      store_data<Pack>(to + p * kPackBytes, pack);
    }
  }

 private:
  static constexpr int kPerPack = int(kPackBytes / sizeof(T));

  // Wrapping arithmetic doesn't know the sign, and signed types must not overflow.
  template <Op kOp>
  FASTCOLL_DEVICE void step(const uint32_t* words) {
    FASTCOLL_UNROLL
    for (int i = 0; i < kNumel; ++i) {
      const T value = Format::widen(get_element<Storage>(words, i));
      if constexpr (std::is_signed_v<T> && std::is_integral_v<T> && kOp != Op::min &&
                    kOp != Op::max) {
        using U = std::make_unsigned_t<T>;
        acc_[i] = T(combine<kOp, U>(U(acc_[i]), U(value)));
      } else {
        acc_[i] = combine<kOp, T>(acc_[i], value);
      }
    }
  }

  static FASTCOLL_DEVICE Storage result(T acc, int divisor) {
    if constexpr (kDType != DType::boolean) {
      if (divisor != 0) return finish_one<Format, true>(acc, Divisor<T>(divisor));
    }
    return finish_one<Format, false>(acc, T{});
  }

  T acc_[kNumel];
};

// A call's result, from its accumulators.
template <DType kDType>
FASTCOLL_DEVICE Pack finish_pack(const Reducer<kDType, 4>& reducer, const DeviceCall& call) {
  Pack pack;
  reducer.finish(pack.words, call.op == Op::avg ? call.world_size : 0);
  return pack;
}

// 8 bytes of NaNs, or 0 where the type has none.
constexpr uint64_t nan_pattern(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return 0x7fc000007fc00000;
    case DType::float64:
      return 0x7ff8000000000000;
    case DType::float16:
      return 0x7e007e007e007e00;
    case DType::bfloat16:
      return 0x7fc07fc07fc07fc0;
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return 0x7f7f7f7f7f7f7f7f;
    default:
      return 0;
  }
}

}  // namespace fastcoll::device
