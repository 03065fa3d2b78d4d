// SPDX-License-Identifier: Apache-2.0
// Copies of plain bytes, through the caches or past them. The size from which stores past the
// caches win is measured here, since memcpy derives its own from made-up cache sizes.
//
// On AMD's CPUs memcpy is not called for more than a few lines. Up to 2.39, glibc copies those by
// "rep movsb", which is slower than vectors there. It takes up to 16 times as long where the
// destination lies just behind the source, modulo a page (glibc's bug 30994).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastcoll {

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // TSan does not see such copies
// A variable, as tests try both ways, and count what goes through memcpy.
inline bool copies_by_vectors = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx2");
}();
constexpr size_t kLeastByVectors = 2048;  // glibc takes "rep movsb" from 2112 bytes on

// At least kLeastByVectors bytes. The last step covers the rest, and bytes that are there by then.
[[gnu::target("avx2"), gnu::noinline]] inline void copy_by_vectors(void* dst, const void* src,
                                                                   size_t num_bytes) {
  constexpr size_t kStep = 4 * sizeof(__m256i);
  for (size_t at = 0; at < num_bytes; at += kStep) {
    const size_t start = std::min(at, num_bytes - kStep);
    auto* from = reinterpret_cast<const __m256i*>(static_cast<const std::byte*>(src) + start);
    auto* to = reinterpret_cast<__m256i*>(static_cast<std::byte*>(dst) + start);
    const __m256i first = _mm256_loadu_si256(from), second = _mm256_loadu_si256(from + 1);
    const __m256i third = _mm256_loadu_si256(from + 2), fourth = _mm256_loadu_si256(from + 3);
    _mm256_storeu_si256(to, first);
    _mm256_storeu_si256(to + 1, second);
    _mm256_storeu_si256(to + 2, third);
    _mm256_storeu_si256(to + 3, fourth);
  }
}
#else
inline bool copies_by_vectors = false;
#endif

// An empty message has a null address, and memcpy forbids null even for no bytes.
inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  if (num_bytes >= kLeastByVectors && copies_by_vectors)
    return copy_by_vectors(dst, src, num_bytes);
#endif
  if (num_bytes != 0) std::memcpy(dst, src, num_bytes);
}

// The same past the caches, for lines that no cache holds. The written lines are not read first,
// which saves a third of a copy's traffic with memory. The same is done by memcpy, but only from a
// size that it derives from a whole machine's cache. Hypervisors make up hundreds of MiB there. Not
// for a small source that a peer has just written, which measured slower: its lines come late, and
// such stores can't wait for them.
inline void copy_past_caches(void* dst, const void* src, size_t num_bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // TSan does not see such stores
  constexpr size_t kLine = 64, kVector = sizeof(__m128i);
  auto* to = static_cast<std::byte*>(dst);
  auto* from = static_cast<const std::byte*>(src);
  size_t at = std::min(num_bytes, (kLine - uintptr_t(to) % kLine) % kLine);
  copy_bytes(to, from, at);
  for (; at + kLine <= num_bytes; at += kLine) {  // parts of a line would be written one by one
    for (size_t i = at; i < at + kLine; i += kVector)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  copy_bytes(to + at, from + at, num_bytes - at);
  _mm_sfence();  // orders such stores before the signal after which peers read
#else
  copy_bytes(dst, src, num_bytes);  // other CPUs see by themselves that whole lines are written
#endif
}

// Measured side by side in all_to_all on an AMD Zen 4: from here on it wins, a tie at half of it.
constexpr size_t kPastCachesBytes = size_t{4} << 20;

// From here on it wins for a part or message that a peer has written, too. Measured by turns, on an
// AMD Zen 3: parts of 8 MiB take 9 to 28 % less time. Parts of 4 MiB take up to 13 % more. On a
// Xeon parts of 32 MiB took 14 % less, and 16 MiB 5 % more.
inline const size_t kFetchedPastCachesBytes = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return size_t{8} << 20;
#endif
  return size_t{32} << 20;
}();

// From here on a message is copied once, out of its sender's memory, where its receiver sends one
// as large. In chunks both CPUs would copy both messages twice. By turns on a Xeon, 1 MiB each
// way took 150 us in chunks and takes 118, 16 MiB 2.8 and 1.8 ms. At 256 KiB it is 30 and 28 us. On
// AMD's CPUs the kernel's copies are slow: there all come in chunks. A variable, as tests set it.
inline size_t least_exchanged_bytes = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return ~size_t{0};
#endif
  return size_t{256} << 10;
}();

// Some bytes of a part or message, past the caches if all of it has least_bytes or more.
inline void copy_some(void* dst, const void* src, size_t num_bytes, size_t all_bytes,
                      size_t least_bytes) {
  if (all_bytes < least_bytes) copy_bytes(dst, src, num_bytes);
  else copy_past_caches(dst, src, num_bytes);
}

}  // namespace fastcoll
