// SPDX-License-Identifier: Apache-2.0
// Packs from and to memory of any alignment, and the last, partial pack of a message. No byte
// behind the message is read or written.
#pragma once

#include "prim.cuh"

namespace fastcoll {

FASTCOLL_DEVICE bool is_aligned(const std::byte* ptr, size_t num_bytes) {
  return reinterpret_cast<uintptr_t>(ptr) % num_bytes == 0;
}

// The first num_bytes of a pack, in pieces of type T; the rest is zero.
template <class T>
FASTCOLL_DEVICE Pack load_pieces(const std::byte* from, uint64_t num_bytes) {
  constexpr int kPerWord = 4 / sizeof(T);
  Pack pack{};
  FASTCOLL_UNROLL
  for (int i = 0; i < int(kPackBytes / sizeof(T)); ++i) {
    if (i * sizeof(T) < num_bytes) {
      const uint32_t piece = load_data<T>(from + i * sizeof(T));
      pack.words[i / kPerWord] |= piece << (i % kPerWord * 8 * int(sizeof(T)));
    }
  }
  return pack;
}

template <class T>
FASTCOLL_DEVICE void store_pieces(std::byte* to, const Pack& pack, uint64_t num_bytes) {
  constexpr int kPerWord = 4 / sizeof(T);
  FASTCOLL_UNROLL
  for (int i = 0; i < int(kPackBytes / sizeof(T)); ++i) {
    if (i * sizeof(T) < num_bytes)
      store_data<T>(to + i * sizeof(T),
                    T(pack.words[i / kPerWord] >> (i % kPerWord * 8 * int(sizeof(T)))));
  }
}

// num_bytes: the rest of the message, from `from` on; more than a pack counts as a pack.
FASTCOLL_DEVICE Pack load_any(const std::byte* from, uint64_t num_bytes) {
  if (num_bytes < kPackBytes) return load_pieces<uint8_t>(from, num_bytes);
  if (is_aligned(from, kPackBytes)) return load_data<Pack>(from);
  if (is_aligned(from, 4)) return load_pieces<uint32_t>(from, kPackBytes);
  if (is_aligned(from, 2)) return load_pieces<uint16_t>(from, kPackBytes);
  return load_pieces<uint8_t>(from, kPackBytes);
}

FASTCOLL_DEVICE void store_any(std::byte* to, const Pack& pack, uint64_t num_bytes) {
  if (num_bytes < kPackBytes) return store_pieces<uint8_t>(to, pack, num_bytes);
  if (is_aligned(to, kPackBytes)) return store_data<Pack>(to, pack);
  if (is_aligned(to, 4)) return store_pieces<uint32_t>(to, pack, kPackBytes);
  if (is_aligned(to, 2)) return store_pieces<uint16_t>(to, pack, kPackBytes);
  store_pieces<uint8_t>(to, pack, kPackBytes);
}

// The same for the data of an LL pack.
FASTCOLL_DEVICE uint64_t load_ll(const std::byte* from, uint64_t num_bytes) {
  if (num_bytes >= kLlBytes && is_aligned(from, kLlBytes)) return load_data<uint64_t>(from);
  const uint64_t bytes = num_bytes < kLlBytes ? num_bytes : kLlBytes;
  const Pack pack = is_aligned(from, 4) && bytes == kLlBytes ? load_pieces<uint32_t>(from, bytes)
                                                             : load_pieces<uint8_t>(from, bytes);
  return uint64_t{pack.words[1]} << 32 | pack.words[0];
}

FASTCOLL_DEVICE void store_ll(std::byte* to, uint64_t data, uint64_t num_bytes) {
  if (num_bytes >= kLlBytes && is_aligned(to, kLlBytes)) return store_data<uint64_t>(to, data);
  const uint64_t bytes = num_bytes < kLlBytes ? num_bytes : kLlBytes;
  const Pack pack{{uint32_t(data), uint32_t(data >> 32), 0, 0}};
  if (is_aligned(to, 4) && bytes == kLlBytes) return store_pieces<uint32_t>(to, pack, bytes);
  store_pieces<uint8_t>(to, pack, bytes);
}

struct Span {
  uint64_t start, num_bytes;
};

// Stores the part of a pack that falls into a window of a message. The pack lies at `at` in the
// message, and `to` is the window's memory.
FASTCOLL_DEVICE void store_clipped(std::byte* to, Span window, uint64_t at, const Pack& pack,
                                   uint64_t num_bytes) {
  const uint64_t end = window.start + window.num_bytes;
  const uint64_t size = num_bytes < kPackBytes ? num_bytes : kPackBytes;
  if (at >= window.start && at + size <= end)
    return store_any(to + (at - window.start), pack, num_bytes);
  FASTCOLL_UNROLL
  for (int i = 0; i < int(kPackBytes); ++i) {
    const uint64_t byte = at + uint64_t(i);
    if (uint64_t(i) < size && byte >= window.start && byte < end)
      store_data<uint8_t>(to + (byte - window.start), uint8_t(pack.words[i / 4] >> (i % 4 * 8)));
  }
}

// f(offset_bytes, bytes_left) for every pack of a tile, by all threads of the block: each takes
// every num_threads()-th.
template <class F>
FASTCOLL_DEVICE void for_packs(uint64_t num_bytes, F f) {
  const uint64_t stride = uint64_t{num_threads()} * kPackBytes;
  for (uint64_t at = uint64_t{thread_idx()} * kPackBytes; at < num_bytes; at += stride)
    f(at, num_bytes - at);
}

// Packs that a thread loads before it stores the first of them: it waits for memory once for all.
// The compiler may not do that by itself, as for all it knows a store changes what is loaded next.
// With six, multimem no longer does with a thread's 128 registers; with eight, most kernels do not.
inline constexpr int kPacksAtOnce = 4;

// One tile of copy_tiles.
struct TileCopy {
  std::byte* to;
  const std::byte* from;
  uint64_t num_bytes;
};

// The packs of several tiles in a row, of which a thread takes every num_threads()-th. So it loads
// from several ranks at once where a tile has few packs for each thread. A tile has at most
// 2 GiB: offsets of 64 bits took two_shot more registers than a thread has on sm_100.
class PackWalk {
 public:
  FASTCOLL_DEVICE PackWalk(int num_tiles, uint32_t tile_bytes)
      : num_tiles_(num_tiles),
        tile_bytes_((tile_bytes + kPackBytes - 1) / kPackBytes * kPackBytes),
        at_(thread_idx() * kPackBytes) {
    settle();
  }
  FASTCOLL_DEVICE bool done() const { return tile_ >= num_tiles_; }
  FASTCOLL_DEVICE int tile() const { return tile_; }
  FASTCOLL_DEVICE uint32_t at() const { return at_; }  // the pack's offset in its tile
  FASTCOLL_DEVICE void go_on() {
    at_ += num_threads() * kPackBytes;
    settle();
  }

