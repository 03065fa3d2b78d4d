// SPDX-License-Identifier: Apache-2.0
// The primitives of kernels beyond plain C++, in two bodies: PTX here, for nvcc; fibers in
// csrc/sim/prim.h, for the simulator. No other file of the kernels has PTX, shared memory or
// barriers.
//
// Memory that other ranks write or read is touched through these functions alone. No stand-alone
// fences between ranks: race detectors can't see them. Never `const __restrict__`, __ldg or .nc on
// it: the compiler would then move the load before the wait that makes it valid.
#pragma once

#include "cuda/call.h"

namespace fastcoll {

// 16 bytes of data, moved by one instruction.
struct alignas(kPackBytes) Pack {
  uint32_t words[4];
};

}  // namespace fastcoll

#ifndef __CUDACC__
#include "sim/prim.h"
#else

#define FASTCOLL_DEVICE __device__ __forceinline__
// Not inlined: otherwise every wait would hold a copy of it.
#define FASTCOLL_SLOW_PATH static __device__ __noinline__
#define FASTCOLL_KERNEL __global__ __launch_bounds__(kMaxBlockThreads, 1) void
#define FASTCOLL_ARGUMENT(type) const __grid_constant__ type
#define FASTCOLL_CALL FASTCOLL_ARGUMENT(DeviceCall)
#define FASTCOLL_KERNEL_FN void (*)(const DeviceCall)
#define FASTCOLL_UNROLL _Pragma("unroll")
#define FASTCOLL_NO_UNROLL _Pragma("unroll 1")

