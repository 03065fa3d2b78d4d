// SPDX-License-Identifier: Apache-2.0
// Narrow floats (fp16, bf16, fp8) to and from fp32. Widening is exact, narrowing rounds to nearest
// even, and every NaN comes out as the type's one canonical NaN. The arithmetic is branch-free and
// on integers. So compilers turn it into SIMD on every instruction set, and it has the same bits
// everywhere. Machine conversions differ: VCVTNEPS2BF16, for one, flushes subnormals. The two
// additions of floats below need round-to-nearest-even; all their operands are normal.
#pragma once

#include <cstdint>

// Always inlined, so that each SIMD level compiles its own copy into its loops. nvcc compiles this
// file for the device too.
#ifdef __CUDACC__
#define FASTCOLL_INLINE __host__ __device__ __forceinline__
#else
#define FASTCOLL_INLINE inline __attribute__((always_inline))
#endif

namespace fastcoll {

static FASTCOLL_INLINE std::int32_t bits_of(float value) {
  return __builtin_bit_cast(std::int32_t, value);
}

static FASTCOLL_INLINE float float_of(std::int32_t bits) { return __builtin_bit_cast(float, bits); }

// condition ? yes : no, by masks. Written as a conditional, compilers move the computation of `yes`
// behind a branch, and then can't vectorise the loop since that computation might trap.
static FASTCOLL_INLINE std::int32_t select(bool condition, std::int32_t yes, std::int32_t no) {
  const std::int32_t mask = -static_cast<std::int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

inline constexpr std::int32_t kFloatInf = 0x7f800000;
inline constexpr std::int32_t kFloatNaN = 0x7fc00000;
inline constexpr std::int32_t kFloatAbs = 0x7fffffff;

static FASTCOLL_INLINE float widen_bf16(std::uint16_t code) {
  return float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(code) << 16));
}

// The rounded number in the upper half; the lower half is rubble.
static FASTCOLL_INLINE std::uint32_t round_bf16(float value) {
  const std::int32_t bits = bits_of(value);
  const std::int32_t odd = (bits >> 16) & 1;
  // Unsigned, as the sum may carry from the largest exponent into the sign bit (for NaNs only).
  const std::uint32_t rounded = static_cast<std::uint32_t>(bits) + 0x7fffu + odd;
  return (bits & kFloatAbs) > kFloatInf ? 0x7fc00000u : rounded;
}

static FASTCOLL_INLINE std::uint16_t narrow_bf16(float value) {
  return static_cast<std::uint16_t>(round_bf16(value) >> 16);
}

// Sign, exponent, mantissa, as in IEEE 754, with subnormals. An overflow becomes kMaxCode: the
// infinity where there is one, else the largest number.
template <int kExponentBits, int kMantissaBits, std::int32_t kMaxCode, std::int32_t kNaNCode>
struct NarrowFloat {
  static constexpr int kSignShift = kExponentBits + kMantissaBits;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr std::int32_t kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr std::int32_t kRebias = (127 - kBias) << 23;
  static constexpr std::int32_t kAbsMask = (1 << kSignShift) - 1;
  static constexpr std::int32_t kMinNormal = (128 - kBias) << 23;  // in fp32
  static constexpr bool kHasInf = (kMaxCode & ((1 << kMantissaBits) - 1)) == 0;
  // A power of two whose fp32 neighbour is one subnormal step away: adding it rounds to that step.
  static constexpr std::int32_t kMagic = (127 + 1 - kBias - kMantissaBits + 23) << 23;

  static FASTCOLL_INLINE float widen(std::int32_t code) {
    const std::int32_t abs_code = code & kAbsMask;
    const std::int32_t sign = (code >> kSignShift) << 31;
    const std::int32_t shifted = abs_code << kShift;
    // Subnormals: read as 1.m * 2^e with the least exponent, then take the 1 away again.
    const std::int32_t subnormal = bits_of(float_of(shifted + kMinNormal) - float_of(kMinNormal));
    std::int32_t abs_bits = select(shifted < (1 << 23), subnormal, shifted + kRebias);
    if constexpr (kHasInf) {
      abs_bits = select(abs_code >= kMaxCode, shifted | kFloatInf, abs_bits);
    } else {
      abs_bits = select(abs_code >= kNaNCode, kFloatNaN, abs_bits);
    }
    return float_of(abs_bits | sign);
  }

  static FASTCOLL_INLINE std::int32_t narrow(float value) {
    const std::int32_t bits = bits_of(value);
    const std::int32_t abs_bits = bits & kFloatAbs;
    const std::int32_t sign = static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) >> 31)
                              << kSignShift;
    const std::int32_t odd = (abs_bits >> kShift) & 1;
    // Taking the bias off first keeps the sum in range even for a NaN's bits.
    const std::int32_t normal = (abs_bits - kRebias + ((1 << (kShift - 1)) - 1) + odd) >> kShift;
    const std::int32_t subnormal = bits_of(float_of(abs_bits) + float_of(kMagic)) - kMagic;
    std::int32_t code = select(abs_bits < kMinNormal, subnormal, normal);
    code = select(code > kMaxCode, kMaxCode, code);
    return select(abs_bits > kFloatInf, kNaNCode, code | sign);
  }
};

using Fp16 = NarrowFloat<5, 10, 0x7c00, 0x7e00>;
using Fp8E4m3fn = NarrowFloat<4, 3, 0x7e, 0x7f>;
using Fp8E5m2 = NarrowFloat<5, 2, 0x7c, 0x7f>;

}  // namespace fastcoll
