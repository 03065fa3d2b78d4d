// SPDX-License-Identifier: Apache-2.0
// The operators of ops.py on contiguous CPU tensors: a call of a known kind runs without Python.
// Part of c10d_backend.cpp, compiled with it.
//
// A compiled model calls an operator for each collective, so its cost counts in each layer. All
// other calls go to the functions of ops.py: strided tensors, groups of several nodes, errors. So
// do those of which a derivative can be asked for.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "c10d_calls.h"
#include "c10d_runner.h"
#include "c10d_work.h"
#include "core_api.h"
#include "gil.h"

namespace {

// Of the operators.
namespace names {
constexpr char kAllReduce[] = "all_reduce", kReduceScatter[] = "reduce_scatter",
               kAllGather[] = "all_gather", kAllReduceRmsNorm[] = "all_reduce_rms_norm";
}

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

// Keeps a group and its Communicator alive during a call, which runs without the GIL: meanwhile
// another thread may find another group by that name.
class HeldGroup {
 public:
  HeldGroup() = default;
  HeldGroup(std::shared_ptr<OperatorGroup> group, py::object communicator)
      : group_(std::move(group)), communicator_(std::move(communicator)) {}
  HeldGroup(HeldGroup&&) = default;
  ~HeldGroup() {
    if (!group_) return;
    const fastcoll::GilHeld gil;
    group_.reset();
    communicator_ = py::object();
  }
  explicit operator bool() const { return group_ != nullptr; }
  OperatorGroup* operator->() const { return group_.get(); }

 private:
  std::shared_ptr<OperatorGroup> group_;
  py::object communicator_;
};

// Of the process. All members are used with the GIL.
class OperatorGroups {
 public:
  // The functions of Python by the operators' names. `named` returns the Communicator of a name,
  // and raises where it is gone.
  void serve(py::dict functions, py::dict gradients, py::object named) {
    functions_ = std::move(functions);
    gradients_ = std::move(gradients);
    named_ = std::move(named);
  }

  // Empty where the calls of a group are Python's.
  HeldGroup hold(const std::string& name) {
    const fastcoll::GilHeld gil;
    std::shared_ptr<OperatorGroup>& known = groups_[name];
    py::object communicator = communicator_of(name, known.get());
    if (!known || !known->communicator().is(communicator)) {
      known.reset();
      FastcollGroup* group = core->group_of(communicator.ptr());
      if (!group) return {};
      known = std::make_shared<OperatorGroup>(communicator, group);
    }
    if (core->traces(known->core_group)) return {};
    return {known, std::move(communicator)};
  }

  // Another group may have become the default one, whose name is empty, or taken a closed one's
  // name at torch.
  py::object communicator_of(const std::string& name, const OperatorGroup* known) {
    py::object found = py::none();
    if (!name.empty() && known) {
      found = known->communicator();  // None where it is gone, with its core group
      if (!found.is_none() && core->closed(known->core_group)) found = py::none();
    }
    if (name.empty())
      if (void* const group = core->default_group())
        found = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(group));
    return found.is_none() ? named_(name) : found;
  }

  template <class Result = at::Tensor, class... Args>
  Result call_python(const char* name, const Args&... args) {
    const fastcoll::GilHeld gil;
    return functions_[name](args...).template cast<Result>();
  }

  template <class Result, class... Args>
  Result call_gradient(const char* name, c10::DispatchKeySet keys, const Args&... args) {
    const fastcoll::GilHeld gil;
    return gradients_[name](keys, args...).template cast<Result>();
  }

 private:
  py::dict functions_, gradients_;
  py::object named_;
  std::unordered_map<std::string, std::shared_ptr<OperatorGroup>> groups_;
};

// Never destroyed: the interpreter, whose objects it has, ends earlier.
OperatorGroups& operator_groups() {
  static auto* groups = new OperatorGroups;
  return *groups;
}

// Whether the call ran; else it is Python's.
bool run_operator(const HeldGroup& group, const FastcollKind& kind, const at::Tensor& input,
                  const at::Tensor& output, const FastcollRows* rows = nullptr) {
  const std::optional<FastcollPlan> plan = group->plans.find(kind);
  if (!plan || !core->idle(group->core_group)) return false;
  const FastcollOperands operands{input.const_data_ptr(), output.mutable_data_ptr(), nullptr};
  const WithoutGil without_gil;
  FastcollFailure failure;
  raise_unless_done(core->run(group->core_group, &*plan, &operands, rows, -1, &failure), failure);
  return true;
}

// Without torch's dispatcher.
at::Tensor allocate_like(const at::Tensor& x, at::IntArrayRef shape) {
  return at::Tensor(at::detail::empty_cpu(shape, x.scalar_type()));
}