namespace fastcoll {

// Polls between two looks at the clock: some 100 us.
inline constexpr int kPollsPerLook = 256;

FASTCOLL_DEVICE uint32_t thread_idx() { return threadIdx.x; }
FASTCOLL_DEVICE uint32_t num_threads() { return blockDim.x; }
FASTCOLL_DEVICE uint32_t block_idx() { return blockIdx.x; }
FASTCOLL_DEVICE uint32_t num_blocks() { return gridDim.x; }

// Every thread of the block is here, and sees the writes of the others.
FASTCOLL_DEVICE void sync_block() { __syncthreads(); }
// The same; whether any thread passed true.
FASTCOLL_DEVICE bool sync_any(bool value) { return __syncthreads_or(value) != 0; }

// Memory that the threads of a block share; one object for each type.
template <class T>
FASTCOLL_DEVICE T& block_shared() {
  __shared__ T object;
  return object;
}

// ---- the stream: a kernel may start before the one before it in its stream is over

// All earlier work of the stream is over, and its writes are there. Nothing happens where the
// launch does not allow an early start. Architectures before 9.0 know none.
FASTCOLL_DEVICE void await_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel of the stream may start when a thread of each block has said so, or has ended.
FASTCOLL_DEVICE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- words that ranks signal with, at system scope

FASTCOLL_DEVICE uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
FASTCOLL_DEVICE uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
FASTCOLL_DEVICE void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
FASTCOLL_DEVICE void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// One atom of 16 bytes.
FASTCOLL_DEVICE ArrivePack load_acquire(const ArrivePack* pack) {
  ArrivePack value;
  asm volatile("{.reg .b128 atom; ld.acquire.sys.global.b128 atom, [%2]; mov.b128 {%0, %1}, atom;}"
               : "=l"(value.slot), "=l"(value.location)
               : "l"(pack)
               : "memory");
  return value;
}
FASTCOLL_DEVICE void store_release(ArrivePack* pack, ArrivePack value) {
  asm volatile(
      "{.reg .b128 atom; mov.b128 atom, {%1, %2}; st.release.sys.global.b128 [%0], atom;}" ::"l"(
          pack),
      "l"(value.slot), "l"(value.location)
      : "memory");
}
FASTCOLL_DEVICE LlPack load_relaxed(const LlPack* pack) {
  LlPack value;
  asm volatile("{.reg .b128 atom; ld.relaxed.sys.global.b128 atom, [%2]; mov.b128 {%0, %1}, atom;}"
               : "=l"(value.data), "=l"(value.slot)
               : "l"(pack)
               : "memory");
  return value;
}
FASTCOLL_DEVICE void store_relaxed(LlPack* pack, LlPack value) {
  asm volatile(
      "{.reg .b128 atom; mov.b128 atom, {%1, %2}; st.relaxed.sys.global.b128 [%0], atom;}" ::"l"(
          pack),
      "l"(value.data), "l"(value.slot)
      : "memory");
}

FASTCOLL_DEVICE StateHalf load_relaxed(const StateHalf* half) {
  StateHalf value;
  uint64_t rest;
  asm volatile("{.reg .b128 atom; ld.relaxed.sys.global.b128 atom, [%2]; mov.b128 {%0, %1}, atom;}"
               : "=l"(value.slot), "=l"(rest)
               : "l"(half)
               : "memory");
  value.count = uint32_t(rest);
  value.mark = uint32_t(rest >> 32);
  return value;
}
FASTCOLL_DEVICE void store_relaxed(StateHalf* half, StateHalf value) {
  asm volatile(
      "{.reg .b128 atom; mov.b128 atom, {%1, %2}; st.relaxed.sys.global.b128 [%0], atom;}" ::"l"(
          half),
      "l"(value.slot), "l"(uint64_t{value.mark} << 32 | value.count)
      : "memory");
}

// Stores `value` in a word of this rank's own memory; returns the value before.
FASTCOLL_DEVICE uint64_t exchange(uint64_t* word, uint64_t value) {
  uint64_t seen;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;"
               : "=l"(seen)
               : "l"(word), "l"(value)
               : "memory");
  return seen;
}
// 0 -> 1, once, in this rank's own memory (peer links may lack atomics); true for the thread that
// did it.
FASTCOLL_DEVICE bool claim(uint64_t* word) {
  uint64_t seen;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, 1;"
               : "=l"(seen)
               : "l"(word)
               : "memory");
  return seen == 0;
}
FASTCOLL_DEVICE void store_release_host(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// ---- data

template <class T>
FASTCOLL_DEVICE T load_data(const std::byte* from) {
  if constexpr (sizeof(T) == sizeof(Pack)) {
    const uint4 value = *reinterpret_cast<const uint4*>(from);
    return T{{value.x, value.y, value.z, value.w}};
  } else {
    return *reinterpret_cast<const T*>(from);
  }
}
template <class T>
FASTCOLL_DEVICE void store_data(std::byte* to, T value) {
  if constexpr (sizeof(T) == sizeof(Pack)) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  } else {
    *reinterpret_cast<T*>(to) = value;
  }
}

// ---- the switch: sums of all regions' values at an offset, and stores into all of them. Kernels
// for older architectures have these bodies too, but no host launches them.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FASTCOLL_MULTIMEM_SUM(type)                                                         \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add." type " {%0, %1, %2, %3}, [%4];" \
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])                             \
               : "l"(from)                                                                  \
               : "memory")
#endif

// Call: SwitchMemory, or a call with regions and their multicast mapping. The offset must be a
// multiple of a pack.
template <DType kDType, class Call>
FASTCOLL_DEVICE Pack multimem_sum(const Call& call, size_t offset_bytes) {
  Pack pack{};
#ifdef FASTCOLL_MULTIMEM_SUM
  uint32_t* w = pack.words;
  const std::byte* from = call.multicast + offset_bytes;
  if constexpr (kDType == DType::float32) FASTCOLL_MULTIMEM_SUM("v4.f32");
  if constexpr (kDType == DType::float16) FASTCOLL_MULTIMEM_SUM("acc::f32.v4.f16x2");
  if constexpr (kDType == DType::bfloat16) FASTCOLL_MULTIMEM_SUM("acc::f32.v4.bf16x2");
#endif
  return pack;
}