 private:
  FASTCOLL_DEVICE void settle() {
    for (; at_ >= tile_bytes_ && tile_ < num_tiles_; ++tile_) at_ -= tile_bytes_;
  }

  int num_tiles_, tile_ = 0;
  uint32_t tile_bytes_, at_;
};

// Copies tiles by all threads of the block. copy_of(i), a TileCopy, is tile i's: none has more than
// most_bytes.
template <class CopyOf>
FASTCOLL_DEVICE void copy_tiles(int num_tiles, uint32_t most_bytes, CopyOf copy_of) {
  for (PackWalk walk(num_tiles, most_bytes); !walk.done();) {
    PackWalk again = walk;
    std::byte* to[kPacksAtOnce];
    const std::byte* from[kPacksAtOnce];
    bool exists[kPacksAtOnce], plain = true;
    FASTCOLL_UNROLL
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const TileCopy tile = copy_of(walk.done() ? 0 : walk.tile());
      exists[i] = !walk.done() && walk.at() < tile.num_bytes;
      to[i] = tile.to + walk.at();
      from[i] = tile.from + walk.at();
      plain = plain &&
              (!exists[i] || (tile.num_bytes - walk.at() >= kPackBytes &&
                              is_aligned(to[i], kPackBytes) && is_aligned(from[i], kPackBytes)));
      walk.go_on();
    }
    if (plain) {
      Pack packs[kPacksAtOnce];
      FASTCOLL_UNROLL
      for (int i = 0; i < kPacksAtOnce; ++i)
        if (exists[i]) packs[i] = load_data<Pack>(from[i]);
      FASTCOLL_UNROLL
      for (int i = 0; i < kPacksAtOnce; ++i)
        if (exists[i]) store_data<Pack>(to[i], packs[i]);
      continue;
    }
    FASTCOLL_NO_UNROLL
    for (int i = 0; i < kPacksAtOnce && !again.done(); ++i, again.go_on()) {
      const TileCopy tile = copy_of(again.tile());
      if (again.at() >= tile.num_bytes) continue;
      const uint64_t left = tile.num_bytes - again.at();
      store_any(tile.to + again.at(), load_any(tile.from + again.at(), left), left);
    }
  }
}

// Takes the packs of a tile, by all threads of the block. Where is_plain(at, left) holds, which
// takes a pack that lies aligned, plain(at, pack) stores a pack by single instructions; elsewhere
// any(at, pack, left) does.
template <class IsPlain, class Plain, class Any>
FASTCOLL_DEVICE void take_packs(const std::byte* from, uint32_t num_bytes, IsPlain is_plain,
                                Plain plain, Any any) {
  const uint32_t stride = num_threads() * kPackBytes;
  for (uint32_t at = thread_idx() * kPackBytes; at < num_bytes; at += kPacksAtOnce * stride) {
    bool exists[kPacksAtOnce], all_plain = true;
    FASTCOLL_UNROLL
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const uint32_t place = at + uint32_t(i) * stride;
      exists[i] = place < num_bytes;
      all_plain = all_plain && (!exists[i] || is_plain(place, num_bytes - place));
    }
    if (all_plain) {
      Pack packs[kPacksAtOnce];
      FASTCOLL_UNROLL
      for (int i = 0; i < kPacksAtOnce; ++i)
        if (exists[i]) packs[i] = load_data<Pack>(from + at + uint32_t(i) * stride);
      FASTCOLL_UNROLL
      for (int i = 0; i < kPacksAtOnce; ++i)
        if (exists[i]) plain(at + uint32_t(i) * stride, packs[i]);
      continue;
    }
    FASTCOLL_NO_UNROLL
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const uint32_t place = at + uint32_t(i) * stride;
      const uint32_t left = num_bytes - place;
      if (place < num_bytes) any(place, load_any(from + place, left), left);
    }
  }
}

FASTCOLL_DEVICE void copy_tile(std::byte* to, const std::byte* from, uint64_t num_bytes) {
  copy_tiles(1, uint32_t(num_bytes), [&](int) { return TileCopy{to, from, num_bytes}; });
}

}  // namespace fastcoll
