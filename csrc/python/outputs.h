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
  const auto one = [&](Param param) { return std::span<PyObject* const>(&args.objects[param], 1); };
  constexpr bool kGathers = kVerb == FastVerb::gather || kVerb == FastVerb::gather_single;
  if constexpr (kVerb == FastVerb::barrier) return {};
  if constexpr (kVerb == FastVerb::broadcast || kVerb == FastVerb::reduce || kGathers) {
    const int root = args[kRoot] ? root_of(group, args[kRoot]).value_or(-1) : 0;
    if ((group.rank() == root) == (kVerb == FastVerb::broadcast)) return {};
  }
  if constexpr (kVerb == FastVerb::all_gather || kVerb == FastVerb::gather)
    return items_of(args[kSecond]);
  if constexpr (kVerb == FastVerb::all_to_all || takes_lists(kVerb)) return items_of(args[kTensor]);
  if constexpr (kVerb == FastVerb::gather_single) return one(kSecond);
  if constexpr (kVerb == FastVerb::all_reduce || kVerb == FastVerb::reduce)
    return one(given(args[kSecond]) ? kSecond : kTensor);
  return one(kTensor);
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