template <class Call>
FASTCOLL_DEVICE void multimem_store(const Call& call, size_t offset_bytes, const Pack& pack) {
#ifdef FASTCOLL_MULTIMEM_SUM
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   call.multicast + offset_bytes),
               "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]), "r"(pack.words[3])
               : "memory");
#endif
}

// Of integers the switch reduces one at a time, of 4 or 8 bytes: PTX has no vectors of them. Word
// is the unsigned type of that size. The offset must be a multiple of it.
#ifdef FASTCOLL_MULTIMEM_SUM
#define FASTCOLL_MULTIMEM_WORD(op, bits, code)                               \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." op bits " %0, [%1];" \
               : code(word)                                                  \
               : "l"(from)                                                   \
               : "memory")
// Signs matter to MIN and MAX alone.
#define FASTCOLL_MULTIMEM_WORDS(bits, sign, code)                                \
  if constexpr (kOp == Op::sum) FASTCOLL_MULTIMEM_WORD("add.u", bits, code);     \
  if constexpr (kOp == Op::min) FASTCOLL_MULTIMEM_WORD("min." sign, bits, code); \
  if constexpr (kOp == Op::max) FASTCOLL_MULTIMEM_WORD("max." sign, bits, code); \
  if constexpr (kOp == Op::band) FASTCOLL_MULTIMEM_WORD("and.b", bits, code);    \
  if constexpr (kOp == Op::bor) FASTCOLL_MULTIMEM_WORD("or.b", bits, code);      \
  if constexpr (kOp == Op::bxor) FASTCOLL_MULTIMEM_WORD("xor.b", bits, code)
#endif
template <Op kOp, DType kDType, class Word>
FASTCOLL_DEVICE Word multimem_word(const SwitchMemory& memory, size_t offset_bytes) {
  static_assert(sizeof(Word) == dtype_size(kDType));
  Word word{};
#ifdef FASTCOLL_MULTIMEM_SUM
  const std::byte* from = memory.multicast + offset_bytes;
  if constexpr (kDType == DType::int32) {
    FASTCOLL_MULTIMEM_WORDS("32", "s", "=r");
  }
  if constexpr (kDType == DType::uint32) {
    FASTCOLL_MULTIMEM_WORDS("32", "u", "=r");
  }
  if constexpr (kDType == DType::int64) {
    FASTCOLL_MULTIMEM_WORDS("64", "s", "=l");
  }
  if constexpr (kDType == DType::uint64) {
    FASTCOLL_MULTIMEM_WORDS("64", "u", "=l");
  }
#endif
  return word;
}

template <class Word>
FASTCOLL_DEVICE void multimem_store_word(const SwitchMemory& memory, size_t offset_bytes,
                                         Word word) {
#ifdef FASTCOLL_MULTIMEM_SUM
  std::byte* to = memory.multicast + offset_bytes;
  if constexpr (sizeof(Word) == 4)
    asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
  else asm volatile("multimem.st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
#endif
}
#undef FASTCOLL_MULTIMEM_WORDS
#undef FASTCOLL_MULTIMEM_WORD
#undef FASTCOLL_MULTIMEM_SUM

// A region's address and the switch's address name the same bytes. The memory model promises that
// only for accesses with this fence between them, on their way from release to acquire. The fence
// orders nothing by itself.
FASTCOLL_DEVICE void sync_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// ---- the rest

FASTCOLL_DEVICE uint64_t time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A wait has looked in vain. The simulator lets other fibers run, and reports all waits when
// nothing moves any more.
FASTCOLL_DEVICE void spin(int, Phase, uint64_t, uint64_t) {}

// The bits of Fp16 in cpu/convert.h, in one instruction; only a NaN has another code.
FASTCOLL_DEVICE float widen_fp16(uint16_t code) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
  return value;
}
FASTCOLL_DEVICE uint16_t narrow_fp16(float value) {
  uint16_t code;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
  return value != value ? uint16_t{0x7e00} : code;
}

}  // namespace fastcoll
#endif
