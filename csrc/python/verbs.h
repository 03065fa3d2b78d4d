// SPDX-License-Identifier: Apache-2.0
// The verbs that are C functions: what their arguments are called, in order, and what they mean.
#pragma once

namespace fastcoll {

enum Param {
  kTensor,  // what is given, or an output that comes first
  kSecond,
  kOp,
  kRoot,  // or the other rank of a send or receive
  kTag,
  kInSplits,
  kOutSplits,
  kGroup,
  kAsyncOp,
  kNumObjects,
  // What these say is read at once; no object is kept.
  kAlgorithm = kNumObjects,
  kNumerics,
  kTimeout,
};

struct Signature {
  static constexpr int kMostParams = 9;
  const char* name;
  int num_positional;
  int num_params;
  struct {
    const char* name;
    Param meaning;
  } params[kMostParams];
  const char* doc;
};

enum class FastVerb {
  all_reduce,
  reduce_scatter_tensor,
  all_gather_into_tensor,
  broadcast,
  barrier,
  reduce,
  all_gather,
  gather,
  scatter,
  all_to_all_single,
  all_to_all,
  reduce_scatter,
  gather_single,
  send,
  recv,
  isend,
  irecv,
  batch_isend_irecv,
  all_reduce_coalesced,
  reduce_scatter_tensor_coalesced,
  all_gather_into_tensor_coalesced,
};
inline constexpr int kNumFastVerbs = 21;

constexpr bool is_transfer(FastVerb verb) {
  return verb >= FastVerb::send && verb <= FastVerb::batch_isend_irecv;
}

constexpr bool takes_root(FastVerb verb) {
  return verb == FastVerb::broadcast || verb == FastVerb::reduce || verb == FastVerb::gather ||
         verb == FastVerb::gather_single || verb == FastVerb::scatter;
}

// Lists of tensors are arguments; those of the last three verbs may be of any length.
constexpr bool takes_sequences(FastVerb verb) {
  return verb == FastVerb::all_gather || verb == FastVerb::gather || verb == FastVerb::scatter ||
         verb == FastVerb::all_to_all || verb == FastVerb::reduce_scatter ||
         verb >= FastVerb::all_reduce_coalesced;
}

inline constexpr Signature kSignatures[kNumFastVerbs] = {
    {"all_reduce",
     4,
     8,
     {{"tensor", kTensor},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"out", kSecond},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "all_reduce(tensor, op=..., group=None, async_op=False, *, out=None, algorithm='auto', "
     "numerics=None, timeout_s=None)\n--\n\n"},
    {"reduce_scatter_tensor",
     5,
     8,
     {{"output", kTensor},
      {"input", kSecond},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "reduce_scatter_tensor(output, input, op=..., group=None, async_op=False, *, "
     "algorithm='auto', numerics=None, timeout_s=None)\n--\n\n"},
    {"all_gather_into_tensor",
     4,
     5,
     {{"output_tensor", kTensor},
      {"input_tensor", kSecond},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False, *, "
     "timeout_s=None)\n--\n\n"},
    {"broadcast",
     4,
     5,
     {{"tensor", kTensor},
      {"src", kRoot},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "broadcast(tensor, src=None, group=None, async_op=False, *, timeout_s=None, group_src=None)"
     "\n--\n\n"},
    {"barrier",
     2,
     3,
     {{"group", kGroup}, {"async_op", kAsyncOp}, {"timeout_s", kTimeout}},
     "barrier(group=None, async_op=False, device_ids=None, timeout=None, *, "
     "timeout_s=None)\n--\n\n"},
    {"reduce",
     5,
     9,
     {{"tensor", kTensor},
      {"dst", kRoot},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"out", kSecond},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "reduce(tensor, dst=None, op=..., group=None, async_op=False, *, out=None, algorithm='auto', "
     "numerics=None, timeout_s=None, group_dst=None)\n--\n\n"},
    {"all_gather",
     4,
     5,
     {{"tensor_list", kSecond},
      {"tensor", kTensor},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "all_gather(tensor_list, tensor, group=None, async_op=False, *, timeout_s=None)\n--\n\n"},
    {"gather",
     5,
     6,
     {{"tensor", kTensor},
      {"gather_list", kSecond},
      {"dst", kRoot},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "gather(tensor, gather_list=None, dst=None, group=None, async_op=False, *, timeout_s=None, "
     "group_dst=None)\n--\n\n"},
    {"scatter",
     5,
     6,
     {{"tensor", kTensor},
      {"scatter_list", kSecond},
      {"src", kRoot},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, *, timeout_s=None, "
     "group_src=None)\n--\n\n"},
    {"all_to_all_single",
     6,
     7,
     {{"output", kTensor},
      {"input", kSecond},
      {"output_split_sizes", kOutSplits},
      {"input_split_sizes", kInSplits},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, "
     "group=None, async_op=False, *, timeout_s=None)\n--\n\n"},
    {"all_to_all",
     4,
     5,
     {{"output_tensor_list", kTensor},
      {"input_tensor_list", kSecond},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False, *, "
     "timeout_s=None)\n--\n\n"},
    {"reduce_scatter",
     5,
     8,
     {{"output", kTensor},
      {"input_list", kSecond},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "reduce_scatter(output, input_list, op=..., group=None, async_op=False, *, "
     "algorithm='auto', numerics=None, timeout_s=None)\n--\n\n"},
    {"gather_single",
     5,
     6,
     {{"tensor", kTensor},
      {"gather_tensor", kSecond},
      {"dst", kRoot},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "gather_single(tensor, gather_tensor=None, dst=None, group=None, async_op=False, *, "
     "timeout_s=None, group_dst=None)\n--\n\n"},
    {"send",
     4,
     5,
     {{"tensor", kTensor},
      {"dst", kRoot},
      {"group", kGroup},
      {"tag", kTag},
      {"timeout_s", kTimeout}},
     "send(tensor, dst=None, group=None, tag=0, *, timeout_s=None, group_dst=None)\n--\n\n"},
    {"recv",
     4,
     5,
     {{"tensor", kTensor},
      {"src", kRoot},
      {"group", kGroup},
      {"tag", kTag},
      {"timeout_s", kTimeout}},
     "recv(tensor, src=None, group=None, tag=0, *, timeout_s=None, group_src=None)\n--\n\n"},
    {"isend",
     4,
     5,
     {{"tensor", kTensor},
      {"dst", kRoot},
      {"group", kGroup},
      {"tag", kTag},
      {"timeout_s", kTimeout}},
     "isend(tensor, dst=None, group=None, tag=0, *, timeout_s=None, group_dst=None)\n--\n\n"},
    {"irecv",
     4,
     5,
     {{"tensor", kTensor},
      {"src", kRoot},
      {"group", kGroup},
      {"tag", kTag},
      {"timeout_s", kTimeout}},
     "irecv(tensor, src=None, group=None, tag=0, *, timeout_s=None, group_src=None)\n--\n\n"},
    {"batch_isend_irecv",
     2,
     2,
     {{"p2p_op_list", kTensor}, {"group", kGroup}},
     "batch_isend_irecv(p2p_op_list, group=None)\n--\n\n"},
    {"all_reduce_coalesced",
     4,
     7,
     {{"tensors", kTensor},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "all_reduce_coalesced(tensors, op=..., group=None, async_op=False, *, algorithm='auto', "
     "numerics=None, timeout_s=None)\n--\n\n"},
    {"reduce_scatter_tensor_coalesced",
     5,
     8,
     {{"outputs", kTensor},
      {"inputs", kSecond},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"algorithm", kAlgorithm},
      {"numerics", kNumerics},
      {"timeout_s", kTimeout}},
     "reduce_scatter_tensor_coalesced(outputs, inputs, op=..., group=None, async_op=False, *, "
     "algorithm='auto', numerics=None, timeout_s=None)\n--\n\n"},
    {"all_gather_into_tensor_coalesced",
     4,
     5,
     {{"outputs", kTensor},
      {"inputs", kSecond},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kTimeout}},
     "all_gather_into_tensor_coalesced(outputs, inputs, group=None, async_op=False, *, "
     "timeout_s=None)\n--\n\n"},
};

}  // namespace fastcoll
