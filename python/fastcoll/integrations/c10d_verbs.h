// SPDX-License-Identifier: Apache-2.0
// The verbs of c10d_backend.cpp: what they are called by torch, by Python and in a profile. Part of
// that one source, compiled with it.
#pragma once

#include <ATen/record_function.h>

#include <utility>
#include <vector>

#include "c10d_work.h"

namespace {

// A verb's names.
struct Verb {
  const char* title;   // of the profiler's event
  const char* method;  // of the Python group
  c10d::OpType type;
};

using c10d::OpType;
constexpr Verb kAllReduce{"fastcoll:all_reduce", "allreduce", OpType::ALLREDUCE};
constexpr Verb kAllReduceCoalesced{"fastcoll:all_reduce", "allreduce_coalesced",
                                   OpType::ALLREDUCE_COALESCED};
constexpr Verb kBroadcast{"fastcoll:broadcast", "broadcast", OpType::BROADCAST};
constexpr Verb kReduce{"fastcoll:reduce", "reduce", OpType::REDUCE};
constexpr Verb kAllGather{"fastcoll:all_gather", "allgather", OpType::ALLGATHER};
constexpr Verb kAllGatherCoalesced{"fastcoll:all_gather", "allgather_coalesced",
                                   OpType::ALLGATHER_COALESCED};
constexpr Verb kAllGatherSingle{"fastcoll:_all_gather_base", "all_gather_single",
                                OpType::_ALLGATHER_BASE};
// COALESCED, here and below: torch 2.11 has no types of their own for these.
constexpr Verb kAllGatherSingleCoalesced{"fastcoll:all_gather_into_tensor_coalesced",
                                         "all_gather_single_coalesced", OpType::COALESCED};
constexpr Verb kReduceScatter{"fastcoll:reduce_scatter", "reduce_scatter", OpType::REDUCE_SCATTER};
constexpr Verb kReduceScatterSingle{"fastcoll:_reduce_scatter_base", "reduce_scatter_single",
                                    OpType::_REDUCE_SCATTER_BASE};
constexpr Verb kReduceScatterSingleCoalesced{"fastcoll:reduce_scatter_tensor_coalesced",
                                             "reduce_scatter_single_coalesced", OpType::COALESCED};
constexpr Verb kGather{"fastcoll:gather", "gather", OpType::GATHER};
constexpr Verb kGatherSingle{"fastcoll:gather", "gather_single", OpType::GATHER};
constexpr Verb kScatter{"fastcoll:scatter", "scatter", OpType::SCATTER};
constexpr Verb kAllToAll{"fastcoll:all_to_all", "alltoall", OpType::ALLTOALL};
constexpr Verb kAllToAllSingle{"fastcoll:all_to_all", "all_to_all_single", OpType::ALLTOALL_BASE};
constexpr Verb kBarrier{"fastcoll:barrier", "barrier", OpType::BARRIER};
constexpr Verb kSend{"fastcoll:send", "send", OpType::SEND};
constexpr Verb kRecv{"fastcoll:recv", "recv", OpType::RECV};
constexpr Verb kRecvAnySource{"fastcoll:recv", "recv_anysource", OpType::RECVANYSOURCE};
constexpr Verb kCoalesced{"fastcoll:coalesced", "_end_coalescing", OpType::COALESCED};

// What the profiler and a Work know of a call.
struct Terms {
  const Verb& verb;
  Tensors inputs;
  Tensors outputs;
  bool is_async = true;
  Milliseconds timeout = kNoTimeout;

  Terms(const Verb& verb, Tensors inputs, Tensors outputs)
      : verb(verb), inputs(std::move(inputs)), outputs(std::move(outputs)) {}
  template <class Options>
  Terms(const Verb& verb, const Options& opts, Tensors inputs, Tensors outputs)
      : Terms(verb, std::move(inputs), std::move(outputs)) {
    is_async = opts.asyncOp;
    timeout = opts.timeout;
  }
};

// The profiler's event of a synchronous call; an asynchronous one's belongs to its Work.
class Event {
 public:
  explicit Event(const Terms& terms) : event_(at::RecordScope::USER_SCOPE) {
    if (terms.is_async || !event_.isActive()) return;
    const std::vector<c10::IValue> inputs(terms.inputs.begin(), terms.inputs.end());
    event_.before(terms.verb.title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }

 private:
  at::RecordFunction event_;
};

}  // namespace
