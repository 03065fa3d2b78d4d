// SPDX-License-Identifier: Apache-2.0
// The arguments of a fast call that hold its results.
#pragma once

#include <Python.h>

#include <span>

#include "group/process_group.h"
#include "python/arguments.h"
#include "python/prepare.h"
#include "python/tensor_view.h"
#include "python/verbs.h"

namespace fastcoll {

// The arguments that a call writes on this rank.
template <FastVerb kVerb>
std::span<PyObject* const> written_by(const ProcessGroup& group, const Args& args) {
  constexpr Signature kSignature = signature_of(kVerb);
  if constexpr (kSignature.core == Verb::barrier) return {};
  if constexpr (kSignature.takes_root && kSignature.core != Verb::scatter) {
    const int root = args[kRoot] ? root_of(group, args[kRoot]).value_or(-1) : 0;
    if ((group.rank() == root) == (kSignature.core == Verb::broadcast)) return {};
  }
  constexpr bool kGetsLists = takes_lists(kVerb) || verb_gets_parts(kSignature.core);
  PyObject* const& output = args.objects[kSignature.output];
  if constexpr (kSignature.takes_sequences && kGetsLists) return items_of(output);
  return {given(output) ? &output : &args.objects[kTensor], 1};
}

inline void count_writes(std::span<PyObject* const> written) {
  for (PyObject* object : written) count_write(object);
}

// The result of a Work: the tensors that hold results.
template <FastVerb kVerb>
PyObject* outputs_of(const ProcessGroup& group, const Args& args) {
  std::span<PyObject* const> outputs = written_by<kVerb>(group, args);
  if (outputs.empty() && (kVerb == FastVerb::broadcast || kVerb == FastVerb::reduce))
    outputs = {&args.objects[kTensor], 1};
  PyObject* list = PyList_New(Py_ssize_t(outputs.size()));
  for (size_t i = 0; list && i < outputs.size(); ++i)
    PyList_SET_ITEM(list, Py_ssize_t(i), Py_NewRef(outputs[i]));
  return list;
}

}  // namespace fastcoll