at::Tensor empty_rows(const at::Tensor& x, int64_t num_rows) {
  c10::SmallVector<int64_t, 6> shape(x.sizes().begin(), x.sizes().end());
  if (!shape.empty()) shape[0] = num_rows;
  return allocate_like(x, shape);
}

// A number beyond an int's would be cut to another op's. For -1 no plan is found, so Python
// refuses it.
FastcollKind kind_of(FastcollVerb verb, const at::Tensor& x, int64_t op, int64_t root,
                     int64_t numel) {
  const int known = int(op) == op ? int(op) : -1;
  return {verb, *dtype_of(x.scalar_type()), known, int(root), uint64_t(numel), 0, false};
}

at::Tensor all_reduce(const at::Tensor& x, int64_t op, std::string name) {
  if (is_plain(x))
    if (const HeldGroup group = operator_groups().hold(name)) {
      at::Tensor result = allocate_like(x, x.sizes());
      const auto kind = kind_of(kFastcollAllReduce, x, op, 0, x.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python(names::kAllReduce, x, op, name);
}

at::Tensor reduce_scatter(const at::Tensor& x, int64_t op, std::string name) {
  if (is_plain(x) && x.dim() > 0)
    if (const HeldGroup group = operator_groups().hold(name);
        group && x.size(0) % group->world_size == 0) {
      at::Tensor result = empty_rows(x, x.size(0) / group->world_size);
      const auto kind = kind_of(kFastcollReduceScatter, x, op, 0, result.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python(names::kReduceScatter, x, op, name);
}

at::Tensor all_gather(const at::Tensor& x, std::string name) {
  if (is_plain(x) && x.dim() > 0)
    if (const HeldGroup group = operator_groups().hold(name)) {
      at::Tensor result = empty_rows(x, x.size(0) * group->world_size);
      const auto kind = kind_of(kFastcollAllGather, x, 0, 0, x.numel());
      if (run_operator(group, kind, x, result)) return result;
    }
  return operator_groups().call_python(names::kAllGather, x, name);
}

using OptionalTensor = std::optional<at::Tensor>;

Tensors all_reduce_rms_norm(const at::Tensor& x, const OptionalTensor& residual,
                            const OptionalTensor& weight, double eps, double offset,
                            bool rounds_first, bool wide_sum, int64_t op, std::string name) {
  const auto is_known = [](const OptionalTensor& tensor) { return !tensor || is_plain(*tensor); };
  if (is_plain(x) && is_known(residual) && is_known(weight))
    if (const HeldGroup group = operator_groups().hold(name)) {
      Tensors pair{allocate_like(x, x.sizes()), allocate_like(x, x.sizes())};
      std::array<FastcollTensor, 2> facts;
      if (residual) facts[0] = facts_of(*residual);
      if (weight) facts[1] = facts_of(*weight);
      const FastcollRowsCall call{.x = facts_of(x),
                                  .out = pair[0].mutable_data_ptr(),
                                  .summed = pair[1].mutable_data_ptr(),
                                  .residual = residual ? &facts[0] : nullptr,
                                  .weight = weight ? &facts[1] : nullptr,
                                  .epsilon = eps,
                                  .offset = offset,
                                  .rounds_first = rounds_first,
                                  .wide_sum = wide_sum,
                                  .op = op};
      FastcollRows rows;
      const auto kind = kind_of(kFastcollAllReduce, x, op, 0, x.numel());
      if (core->read_rows(&call, &rows) && run_operator(group, kind, x, pair[0], &rows))
        return pair;
    }
  return operator_groups().call_python<Tensors>(names::kAllReduceRmsNorm, x, residual, weight, eps,
                                                offset, rounds_first, wide_sum, op, name);
}

// ---- autograd ----

template <class Term>
bool wants_derivative(const Term&) {
  return false;
}
bool wants_derivative(const at::Tensor& tensor) {
  return (at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(0).defined();
}
bool wants_derivative(const OptionalTensor& tensor) { return tensor && wants_derivative(*tensor); }

// Autograd runs this in place of an operator. Python has the calls of which a derivative can be
// asked for.
template <const char* kName, class Result, class... Terms>
Result with_gradient(c10::DispatchKeySet keys, Terms... terms) {
  if ((wants_derivative(terms) || ...))
    return operator_groups().call_gradient<Result>(kName, keys, terms...);
  static const auto served = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(("fastcoll::" + std::string(kName)).c_str(), "")
                                 .typed<Result(Terms...)>();
  const at::AutoDispatchBelowAutograd below;
  return served.redispatch(keys & c10::after_autograd_keyset, terms...);
}

}  // namespace
