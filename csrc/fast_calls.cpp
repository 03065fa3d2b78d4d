// SPDX-License-Identifier: Apache-2.0
#include "fast_calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "process_group.h"
#include "python_errors.h"
#include "python_host.h"
#include "tensor_view.h"

namespace fastcoll {

namespace {

// What one verb's arguments are called, in order, and how they read when left out.
enum Param { kTensor, kSecond, kOp, kSrc, kGroup, kAsyncOp, kAlgorithm, kOther, kNumParams };
struct Signature {
  const char* name;
  int num_positional;
  int num_params;
  struct {
    const char* name;
    Param meaning;  // kOther: anything but None leaves the fast path
  } params[9];
  const char* doc;
};

constexpr int kNumFastVerbs = 5;  // the first of Verb
constexpr Signature kSignatures[kNumFastVerbs] = {
    {"all_reduce",
     4,
     8,
     {{"tensor", kTensor},
      {"op", kOp},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"out", kSecond},
      {"algorithm", kAlgorithm},
      {"numerics", kOther},
      {"timeout_s", kOther}},
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
      {"numerics", kOther},
      {"timeout_s", kOther}},
     "reduce_scatter_tensor(output, input, op=..., group=None, async_op=False, *, "
     "algorithm='auto', numerics=None, timeout_s=None)\n--\n\n"},
    {"all_gather_into_tensor",
     4,
     5,
     {{"output_tensor", kTensor},
      {"input_tensor", kSecond},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kOther}},
     "all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False, *, "
     "timeout_s=None)"
     "\n--\n\n"},
    {"broadcast",
     4,
     5,
     {{"tensor", kTensor},
      {"src", kSrc},
      {"group", kGroup},
      {"async_op", kAsyncOp},
      {"timeout_s", kOther}},
     "broadcast(tensor, src, group=None, async_op=False, *, timeout_s=None)\n--\n\n"},
    {"barrier",
     2,
     3,
     {{"group", kGroup}, {"async_op", kAsyncOp}, {"timeout_s", kOther}},
     "barrier(group=None, async_op=False, *, timeout_s=None)\n--\n\n"},
};

// Set up once by the Python side; guarded by the GIL. References are kept for the life of the
// process.
PyObject* default_group_object = nullptr;
ProcessGroup* default_group = nullptr;
std::array<PyObject*, kNumOps> reduce_ops{};
std::array<PyObject*, kNumFastVerbs> fallbacks{};
std::array<PyMethodDef, kNumFastVerbs> definitions{};
std::array<std::string, kNumFastVerbs> docs;  // the signature, then the fallback's docstring
std::array<std::array<PyObject*, 9>, kNumFastVerbs> param_names{};
PyObject* auto_string = nullptr;
GroupOf* group_in_object = nullptr;

using Args = std::array<PyObject*, kNumParams>;

// Sort the arguments by meaning. False if the call is not one for the fast path.
bool sort_args(int verb, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames,
               Args& sorted) {
  const Signature& signature = kSignatures[verb];
  if (num_args > signature.num_positional) return false;
  const auto put = [&](int i, PyObject* value) {
    const Param meaning = signature.params[i].meaning;
    if (meaning == kOther) return value == Py_None;
    if (meaning == kAlgorithm) return value == auto_string;
    if (sorted[meaning]) return false;
    sorted[meaning] = value;
    return true;
  };
  for (Py_ssize_t i = 0; i < num_args; ++i)
    if (!put(int(i), args[i])) return false;
  const Py_ssize_t num_keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    int i = 0;  // keyword names in source code are interned: compared as pointers
    while (i < signature.num_params && param_names[size_t(verb)][size_t(i)] != name) ++i;
    if (i == signature.num_params || !put(i, args[num_args + k])) return false;
  }
  return !sorted[kAsyncOp] || sorted[kAsyncOp] == Py_False;
}

ProcessGroup* group_of(PyObject* object) {
  if (!object || object == Py_None) return default_group;
  return group_in_object(object);
}

bool overlap(const TensorView& a, const TensorView& b) {
  return a.ptr < b.end() && b.ptr < a.end();
}

