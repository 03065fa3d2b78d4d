// SPDX-License-Identifier: Apache-2.0
// One call as the algorithms see it: the places of its elements, and its cut into segments and
// chunks. The cut follows from the plan alone, so it is the same on every rank.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/group.h"
#include "cpu/operands.h"
#include "cpu/reduce.h"

namespace fastcoll {

class Program;

struct Span {
  size_t start;  // first element, counted in a part of the message
  size_t numel;
};

template <class P>
struct Call {
  Group<P>& group;
  const Plan& plan;
  const std::byte* input;
  std::byte* output;
  // In place of input and output: for verbs that only move data; for plans that take lists, and for
  // those that take strided tensors. In a reduce_scatter by one_shot or two_shot the parts of the
  // input may lie apart, too.
  const Parts* parts = nullptr;
  const List* list = nullptr;
  const StridedPair* strided = nullptr;
  const Program* program = nullptr;  // of a plan that carries out a schedule

  int rank() const { return group.rank(); }
  int world_size() const { return group.world_size(); }
  size_t elem_bytes() const { return plan.elem_bytes(); }
  bool scatters() const { return plan.verb == Verb::reduce_scatter; }
  // Whether a rank gets a result.
  bool gets(int rank) const { return plan.verb != Verb::reduce || rank == plan.root; }
  // Elements of a rank's whole input.
  size_t input_numel() const {
    return verb_gives_parts(plan.verb) ? plan.numel * size_t(world_size()) : plan.numel;
  }
  // Of a rank's input that has a part for each rank: where an element of one of them lies.
  size_t input_start(int part, size_t start) const {
    return (scatters() ? size_t(part) * plan.numel : 0) + start;
  }
  // The same of its output, which has a part for each rank in an all_gather alone.
  size_t output_start(int part, size_t start) const {
    return (plan.verb == Verb::all_gather ? size_t(part) * plan.numel : 0) + start;
  }
  // Whether the elements lie apart: then no address gives them, and only the functions below find
  // them.
  bool lies_apart() const { return list || strided; }
  const std::byte* input_at(int part, size_t start) const {
    if (parts) return parts->inputs[size_t(part)].ptr + start * elem_bytes();
    return input + input_start(part, start) * elem_bytes();
  }

  // visit(input, output, numel) for every stretch of elements that lies in one tensor. `part`: of
  // the input in a reduce_scatter, of the output in an all_gather.
  template <class Visit>
  void each_stretch(int part, Span span, Visit visit) const {
    if (span.numel == 0) return;
    const size_t elem = elem_bytes();
    if (!list)
      return visit(input_at(part, span.start), output + output_start(part, span.start) * elem,
                   span.numel);
    const size_t in_part = scatters() ? size_t(part) : 0;
    const size_t out_part = plan.verb == Verb::all_gather ? size_t(part) : 0;
    auto piece = std::upper_bound(list->begin(), list->end(), span.start,
                                  [](size_t at, const Piece& next) { return at < next.start; });
    for (--piece; span.numel != 0; ++piece) {
      const size_t at = span.start - piece->start;
      const size_t numel = std::min(span.numel, piece->numel - at);
      visit(piece->input + (in_part * piece->numel + at) * elem,
            piece->output + (out_part * piece->numel + at) * elem, numel);
      span = {span.start + numel, span.numel - numel};
    }
  }
  void read_input(std::byte* to, int part, Span span) const {
    if (strided) [[unlikely]]
      return read_strided(to, part, span);
    each_stretch(part, span, [&](const std::byte* in, std::byte*, size_t numel) {
      group.staging_copy()(to, in, numel * elem_bytes());
      to += numel * elem_bytes();
    });
  }
  void write_output(int part, Span span, const std::byte* from) const {
    if (strided) [[unlikely]]
      return strided->output.write(output_start(part, span.start), from, span.numel);
    each_stretch(part, span, [&](const std::byte*, std::byte* out, size_t numel) {
      copy_bytes(out, from, numel * elem_bytes());
      from += numel * elem_bytes();
    });
  }
  // This rank's input to its own part of the output.
  void copy_own() const {
    if (strided) [[unlikely]]
      return copy_strided();
    each_stretch(rank(), {0, plan.numel}, [&](const std::byte* in, std::byte* out, size_t numel) {
      if (in != out) std::memmove(out, in, numel * elem_bytes());
    });
  }
  // The whole input end to end: where it lies, or put together in `room`.
  FASTCOLL_HOT const std::byte* whole_input(std::byte* room) const {
    if (!lies_apart() && !parts) [[likely]]
      return input;
    return put_together(room);
  }
  // Reduce my part. srcs[rank()] and, where I get a result, dsts[0] are filled in here; the others
  // are moved on in a list.
  void reduce(Span span, void** dsts, int num_dsts, const void** srcs) const {
    if (span.numel == 0) return;
    if (lies_apart()) [[unlikely]]
      return reduce_apart(span, dsts, num_dsts, srcs);
    srcs[rank()] = input_at(rank(), span.start);
    if (gets(rank())) dsts[0] = output + span.start * elem_bytes();
    const ReduceFn fn = reduce_fn(plan.dtype, plan.op);
    fn({dsts, num_dsts, srcs, world_size(), span.numel, world_size()});
  }

