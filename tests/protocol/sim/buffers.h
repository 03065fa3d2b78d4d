// SPDX-License-Identifier: Apache-2.0
// The memory of one rank in one call: private or in its heap, end to end or in parts that lie
// apart.
#pragma once

#include "steps.h"

namespace fastcoll::sim {

inline constexpr unsigned char kFiller = 0xa5;
inline constexpr size_t kMarginBytes = 32;

struct Piece {
  std::byte* begin;
  size_t num_bytes;
};
// By rank, where parts lie apart; else one.
using Pieces = std::vector<Piece>;

inline std::byte* next_pack(std::byte* ptr) {
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  return reinterpret_cast<std::byte*>((address + kPackBytes - 1) / kPackBytes * kPackBytes);
}

struct Buffers {
  reference::Bytes private_input, private_output;
  Pieces given, taken;

  // heap: of the rank, which has heap_bytes. A planted bug: `misplaces` a reduce_scatter in place.
  void place(const Step& step, int rank, std::byte* heap, size_t heap_bytes, bool misplaces) {
    const Placement& where = step.places[size_t(rank)];
    const size_t elem = step.elem_bytes();
    const size_t in_bytes = input_numel(step, rank) * elem;
    const size_t out_bytes = output_numel(step, rank) * elem;
    // In place, either may hold the other.
    const size_t most_bytes = std::max(in_bytes, out_bytes) + kPackBytes;
    given = {{where.symmetric_input ? heap + kMarginBytes : aligned(private_input, most_bytes),
              in_bytes}};
    taken = {{where.symmetric_output ? heap + heap_bytes / 2 + kMarginBytes
                                     : aligned(private_output, most_bytes),
              out_bytes}};
    given[0].begin += where.input_shift_bytes;
    taken[0].begin += where.output_shift_bytes;
    if (where.input_apart)
      given = apart(private_input, step.part_numels(rank, true), elem, where.input_shift_bytes);
    if (where.output_apart)
      taken = apart(private_output, step.part_numels(rank, false), elem, where.output_shift_bytes);
    if (where.in_place) put_in_place(step, rank, misplaces);
  }

  void fill(const Step& step, int rank) const {
    const bool shared_margin =
        step.places[size_t(rank)].in_place && step.verb == Verb::reduce_scatter;
    for (const Piece& piece : taken)
      if (!shared_margin)
        std::memset(piece.begin - kMarginBytes / 2, kFiller, piece.num_bytes + kMarginBytes);
    const size_t elem = step.elem_bytes();
    const uint64_t* code = step.inputs[size_t(rank)].data();
    for (const Piece& piece : given)
      for (size_t at = 0; at < piece.num_bytes; at += elem)
        std::memcpy(piece.begin + at, code++, elem);
  }

  // The output end to end.
  reference::Bytes results() const {
    reference::Bytes all;
    for (const Piece& piece : taken) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(piece.begin);
      all.insert(all.end(), bytes, bytes + piece.num_bytes);
    }
    return all;
  }
  bool margins_intact() const {
    for (const Piece& piece : taken)
      for (size_t i = 0; i < kMarginBytes / 2; ++i)
        if (piece.begin[piece.num_bytes + i] != std::byte{kFiller} ||
            *(piece.begin - 1 - i) != std::byte{kFiller})
          return false;
    return true;
  }

 private:
  static std::byte* aligned(reference::Bytes& bytes, size_t num_bytes) {
    bytes.assign(num_bytes + 2 * kMarginBytes + kPackBytes, kFiller);
    return next_pack(reinterpret_cast<std::byte*>(bytes.data()) + kMarginBytes);
  }
  // The last rank's part first. Each begins elsewhere in a pack.
  static Pieces apart(reference::Bytes& bytes, const std::vector<uint64_t>& numels, size_t elem,
                      size_t shift_bytes) {
    constexpr size_t kBetween = 2 * kMarginBytes + 2 * kPackBytes;
    size_t num_bytes = 0;
    for (const uint64_t numel : numels) num_bytes += numel * elem + kBetween;
    bytes.assign(num_bytes, kFiller);
    Pieces pieces(numels.size());
    auto* at = reinterpret_cast<std::byte*>(bytes.data());
    for (size_t i = numels.size(); i-- > 0;) {
      pieces[i] = {next_pack(at + kMarginBytes) + (i + 1) * shift_bytes % kPackBytes,
                   numels[i] * elem};
      at = pieces[i].begin + pieces[i].num_bytes + kMarginBytes;
    }
    return pieces;
  }
  void put_in_place(const Step& step, int rank, bool misplaces) {
    const Placement& where = step.places[size_t(rank)];
    if (step.verb == Verb::all_gather) {  // my chunk of the output
      std::byte* own = taken[where.output_apart ? size_t(rank) : 0].begin;
      for (int before = 0; before < rank && !where.output_apart; ++before)
        own += input_numel(step, before) * step.elem_bytes();
      given[0].begin = own;
    } else if (step.verb == Verb::reduce_scatter) {  // my chunk of the input
      const size_t part = size_t(misplaces ? (rank + 1) % step.world() : rank);
      taken[0].begin = where.input_apart ? given[part].begin
                                         : given[0].begin + part * step.numel * step.elem_bytes();
    } else {
      taken[0].begin = given[0].begin;
    }
  }
};

}  // namespace fastcoll::sim
