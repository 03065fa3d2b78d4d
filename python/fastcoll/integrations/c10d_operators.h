// SPDX-License-Identifier: Apache-2.0
// The operators of ops.py on contiguous CPU tensors: a call of a known kind runs without Python.
// Part of c10d_backend.cpp, compiled with it.
//
// A compiled model calls an operator for each collective, so its cost counts in each layer. All
// other calls go to the functions of ops.py: strided tensors, groups of several nodes, errors.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "c10d_calls.h"
#include "c10d_runner.h"
#include "c10d_work.h"
#include "core_api.h"
#include "gil.h"

namespace {

// A group by which operators were called.
struct OperatorGroup {
  OperatorGroup(const py::object& communicator, FastcollGroup* core_group)
      : communicator(communicator),
        core_group(core_group),
        rank(communicator.attr("rank").cast<int>()),
        world_size(communicator.attr("world_size").cast<int>()),
        plans(core_group) {}

  const py::weakref communicator;
  FastcollGroup* const core_group;
  const int rank, world_size;
  KnownPlans plans;
};

// Keeps a Communicator alive during a call, which runs without the GIL.
class HeldGroup {
 public:
  HeldGroup() = default;
  HeldGroup(OperatorGroup* group, py::object communicator)
      : group_(group), communicator_(std::move(communicator)) {}
  HeldGroup(HeldGroup&&) = default;
  ~HeldGroup() {
    if (!communicator_) return;
    const fastcoll::GilHeld gil;
    communicator_ = py::object();
  }
  explicit operator bool() const { return group_ != nullptr; }
  OperatorGroup* operator->() const { return group_; }

 private:
  OperatorGroup* group_ = nullptr;
  py::object communicator_;
};

// Of the process. All members are used with the GIL.
class OperatorGroups {
 public:
  // `named` returns the Communicator of a name, and raises where it is gone.
  void serve(py::dict functions, py::object named) {
    functions_ = std::move(functions);
    named_ = std::move(named);
  }

  // Empty where the calls of a group are Python's.
  HeldGroup hold(const std::string& name) {
    const fastcoll::GilHeld gil;
    std::unique_ptr<OperatorGroup>& known = groups_[name];
    // Another group may have become the default one, whose name is empty.
    py::object communicator = known && !name.empty() ? known->communicator() : named_(name);
    if (communicator.is_none()) communicator = named_(name);
    if (!known || !known->communicator().is(communicator)) {
      known.reset();
      FastcollGroup* group = core->group_of(communicator.ptr());
      if (!group) return {};
      known = std::make_unique<OperatorGroup>(communicator, group);
    }
    if (core->traces(known->core_group)) return {};
    return {known.get(), std::move(communicator)};
  }

  template <class... Args>
  at::Tensor call_python(const char* name, Args&&... args) {
    const fastcoll::GilHeld gil;
    return functions_[name](std::forward<Args>(args)...).template cast<at::Tensor>();
  }

 private:
  py::dict functions_;
  py::object named_;
  std::unordered_map<std::string, std::unique_ptr<OperatorGroup>> groups_;
};

// Never destroyed: the interpreter, whose objects it has, ends earlier.
OperatorGroups& operator_groups() {
  static auto* groups = new OperatorGroups;
  return *groups;
}

// Whether the call ran; else it is Python's.
bool run_operator(const HeldGroup& group, const FastcollKind& kind, const at::Tensor& input,
                  const at::Tensor& output) {
  const std::optional<FastcollPlan> plan = group->plans.find(kind);
  if (!plan || !core->idle(group->core_group)) return false;
  const FastcollOperands operands{input.const_data_ptr(), output.mutable_data_ptr(), nullptr};
  const WithoutGil without_gil;
  FastcollFailure failure;
  raise_unless_done(core->run(group->core_group, &*plan, &operands, -1, &failure), failure);
  return true;
}

at::Tensor empty_rows(const at::Tensor& x, int64_t num_rows) {
  c10::SmallVector<int64_t, 6> shape(x.sizes().begin(), x.sizes().end());
  if (!shape.empty()) shape[0] = num_rows;
  return at::empty(shape, x.options());
}

FastcollKind kind_of(FastcollVerb verb, const at::Tensor& x, int64_t op, int64_t root,
                     int64_t numel) {
  return {verb, *dtype_of(x.scalar_type()), int(op), int(root), uint64_t(numel), 0, false};
}

at::Tensor all_reduce(const at::Tensor& x, int64_t op, std::string name) {
  if (is_plain(x))
    if (const HeldGroup group = operator_groups().hold(name)) {
      at::Tensor result = at::empty(x.sizes(), x.options());
      const auto kind = kind_of(kFastcollAllReduce, x, op, 0, x.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python("all_reduce", x, op, name);
}

at::Tensor reduce_scatter(const at::Tensor& x, int64_t op, std::string name) {
  if (is_plain(x) && x.dim() > 0)
    if (const HeldGroup group = operator_groups().hold(name);
        group && x.size(0) % group->world_size == 0) {
      at::Tensor result = empty_rows(x, x.size(0) / group->world_size);
      const auto kind = kind_of(kFastcollReduceScatter, x, op, 0, result.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python("reduce_scatter", x, op, name);
}

at::Tensor all_gather(const at::Tensor& x, std::string name) {
  if (is_plain(x) && x.dim() > 0)
    if (const HeldGroup group = operator_groups().hold(name)) {
      at::Tensor result = empty_rows(x, x.size(0) * group->world_size);
      const auto kind = kind_of(kFastcollAllGather, x, 0, 0, x.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python("all_gather", x, name);
}

void serve_operators(py::dict functions, py::object named) {
  operator_groups().serve(std::move(functions), std::move(named));
  // Never destroyed: torch's dispatcher may end earlier.
  static auto* library = new torch::Library(torch::Library::IMPL, "fastcoll", c10::DispatchKey::CPU,
                                            __FILE__, __LINE__);
  static const bool once = [] {
    library->impl("all_reduce", &all_reduce);
    library->impl("reduce_scatter", &reduce_scatter);
    library->impl("all_gather", &all_gather);
    return true;
  }();
  (void)once;
}

}  // namespace
