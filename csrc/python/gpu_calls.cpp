// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_calls.h"

#include "python/gpu_start.h"
#include "python/gpu_work.h"
#include "python/prepare_parts.h"
#include "python/prepare_tensors.h"

namespace fastcoll {

namespace {

// Where the parts of a side lie end to end; none if they don't. Empty ones may lie anywhere.
std::optional<std::byte*> in_one_piece(std::span<const Part> parts) {
  std::byte *begin = nullptr, *end = nullptr;
  for (const Part& part : parts) {
    if (part.num_bytes == 0) continue;
    if (begin && part.ptr != end) return std::nullopt;
    if (!begin) begin = part.ptr;
    end = part.ptr + part.num_bytes;
  }
  return begin;
}

// As DeviceCall::counts.
std::vector<uint64_t> counts_of(const PartsCall& call, const PartsKind& kind, const Parts& parts) {
  const size_t elem_bytes = dtype_size(kind.dtype);
  const auto world = size_t(call.world_size);
  std::vector<uint64_t> counts(2 * world);
  for (size_t rank = 0; rank < world; ++rank) {
    // An all_gather gives every rank the same.
    const Part& to = parts.inputs[verb_gives_parts(call.verb) ? rank : size_t(call.rank)];
    counts[rank] = to.num_bytes / elem_bytes;
    counts[world + rank] = parts.outputs[rank].num_bytes / elem_bytes;
  }
  return counts;
}

// A kernel takes all parts of a side in one piece. Python copies the others.
Prepared prepare_pieces(const OnGpu& side, FastVerb verb, const Args& args, Op op, void* stream,
                        std::vector<uint64_t>& counts) {
  Parts parts;
  const auto finish = [&](const PartsCall& call, const PartsKind& kind, const Plan& plan) {
    for (const auto views : {call.inputs, call.outputs})
      for (const TensorView& view : views)
        if (!side.calls.is_known_use(view.ptr, stream)) return Prepared{};
    // Of a side of lists, or of tensors to be cut. The others have one tensor, or none.
    const auto place = [&](std::span<const TensorView> views, bool has_parts,
                           const std::array<Part, kMaxWorld>& listed) -> std::optional<std::byte*> {
      if (views.empty()) return nullptr;
      if (!has_parts || call.cuts) return views[0].ptr;
      return in_one_piece({listed.data(), size_t(call.world_size)});
    };
    const auto input = place(call.inputs, verb_gives_parts(call.verb), parts.inputs);
    const auto output = place(call.outputs, verb_gets_parts(call.verb), parts.outputs);
    if (!input || !output) return Prepared{};
    if (kind.splits != 0) counts = counts_of(call, kind, parts);
    return Prepared{plan, *input, *output, kind.num_bytes};
  };
  return prepare_parts(side, verb, args, op, parts, finish);
}

}  // namespace

PreparedOnGpu prepare_on_gpu(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                             bool beside) {
  GpuCalls* calls = group.gpu_calls();
  if (!calls || group.traces()) return {};
  const std::optional<StreamsOnGpu> streams = streams_of(*calls, beside);
  if (!streams) return {};
  const OnGpu side{group, *calls};
  PreparedOnGpu prepared{{}, streams->stream, streams->current, {}};
  Prepared& call = prepared.call;
  call = signature_of(verb).kind == VerbKind::parts
             ? prepare_pieces(side, verb, args, op, prepared.stream, prepared.counts)
             : prepare_tensors(side, verb, args, op);
  if (!call.is_fast() || call.num_bytes == 0 ||
      !calls->may_start(group, call.input, call.output, prepared.stream))
    return {};
  return prepared;
}

void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s) {
  GpuCalls& calls = *group.gpu_calls();
  const Prepared& call = prepared.call;
  calls.note(call.plan);
  const DeviceOperands operands{static_cast<const std::byte*>(call.input),
                                static_cast<std::byte*>(call.output), prepared.counts};
  start(calls, prepared.stream, limit_of(calls, timeout_s), call.plan, operands);
}

PyObject* start_beside(const Caller& caller, const PreparedOnGpu& prepared, const Args& args,
                       PyObject* outputs) {
  Owned work(new_gpu_work(caller, outputs, -1));
  GpuCalls& calls = *caller.group.gpu_calls();
  follow(calls, prepared.current);
  start_on_gpu(caller.group, prepared, args.timeout_s);
  PyObject* const works[] = {work.get()};
  begin_gpu_works(works);
  keep_all_for(calls, args[kTensor]);
  keep_all_for(calls, args[kSecond]);
  return work.release();
}

}  // namespace fastcoll
