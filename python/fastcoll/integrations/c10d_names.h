// SPDX-License-Identifier: Apache-2.0
// Written by scripts/verbs.py from torch_names.py. Part of c10d_verbs.h.
#pragma once

constexpr Verb kAllreduce{"fastcoll:all_reduce", "gloo:all_reduce", "allreduce", OpType::ALLREDUCE};
constexpr Verb kAllreduceCoalesced{"fastcoll:all_reduce", "gloo:all_reduce", "allreduce_coalesced",
                                   OpType::ALLREDUCE_COALESCED};
constexpr Verb kBroadcast{"fastcoll:broadcast", "gloo:broadcast", "broadcast", OpType::BROADCAST};
constexpr Verb kReduce{"fastcoll:reduce", "gloo:reduce", "reduce", OpType::REDUCE};
constexpr Verb kAllgather{"fastcoll:all_gather", "gloo:all_gather", "allgather", OpType::ALLGATHER};
constexpr Verb kAllgatherCoalesced{"fastcoll:all_gather", "gloo:all_gather", "allgather_coalesced",
                                   OpType::ALLGATHER_COALESCED};
constexpr Verb kAllGatherSingle{"fastcoll:_all_gather_base", "gloo:all_gather", "all_gather_single",
                                OpType::_ALLGATHER_BASE};
constexpr Verb kAllGatherSingleCoalesced{"fastcoll:all_gather_into_tensor_coalesced",
                                         "gloo:all_gather", "all_gather_single_coalesced",
                                         OpType::COALESCED};
constexpr Verb kReduceScatter{"fastcoll:reduce_scatter", "gloo:reduce_scatter", "reduce_scatter",
                              OpType::REDUCE_SCATTER};
constexpr Verb kReduceScatterSingle{"fastcoll:_reduce_scatter_base", "gloo:reduce_scatter",
                                    "reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE};
constexpr Verb kReduceScatterSingleCoalesced{"fastcoll:reduce_scatter_tensor_coalesced",
                                             "gloo:reduce_scatter",
                                             "reduce_scatter_single_coalesced", OpType::COALESCED};
constexpr Verb kGather{"fastcoll:gather", "gloo:gather", "gather", OpType::GATHER};
constexpr Verb kGatherSingle{"fastcoll:gather", "gloo:gather", "gather_single", OpType::GATHER};
constexpr Verb kScatter{"fastcoll:scatter", "gloo:scatter", "scatter", OpType::SCATTER};
constexpr Verb kAlltoall{"fastcoll:all_to_all", "gloo:all_to_all", "alltoall", OpType::ALLTOALL};
constexpr Verb kAllToAllSingle{"fastcoll:all_to_all", "gloo:all_to_all", "all_to_all_single",
                               OpType::ALLTOALL_BASE};
constexpr Verb kBarrier{"fastcoll:barrier", "gloo:barrier", "barrier", OpType::BARRIER};
constexpr Verb kSend{"fastcoll:send", "gloo:send", "send", OpType::SEND};
constexpr Verb kRecv{"fastcoll:recv", "gloo:recv", "recv", OpType::RECV};
constexpr Verb kRecvAnysource{"fastcoll:recv", "gloo:recvAnySource", "recv_anysource",
                              OpType::RECVANYSOURCE};
constexpr Verb kEndCoalescing{"fastcoll:coalesced", "gloo:coalesced", "_end_coalescing",
                              OpType::COALESCED};