 private:
  // ---- out of the way of the smallest calls, which feel the least work ----
  [[gnu::noinline]] const std::byte* put_together(std::byte* room) const {
    const size_t num_parts = scatters() ? size_t(world_size()) : 1;
    for (size_t part = 0; part < num_parts; ++part)
      read_input(room + part * plan.numel * elem_bytes(), int(part), {0, plan.numel});
    return room;
  }
  [[gnu::noinline]] void read_strided(std::byte* to, int part, Span span) const {
    each_piece(span, [&](std::byte* piece, Span at) {
      strided->input.read(piece, input_start(part, at.start), at.numel);
      group.staging_copy()(to + (at.start - span.start) * elem_bytes(), piece,
                           at.numel * elem_bytes());
    });
  }
  [[gnu::noinline]] void copy_strided() const {
    each_piece({0, plan.numel}, [&](std::byte* piece, Span at) {
      strided->input.read(piece, at.start, at.numel);
      strided->output.write(output_start(rank(), at.start), piece, at.numel);
    });
  }
  [[gnu::noinline]] void reduce_apart(Span span, void** dsts, int num_dsts,
                                      const void** srcs) const {
    const ReduceFn fn = reduce_fn(plan.dtype, plan.op);
    const auto reduce_some = [&](const std::byte* in, std::byte* out, size_t numel) {
      srcs[rank()] = in;
      if (gets(rank())) dsts[0] = out;
      fn({dsts, num_dsts, srcs, world_size(), numel, world_size()});
      for (int peer = 0; peer < world_size(); ++peer)
        srcs[peer] = static_cast<const std::byte*>(srcs[peer]) + numel * elem_bytes();
      for (int i = 0; i < num_dsts; ++i)
        dsts[i] = static_cast<std::byte*>(dsts[i]) + numel * elem_bytes();
    };
    if (list) return each_stretch(rank(), span, reduce_some);
    each_piece(span, [&](std::byte* piece, Span at) {
      strided->input.read(piece, input_start(rank(), at.start), at.numel);
      reduce_some(piece, piece, at.numel);
      if (gets(rank())) strided->output.write(at.start, piece, at.numel);
    });
  }
  // visit(room, elements) for those of a strided tensor, some at a time.
  template <class Visit>
  void each_piece(Span span, Visit visit) const {
    constexpr size_t kPieceBytes = size_t{64} << 10;  // several rows of a transposed matrix
    const size_t most = std::min(span.numel, kPieceBytes / elem_bytes());
    const auto room = std::make_unique_for_overwrite<std::byte[]>(most * elem_bytes());
    for (size_t at = 0; at < span.numel; at += most)
      visit(room.get(), Span{span.start + at, std::min(most, span.numel - at)});
  }
};

constexpr size_t div_up(size_t a, size_t b) { return (a + b - 1) / b; }
constexpr size_t round_up(size_t a, size_t b) { return div_up(a, b) * b; }

// A reduction's input, cut into num_segments segments of world_size chunks; chunk j is reduced by
// rank j. Every chunk starts on a line of its own in the slot, so ranks never share one. The same
// for every rank: computed from the plan alone.
class Chunks {
 public:
  // slot_elem_bytes: the bytes of one element in a slot.
  template <class P>
  Chunks(const Call<P>& call, size_t slot_elem_bytes)
      : scatters_(call.scatters()), numel_(call.plan.numel) {
    const size_t world = size_t(call.world_size());
    const size_t line = kLineBytes / std::min(call.elem_bytes(), kLineBytes);
    const size_t most =
        call.plan.segment_bytes / world / kLineBytes * kLineBytes / slot_elem_bytes / line * line;
    const size_t chunk_numel = scatters_ ? numel_ : div_up(numel_, world);
    num_segments_ = std::max<size_t>(1, div_up(chunk_numel, most));
    // Equal segments, rather than full ones and a small rest.
    stride_ = round_up(div_up(chunk_numel, num_segments_), line);
    world_ = world;
  }
  size_t num_segments() const { return num_segments_; }
  size_t stride() const { return stride_; }  // elements from one chunk to the next in a slot
  // Of part j in a reduce_scatter.
  Span chunk(int j, size_t segment_idx) const {
    const size_t number = scatters_ ? segment_idx : segment_idx * world_ + size_t(j);
    const size_t start = std::min(number * stride_, numel_);
    return {start, std::min(stride_, numel_ - start)};
  }

 private:
  bool scatters_;
  size_t numel_;
  size_t world_;
  size_t num_segments_;
  size_t stride_;
};

}  // namespace fastcoll
