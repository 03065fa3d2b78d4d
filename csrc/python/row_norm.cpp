// SPDX-License-Identifier: Apache-2.0
#include "python/row_norm.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>

#include "python/arguments.h"
#include "python/errors.h"
#include "python/row_check.h"
#include "python/work_type.h"

namespace fastcoll {

namespace {

struct RowNorm {
  PyObject ob_base;
  PyObject *weight, *residual, *summed, *scales;  // None: left out
  double epsilon, offset;
  char rounds_first, wide_sum;
};

constexpr size_t kNumArgs = 8, kNumPositional = 2;
constexpr const char* kNames[kNumArgs] = {"weight", "eps",          "residual", "summed",
                                          "offset", "rounds_first", "wide_sum", "scales"};
enum Arg { kWeight, kEps, kResidual, kSummed, kOffset, kRoundsFirst, kWideSum, kScales };

std::array<PyObject*, kNumArgs> names{};  // interned
PyTypeObject* subclass = nullptr;

RowNorm& norm_of(PyObject* object) { return *reinterpret_cast<RowNorm*>(object); }

// Where the sums with the residual go; None: nowhere.
PyObject* summed_of(const RowNorm& norm) {
  return norm.summed == Py_None ? norm.residual : norm.summed;
}

size_t place_of(PyObject* name) {
  for (size_t i = 0; i < kNumArgs; ++i)
    if (names[i] == name) return i;
  for (size_t i = 0; i < kNumArgs; ++i)
    if (PyUnicode_Compare(names[i], name) == 0) return i;
  return kNumArgs;
}

// By their places in kNames; null: left out. False with a Python error set.
bool sort_args(PyObject* const* args, size_t num_args, PyObject* kwnames,
               std::array<PyObject*, kNumArgs>& sorted) {
  if (num_args > kNumPositional) {
    PyErr_Format(PyExc_TypeError, "RMSNorm() takes weight and eps by place, not %zu arguments",
                 num_args);
    return false;
  }
  for (size_t i = 0; i < num_args; ++i) sorted[i] = args[i];
  const Py_ssize_t num_keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    const size_t place = place_of(name);
    if (place == kNumArgs || sorted[place]) {
      PyErr_Format(PyExc_TypeError, "RMSNorm() got %s argument '%U'",
                   place == kNumArgs ? "an unexpected" : "twice the", name);
      return false;
    }
    sorted[place] = args[num_args + size_t(k)];
  }
  return true;
}

// A number that was given, else its default; none with a Python error set.
std::optional<double> number_given(PyObject* object, double usual, const char* wanted) {
  const double number = object ? PyFloat_AsDouble(object) : usual;
  if (number != -1 || !PyErr_Occurred()) return number;
  PyErr_Clear();
  set_python_error(Failure(ErrorKind::usage, std::string("RMSNorm: ") + wanted));
  return std::nullopt;
}

// Whether each tensor that was given may be one: a call looks closer. False with an error set.
bool may_be_tensors(const std::array<PyObject*, kNumArgs>& sorted) {
  for (const Arg arg : {kWeight, kResidual, kSummed, kScales}) {
    PyObject* const object = sorted[arg];
    if (!given(object) || is_tensor(object) || is_array(object)) continue;
    if (PyObject_HasAttrString(object, "shape")) continue;
    const std::string what = std::string("RMSNorm: ") + kNames[arg];
    set_python_error(Failure(ErrorKind::usage, what + " must be a tensor or a NumPy array, not " +
                                                   Py_TYPE(object)->tp_name));
    return false;
  }
  return true;
}

PyObject* make(PyObject* type, PyObject* const* args, size_t flagged_num, PyObject* kwnames) {
  std::array<PyObject*, kNumArgs> sorted{};
  if (!sort_args(args, size_t(PyVectorcall_NARGS(flagged_num)), kwnames, sorted)) return nullptr;
  constexpr double kDefaultEps = 1e-6;
  constexpr const char* kEpsilons = "eps must be a number from 0 on";
  const auto epsilon = number_given(sorted[kEps], kDefaultEps, kEpsilons);
  const auto offset = number_given(sorted[kOffset], 0, "offset must be a number");
  if (!epsilon || !offset || !may_be_tensors(sorted)) return nullptr;
  if (!is_epsilon(*epsilon)) {
    set_python_error(Failure(ErrorKind::usage, std::string("RMSNorm: ") + kEpsilons));
    return nullptr;
  }
  const int rounds_first = sorted[kRoundsFirst] ? PyObject_IsTrue(sorted[kRoundsFirst]) : 0;
  if (rounds_first < 0) return nullptr;
  const int wide_sum = sorted[kWideSum] ? PyObject_IsTrue(sorted[kWideSum]) : 0;
  if (wide_sum < 0) return nullptr;
  auto* made = reinterpret_cast<PyTypeObject*>(type);
  PyObject* object = made->tp_alloc(made, 0);
  if (!object) return nullptr;
  RowNorm& norm = norm_of(object);
  const auto kept = [&](Arg arg) { return Py_NewRef(sorted[arg] ? sorted[arg] : Py_None); };
  norm.weight = kept(kWeight);
  norm.residual = kept(kResidual);
  norm.summed = kept(kSummed);
  norm.scales = kept(kScales);
  norm.epsilon = *epsilon;
  norm.offset = *offset;
  norm.rounds_first = char(rounds_first);
  norm.wide_sum = char(wide_sum);
  return object;
}

// Python visits the class of a subclass's object itself.
int traverse(PyObject* self, visitproc visit, void* arg) {
  const RowNorm& norm = norm_of(self);
  Py_VISIT(norm.weight);
  Py_VISIT(norm.residual);
  Py_VISIT(norm.summed);
  Py_VISIT(norm.scales);
  return 0;
}

// Of a cycle: the kept tensors become None, so that the norm can still be read.
int clear(PyObject* self) {
  RowNorm& norm = norm_of(self);
  for (PyObject** kept : {&norm.weight, &norm.residual, &norm.summed, &norm.scales})
    Py_XSETREF(*kept, Py_NewRef(Py_None));
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  RowNorm& norm = norm_of(self);
  for (PyObject* kept : {norm.weight, norm.residual, norm.summed, norm.scales}) Py_XDECREF(kept);
  Py_TYPE(self)->tp_free(self);
}

PyMemberDef members[] = {
    {"weight", T_OBJECT, offsetof(RowNorm, weight), READONLY, nullptr},
    {"eps", T_DOUBLE, offsetof(RowNorm, epsilon), READONLY, nullptr},
    {"residual", T_OBJECT, offsetof(RowNorm, residual), READONLY, nullptr},
    {"summed", T_OBJECT, offsetof(RowNorm, summed), READONLY, nullptr},
    {"offset", T_DOUBLE, offsetof(RowNorm, offset), READONLY, nullptr},
    {"rounds_first", T_BOOL, offsetof(RowNorm, rounds_first), READONLY, nullptr},
    {"wide_sum", T_BOOL, offsetof(RowNorm, wide_sum), READONLY, nullptr},
    {"scales", T_OBJECT, offsetof(RowNorm, scales), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject type = [] {
  PyTypeObject made = {};
  made.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
  made.tp_name = "fastcoll._C.RowNorm";
  made.tp_basicsize = sizeof(RowNorm);
  made.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
                  Py_TPFLAGS_DISALLOW_INSTANTIATION;
  made.tp_dealloc = deallocate;
  made.tp_traverse = traverse;
  made.tp_clear = clear;
  made.tp_members = members;
  return made;
}();

// ---- in a call

// The tensors of the norm.
bool read_tensors(const RowNorm& norm, RowCheck& check) {
  if (norm.residual != Py_None) {
    const std::optional<TensorView> residual = view_tensor(norm.residual);
    const bool is_written = norm.summed == Py_None || norm.summed == norm.residual;
    if (!residual || !check.add_residual(*residual, is_written)) return false;
  }
  if (norm.summed != Py_None && norm.summed != norm.residual) {
    const std::optional<TensorView> summed = view_tensor(norm.summed);
    if (!summed || !check.add_summed(*summed)) return false;
  }
  if (norm.weight != Py_None) {
    const std::optional<TensorView> weight = view_tensor(norm.weight);
    if (!weight || !check.add_weight(*weight)) return false;
  }
  if (norm.scales == Py_None) return true;
  const std::optional<TensorView> scales = view_tensor(norm.scales);
  return scales && check.add_scales(*scales);
}

}  // namespace

Prepared prepare_rows(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                      RowCall& rows) {
  if (Py_TYPE(args[kThen]) != subclass || !op_takes_rows(op)) return {};
  const RowNorm& norm = norm_of(args[kThen]);
  const bool scatters = verb == FastVerb::reduce_scatter_tensor;
  PyObject* const source = args[scatters ? kSecond : kTensor];
  PyObject* const target = scatters || !given(args[kSecond]) ? args[kTensor] : args[kSecond];
  const std::optional<TensorView> input = view_argument(source);
  const std::optional<TensorView> out = target == source ? input : view_argument(target);
  if (!input || !out) return {};
  if (scatters ? input->numel != out->numel * uint64_t(group.world_size())
               : !same_shape(*input, *out))
    return {};
  const size_t own_part = scatters ? size_t(group.rank()) * out->num_bytes() : 0;
  const bool is_in_place = out->dtype == input->dtype && out->ptr == input->ptr + own_part;
  RowCheck check(rows, *input, *out);
  if (!check.start(is_in_place) || !read_tensors(norm, check) ||
      !check.finish(norm.epsilon, norm.offset, norm.rounds_first != 0, norm.wide_sum != 0))
    return {};

  // Codes have no room for the plain result; the sums have, unless the residual lies there.
  void* plain = !rows.scales ? rows.out : rows.summed != rows.residual ? rows.summed : nullptr;
  Prepared call = with_plan(group, args.options, scatters ? Verb::reduce_scatter : Verb::all_reduce,
                            input->dtype, op, out->numel, 0, input->ptr, plain);
  call.has_rows = true;
  return call;
}

void count_row_writes(PyObject* then) {
  const RowNorm& norm = norm_of(then);
  for (PyObject* written : {summed_of(norm), norm.scales}) count_write(written);
}

bool add_row_norm(PyObject* module) {
  for (size_t i = 0; i < kNumArgs; ++i) names[i] = PyUnicode_InternFromString(kNames[i]);
  return PyModule_AddType(module, &type) == 0;
}

PyObject* set_row_norm(PyObject*, PyObject* object) {
  PyObject* done = set_subclass(object, type, subclass);
  if (done) subclass->tp_vectorcall = make;
  return done;
}

}  // namespace fastcoll
