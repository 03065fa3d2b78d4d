// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_calls.h"

#include "cuda/call.h"
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

// Where the parts lie that a side has: end to end from here on, or each by itself, in `apart`. No
// place if the kernel can't take them so.
template <class Byte>
std::optional<std::byte*> place(const PartsCall& call, const Plan& plan,
                                const std::array<Part, kMaxWorld>& side,
                                std::vector<Byte*>& apart) {
  const std::span<const Part> parts(side.data(), size_t(call.world_size));
  const std::optional<std::byte*> begin = in_one_piece(parts);
  if (begin || !takes_parts_apart(plan.algorithm)) return begin;
  for (const Part& part : parts) apart.push_back(part.ptr);
  return nullptr;
}

// Python copies parts for kernels that need them end to end.
Prepared prepare_pieces(const OnGpu& side, FastVerb verb, const Args& args, Op op, void* stream,
                        PartsOnGpu& found) {
  Parts parts;
  const auto finish = [&](const PartsCall& call, const PartsKind& kind, const Plan& plan) {
    for (const auto views : {call.inputs, call.outputs})
      for (const TensorView& view : views)
        if (!side.calls.is_known_use(view.ptr, stream)) return Prepared{};
    // Of a side of one tensor, which may be cut; or of none.
    const auto first = [](std::span<const TensorView> views) -> std::optional<std::byte*> {
      return views.empty() ? nullptr : views[0].ptr;
    };
    const bool gives = !call.cuts && verb_gives_parts(call.verb) && !call.inputs.empty();
    const bool gets = !call.cuts && verb_gets_parts(call.verb) && !call.outputs.empty();
    const auto input = gives ? place(call, plan, parts.inputs, found.input) : first(call.inputs);
    const auto output = gets ? place(call, plan, parts.outputs, found.output) : first(call.outputs);
    if (!input || !output) return Prepared{};
    if (kind.splits != 0) found.counts = counts_of(call, kind, parts);
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
             ? prepare_pieces(side, verb, args, op, prepared.stream, prepared.parts)
             : prepare_tensors(side, verb, args, op);
  if (!call.is_fast() || call.num_bytes == 0 ||
      !calls->may_start(group, call.input, call.output, prepared.stream))
    return {};
  return prepared;
}

std::vector<PreparedOnGpu> prepare_list_on_gpu(FastVerb verb, const ProcessGroup& group,
                                               const Args& args, Op op, bool beside) {
  const Verb core = signature_of(verb).core;
  const bool reduces_all = core == Verb::all_reduce;
  const FastVerb each = reduces_all                    ? FastVerb::all_reduce
                        : core == Verb::reduce_scatter ? FastVerb::reduce_scatter_tensor
                                                       : FastVerb::all_gather_into_tensor;
  const std::span<PyObject*> outputs = items_of(args[kTensor]);
  const std::span<PyObject*> inputs = reduces_all ? outputs : items_of(args[kSecond]);
  if (outputs.size() != inputs.size()) return {};
  std::vector<PreparedOnGpu> calls;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Args one;
    one[kTensor] = outputs[i];
    one[kSecond] = reduces_all ? nullptr : inputs[i];
    one.options = args.options;
    calls.push_back(prepare_on_gpu(each, group, one, op, beside));
    if (!calls.back().call.is_fast()) return {};
  }
  return calls;
}

void start_on_gpu(ProcessGroup& group, const PreparedOnGpu& prepared, double timeout_s) {
  GpuCalls& calls = *group.gpu_calls();
  const Prepared& call = prepared.call;
  calls.note(call.plan);
  const PartsOnGpu& parts = prepared.parts;
  const DeviceOperands operands{static_cast<const std::byte*>(call.input),
                                static_cast<std::byte*>(call.output), parts.counts, parts.input,
                                parts.output};
  start(calls, prepared.stream, limit_of(calls, timeout_s), call.plan, operands);
}

PyObject* start_beside(const Caller& caller, std::span<const PreparedOnGpu> calls, const Args& args,
                       PyObject* outputs) {
  Owned work(new_gpu_work(caller, outputs, -1));
  const GpuCalls& side = *caller.group.gpu_calls();
  follow(*caller.group.gpu_calls(), calls[0].current);
  for (const PreparedOnGpu& call : calls) start_on_gpu(caller.group, call, args.timeout_s);
  PyObject* const works[] = {work.get()};
  begin_gpu_works(works);
  keep_all_for(side, args[kTensor]);
  keep_all_for(side, args[kSecond]);
  return work.release();
}

}  // namespace fastcoll
