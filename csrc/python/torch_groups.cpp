// SPDX-License-Identifier: Apache-2.0
#include "python/torch_groups.h"

#include <unordered_map>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/weak.h"

namespace fastcoll {

namespace {

// Neither group is kept alive. The references vouch for the objects at the addresses.
struct StandIn {
  PyObject* process_group;  // weak references
  PyObject* communicator;
  std::vector<uint64_t> global_ranks;  // by rank in the group
};
std::unordered_map<PyObject*, StandIn> stand_ins;

const StandIn* find(PyObject* process_group) {
  const auto found = stand_ins.find(process_group);
  const bool is_it =
      found != stand_ins.end() && refers_to(found->second.process_group, process_group);
  return is_it ? &found->second : nullptr;
}

void forget(const StandIn& gone) {
  Py_DECREF(gone.process_group);
  Py_DECREF(gone.communicator);
}

}  // namespace

PyObject* stand_in_of(PyObject* process_group) {
  const StandIn* known = find(process_group);
  return known ? target_of(known->communicator) : nullptr;
}

PyObject* group_rank_of(PyObject* process_group, PyObject* global_rank) {
  const StandIn* known = find(process_group);
  const std::optional<uint64_t> wanted = global_rank ? number_of(global_rank) : std::nullopt;
  if (!known || !wanted) return nullptr;
  for (size_t rank = 0; rank < known->global_ranks.size(); ++rank)
    if (known->global_ranks[rank] == *wanted) return Owned(PyLong_FromSize_t(rank)).release();
  return nullptr;
}

PyObject* set_stand_in(PyObject*, PyObject* args) {
  PyObject *process_group = nullptr, *communicator = nullptr, *ranks = nullptr;
  if (!PyArg_ParseTuple(args, "OOO!", &process_group, &communicator, &PyList_Type, &ranks))
    return nullptr;
  std::erase_if(stand_ins, [&](const auto& item) {
    const bool is_gone = item.first == process_group ||
                         !Owned(target_of(item.second.process_group)).get() ||
                         !Owned(target_of(item.second.communicator)).get();
    if (is_gone) forget(item.second);
    return is_gone;
  });
  StandIn made{nullptr, nullptr, {}};
  for (PyObject* rank : items_of(ranks))
    made.global_ranks.push_back(number_of(rank).value_or(~uint64_t{0}));
  made.process_group = PyWeakref_NewRef(process_group, nullptr);
  if (!made.process_group) return nullptr;
  made.communicator = PyWeakref_NewRef(communicator, nullptr);
  if (!made.communicator) {
    Py_DECREF(made.process_group);
    return nullptr;
  }
  stand_ins.emplace(process_group, std::move(made));
  Py_RETURN_NONE;
}

}  // namespace fastcoll
