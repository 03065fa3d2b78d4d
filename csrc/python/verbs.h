// SPDX-License-Identifier: Apache-2.0
// The verbs that are C functions: the names, order and meanings of their arguments.
#pragma once

#include "dtypes.h"

namespace fastcoll {

enum Param {
  kTensor,  // the input, or an output that comes first
  kSecond,
  kOp,
  kRoot,  // or the other rank of a send or receive
  kTag,
  kInSplits,
  kOutSplits,
  kGroup,
  kAsyncOp,
  kNumObjects,
  // These options are read at once; no object is kept.
  kAlgorithm = kNumObjects,
  kWire,
  kNumerics,
  kTimeout,
  kThen = kTag,  // in its place, as no verb has both: see Args
};

// How a verb takes its tensors: one, or one of each kind; in parts, one for each rank; in lists of
// any length. A list makes one call. A transfer is no collective.
enum class VerbKind { tensors, parts, lists, transfer };

struct Signature {
  static constexpr int kMostParams = 10;
  const char* name;
  VerbKind kind;
  bool takes_root;       // of torch's groups: a global rank
  bool takes_sequences;  // of tensors
  Verb core = {};        // carries it out; of a transfer neither this nor the next
  Param output = {};     // where the result goes, if it is given: else to kTensor
  int num_positional;
  int num_params;
  int group_place;  // among the arguments of the function; the method has none
  struct {
    const char* name;
    Param meaning;
  } params[kMostParams];
  const char* doc;  // the signature alone
  const char* method_doc;
};

enum class FastVerb;

struct Alias {
  const char* name;
  FastVerb verb;
};

#include "python/verbs.inc"

constexpr const Signature& signature_of(FastVerb verb) { return kSignatures[int(verb)]; }

constexpr bool takes_rows(FastVerb verb) {
  if (signature_of(verb).kind != VerbKind::tensors) return false;
  for (const auto& param : signature_of(verb).params)
    if (param.name && param.meaning == kThen) return true;
  return false;
}

constexpr bool takes_lists(FastVerb verb) { return signature_of(verb).kind == VerbKind::lists; }

}  // namespace fastcoll