bool same_shape(const TensorView& a, const TensorView& b) {
  return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// What a fast call hands to the group; plan.hash is 0 if it is not a fast call after all.
struct Prepared {
  Plan plan;
  const void* input = nullptr;
  void* output = nullptr;
};

std::optional<Op> op_of(PyObject* object) {
  if (!object) return Op::sum;
  for (int op = 0; op < kNumOps; ++op)
    if (reduce_ops[size_t(op)] == object) return Op(op);
  return std::nullopt;
}

Prepared with_plan(const ProcessGroup& group, Verb verb, DType dtype, Op op, uint64_t numel,
                   int root, const void* input, void* output) {
  const Plan* plan = group.cached_plan(verb, dtype, op, numel, root);
  return plan ? Prepared{*plan, input, output} : Prepared{};
}

Prepared prepare(Verb verb, const ProcessGroup& group, const Args& args) {
  if (verb == Verb::barrier)
    return with_plan(group, verb, DType::uint8, Op::sum, 0, 0, nullptr, nullptr);
  if (!args[kTensor]) return {};
  const std::optional<TensorView> tensor = view_tensor(args[kTensor]);
  const std::optional<Op> op = op_of(args[kOp]);
  if (!tensor || !op) return {};
  if (verb == Verb::broadcast) {
    if (!args[kSrc] || !PyLong_CheckExact(args[kSrc])) return {};
    int overflow = 0;
    const long root = PyLong_AsLongAndOverflow(args[kSrc], &overflow);
    if (overflow || root < 0 || root >= group.world_size()) return {};
    return with_plan(group, verb, tensor->dtype, Op::sum, tensor->numel, int(root), tensor->ptr,
                     tensor->ptr);
  }
  const bool has_second = args[kSecond] && args[kSecond] != Py_None;
  if (verb == Verb::all_reduce && !has_second)
    return with_plan(group, verb, tensor->dtype, *op, tensor->numel, 0, tensor->ptr, tensor->ptr);
  const std::optional<TensorView> second = has_second ? view_tensor(args[kSecond]) : std::nullopt;
  if (!second || second->dtype != tensor->dtype || overlap(*tensor, *second)) return {};
  const uint64_t world = uint64_t(group.world_size());
  switch (verb) {
    case Verb::all_reduce:  // tensor -> out
      if (!same_shape(*tensor, *second)) return {};
      return with_plan(group, verb, tensor->dtype, *op, tensor->numel, 0, tensor->ptr, second->ptr);
    case Verb::reduce_scatter:  // input -> output
      if (second->numel != tensor->numel * world) return {};
      return with_plan(group, verb, tensor->dtype, *op, tensor->numel, 0, second->ptr, tensor->ptr);
    default:  // all_gather: input_tensor -> output_tensor
      if (tensor->numel != second->numel * world) return {};
      return with_plan(group, verb, tensor->dtype, Op::sum, second->numel, 0, second->ptr,
                       tensor->ptr);
  }
}

// Above this the GIL is given up at once: copying takes longer than handing it over.
constexpr size_t kGilFreeBytes = size_t{32} << 10;

template <Verb kVerb>
PyObject* fast_call(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames) {
  Args sorted{};
  if (sort_args(int(kVerb), args, num_args, kwnames, sorted)) {
    ProcessGroup* group = group_of(sorted[kGroup]);
    if (group && group->idle()) {
      const Prepared call = prepare(kVerb, *group, sorted);
      if (call.plan.hash != 0) {
        try {
          PythonHost host;
          if (call.plan.numel * call.plan.elem_bytes() >= kGilFreeBytes) host.blocking();
          group->run(call.plan, call.input, call.output, host, -1);
        } catch (const Failure& failure) {
          set_python_error(failure);
          return nullptr;
        } catch (const Interrupted&) {
          return nullptr;
        }
        Py_RETURN_NONE;
      }
    }
  }
  PyObject* fallback = fallbacks[size_t(kVerb)];
  if (!fallback) {
    PyErr_SetString(PyExc_RuntimeError, "import fastcoll, not fastcoll._C");
    return nullptr;
  }
  return PyObject_Vectorcall(fallback, args, size_t(num_args), kwnames);
}

template <Verb kVerb>
bool bind(PyObject* module) {
  const Signature& signature = kSignatures[int(kVerb)];
  for (int i = 0; i < signature.num_params; ++i)
    param_names[size_t(kVerb)][size_t(i)] = PyUnicode_InternFromString(signature.params[i].name);
  docs[size_t(kVerb)] = signature.doc;
  PyMethodDef& definition = definitions[size_t(kVerb)];
  definition = {signature.name,
                reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fast_call<kVerb>)),
                METH_FASTCALL | METH_KEYWORDS, docs[size_t(kVerb)].c_str()};
  PyObject* package = PyUnicode_InternFromString("fastcoll");
  PyObject* function = PyCFunction_NewEx(&definition, nullptr, package);
  Py_XDECREF(package);
  const int failed = PyModule_AddObjectRef(module, signature.name, function);
  Py_XDECREF(function);
  return failed == 0;
}

