// SPDX-License-Identifier: Apache-2.0
// Copies of plain bytes, through the caches or past them. The sizes from which each way wins are
// measured here, since memcpy derives its own from made-up cache sizes.
//
// On AMD's CPUs memcpy is not called for more than a few lines. Up to 2.39, glibc copies those by
// "rep movsb". Up to Zen 4 that is slower than vectors. It takes up to 16 times as long where the
// destination lies just behind the source, modulo a page (glibc's bug 30994). On Zen 5 it is the
// quickest way from a few KiB on, wherever the two lie. There one core copies 64 KiB, which a peer
// has just written, at 86 GB/s; by AVX2 or AVX-512 at 67 to 69. The instruction is written out
// here, since memcpy takes stores past the caches from a made-up size on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace fastcoll {

// The least bytes from which this CPU copies in each way.
struct CopyWays {
  static constexpr size_t kNever = ~size_t{0};

  size_t by_vectors = kNever;  // AVX2, from kLeastByVectors on or never
  size_t by_string = kNever;   // "rep movsb"
  // Past the caches, a rank's own part. Measured side by side in all_to_all on a Zen 4: a tie at
  // half of it. On a Zen 5 it is a tie up to twice of it.
  size_t past_caches = size_t{4} << 20;
  // Past the caches, a part or message that a peer has written. On a Xeon parts of 32 MiB took 14 %
  // less time, and 16 MiB 5 % more.
  size_t fetched_past_caches = size_t{32} << 20;
  // A message is copied once, out of its sender's memory, where its receiver sends one as large. In
  // chunks both CPUs would copy both messages twice. By turns on a Xeon, 1 MiB each way took 150 us
  // in chunks and takes 118, 16 MiB 2.8 and 1.8 ms. At 256 KiB it is 30 and 28 us.
  size_t exchanged = size_t{256} << 10;
  // A rank writes its next message to a peer where it has read one (p2p_bays.h). Two ranks of a
  // group stage so, too (slots.h), and have to agree on it. Measured on an Ice Lake and a Zen 4,
  // where lines that the peer's cache holds take long to write. By turns on the Zen 4, an exchange
  // of 16 KiB took 1.4 us and takes 0.9, and of 64 KiB 3.6 and 3.1.
  bool answers_in_place = false;
  // Long messages go round in more memory. Lines of a short ring are written again while the
  // reader's cache holds them. The ranks of a node have to agree on it. On a Zen 4 with near CPUs a
  // broadcast of 2 MiB took 172 us in four slots, and takes 65 in twelve. Other CPUs show no such
  // step where few slots begin.
  bool in_long_rings = false;
  // The line of a message's number is fetched while its bytes are copied. On an Ice Lake an
  // exchange of 64 bytes took 0.37 us without, and takes 0.32. A Zen 4 gains nothing.
  bool fetches_ahead = false;
};

constexpr size_t kLeastByVectors = 2048;  // glibc takes "rep movsb" from 2112 bytes on

inline CopyWays copy_ways_of_this_cpu() {
  CopyWays ways;
#if defined(__x86_64__)
  __builtin_cpu_init();
  ways.answers_in_place = __builtin_cpu_is("intel") || __builtin_cpu_is("amd");
  ways.fetches_ahead = __builtin_cpu_is("intel");
  if (!__builtin_cpu_is("amd")) return ways;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  const unsigned extended_model = eax >> 16 & 0xf;
  constexpr unsigned kZen4Family = 0x19, kZen5Family = 0x1a;  // Zen 3 has Zen 4's
  constexpr unsigned kZen4Models = 1U << 0x1 | 1U << 0x6 | 1U << 0x7 | 1U << 0xa;
  if (__builtin_cpu_supports("avx2")) ways.by_vectors = kLeastByVectors;
  ways.in_long_rings = family == kZen4Family && (kZen4Models >> extended_model & 1) != 0;
  ways.exchanged = CopyWays::kNever;  // the kernel copies slowly: all come in chunks
  // By turns on a Zen 3, parts of 8 MiB take 9 to 28 % less time. Parts of 4 MiB take up to 13 %
  // more. On a Zen 5 a broadcast of 16 MiB takes 306 us so. Were it 32 MiB here, 345 us.
  ways.fetched_past_caches = size_t{8} << 20;
  if (family >= kZen5Family) ways.by_string = size_t{8} << 10;
#endif
  return ways;
}

// A variable, as tests try all ways, and count what goes through memcpy.
inline CopyWays copy_ways = copy_ways_of_this_cpu();

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // TSan does not see such copies
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

// A peer may see its stores in any order, but all of them before any store behind it: Intel's SDM,
// volume 3, "Fast-String Operation and Out-of-Order Stores". On AMD's CPUs glibc's
// memcpy relies on that, too. So a signal needs no fence before it.
inline void copy_by_string(void* dst, const void* src, size_t num_bytes) {
#if defined(__SANITIZE_ADDRESS__)  // it does not see such copies
  std::memcpy(dst, src, num_bytes);
#else
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(num_bytes)::"memory");
#endif
}
#endif

// An empty message has a null address, and memcpy forbids null even for no bytes.
inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  if (num_bytes >= kLeastByVectors) {
    if (num_bytes >= copy_ways.by_string) return copy_by_string(dst, src, num_bytes);
    if (num_bytes >= copy_ways.by_vectors) return copy_by_vectors(dst, src, num_bytes);
  }
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

// Fetch the line of a word that is written soon, and that another core may have read.
inline void fetch_to_write([[maybe_unused]] void* word) {
#if defined(__x86_64__)  // CPUs without the instruction skip it
  if (copy_ways.fetches_ahead) asm volatile("prefetchw %0" ::"m"(*static_cast<std::byte*>(word)));
#endif
}

// Some bytes of a part or message, past the caches if all of it has least_bytes or more.
inline void copy_some(void* dst, const void* src, size_t num_bytes, size_t all_bytes,
                      size_t least_bytes) {
  if (all_bytes < least_bytes) copy_bytes(dst, src, num_bytes);
  else copy_past_caches(dst, src, num_bytes);
}

}  // namespace fastcoll