// The reference that `place` holds becomes one to `object`.
void keep(PyObject*& place, PyObject* object) {
  Py_INCREF(object);
  Py_XDECREF(place);
  place = object;
}

PyObject* set_default_group(PyObject*, PyObject* object) {
  ProcessGroup* group = object == Py_None ? nullptr : group_in_object(object);
  if (!group && object != Py_None)
    return PyErr_Format(PyExc_TypeError, "set_default_group takes a Group or None, not %R", object);
  keep(default_group_object, object);
  default_group = group;
  Py_RETURN_NONE;
}

PyObject* set_reduce_ops(PyObject*, PyObject* ops) {
  if (!PyTuple_Check(ops) || PyTuple_GET_SIZE(ops) != kNumOps)
    return PyErr_Format(PyExc_TypeError, "set_reduce_ops takes a tuple in the order of Op");
  for (int op = 0; op < kNumOps; ++op) keep(reduce_ops[size_t(op)], PyTuple_GET_ITEM(ops, op));
  Py_RETURN_NONE;
}

PyObject* set_tensor_types(PyObject*, PyObject* types) {
  if (!PyTuple_Check(types))
    return PyErr_Format(PyExc_TypeError, "set_tensor_types takes a tuple of types");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    PyObject* type = PyTuple_GET_ITEM(types, i);
    if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "%R is not a type", type);
    add_tensor_type(reinterpret_cast<PyTypeObject*>(type));
  }
  Py_RETURN_NONE;
}

PyObject* set_fallback(PyObject*, PyObject* args) {
  const char* name = nullptr;
  PyObject* function = nullptr;
  if (!PyArg_ParseTuple(args, "sO", &name, &function)) return nullptr;
  for (size_t verb = 0; verb < kNumFastVerbs; ++verb) {
    if (std::strcmp(name, kSignatures[verb].name) != 0) continue;
    PyObject* doc = PyObject_GetAttrString(function, "__doc__");
    const char* text = doc && PyUnicode_Check(doc) ? PyUnicode_AsUTF8(doc) : "";
    if (text) {
      docs[verb] = std::string(kSignatures[verb].doc) + text;
      definitions[verb].ml_doc = docs[verb].c_str();
      keep(fallbacks[verb], function);
    }
    Py_XDECREF(doc);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  return PyErr_Format(PyExc_ValueError, "no fast call named %s", name);
}

PyMethodDef setters[] = {
    {"set_default_group", set_default_group, METH_O, nullptr},
    {"set_reduce_ops", set_reduce_ops, METH_O, nullptr},
    {"set_tensor_types", set_tensor_types, METH_O, nullptr},
    {"set_fallback", set_fallback, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_fast_calls(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  auto_string = PyUnicode_InternFromString("auto");
  return bind<Verb::all_reduce>(module) && bind<Verb::reduce_scatter>(module) &&
         bind<Verb::all_gather>(module) && bind<Verb::broadcast>(module) &&
         bind<Verb::barrier>(module) && PyModule_AddFunctions(module, setters) == 0;
}

}  // namespace fastcoll
