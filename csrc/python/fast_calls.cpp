// SPDX-License-Identifier: Apache-2.0
#include "python/fast_calls.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "group/process_group.h"
#include "python/arguments.h"
#include "python/call_site.h"
#include "python/call_work.h"
#include "python/errors.h"
#include "python/gpu_work.h"
#include "python/host.h"
#include "python/numpy_view.h"
#include "python/prepare.h"
#include "python/row_norm.h"
#include "python/run_call.h"
#include "python/tensor_layout.h"
#include "python/tensor_view.h"
#include "python/torch_groups.h"
#include "python/torch_tracers.h"
#include "python/wait_listener.h"

namespace fastcoll {

namespace {

// Set up once by the Python side; guarded by the GIL. References are kept for the life of the
// process.
PyObject* default_group_object = nullptr;
ProcessGroup* default_group = nullptr;
std::array<PyObject*, kNumOps> reduce_ops{}, op_strings{};
std::array<PyObject*, kNumFastVerbs> fallbacks{};
std::array<PyMethodDef, kNumFastVerbs> definitions{}, methods{};
std::array<std::string, kNumFastVerbs> docs;  // the signature, then the fallback's docstring
std::array<std::array<PyObject*, Signature::kMostParams>, kNumFastVerbs> param_names{};
PyObject* auto_string = nullptr;
std::array<PyObject*, kNumAlgorithms> algorithm_strings{};
std::array<PyObject*, 2> numerics_strings{};
GroupOf* group_in_object = nullptr;

// Reads an option's value as 1 + its place among `words`. Words in source code are interned, so
// they are compared as pointers.
template <size_t kWords>
bool read_word(PyObject* value, const std::array<PyObject*, kWords>& words, uint8_t& place) {
  const auto found = std::find(words.begin(), words.end(), value);
  place = uint8_t(1 + (found - words.begin()));
  return found != words.end();
}

bool read_limit(PyObject* value, double& timeout_s) {
  if (value == Py_None) return true;
  if (PyFloat_Check(value)) timeout_s = PyFloat_AS_DOUBLE(value);
  else if (const std::optional<uint64_t> number = number_of(value)) timeout_s = double(*number);
  return timeout_s > 0 && std::isfinite(timeout_s);
}

// Sort the arguments by meaning. A method has no group among them; its group is sorted already.
// False if the call is not one for the fast path.
bool sort_args(int verb, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames,
               Args& sorted) {
  const Signature& signature = kSignatures[verb];
  if (num_args == 1 && !kwnames && signature.params[0].meaning == kTensor) {
    sorted[kTensor] = args[0];  // most calls: one tensor
    return true;
  }
  const int group_place = sorted[kGroup] ? signature.group_place : signature.num_params;
  if (num_args + (sorted[kGroup] != nullptr) > signature.num_positional) return false;
  const auto put = [&](int i, PyObject* value) {
    const Param meaning = signature.params[i].meaning;
    if (meaning == kTimeout) return read_limit(value, sorted.timeout_s);
    if (meaning == kWire) return value == Py_None;
    if (meaning == kNumerics)
      return value == Py_None || read_word(value, numerics_strings, sorted.options.numerics);
    if (meaning == kAlgorithm)
      return value == auto_string || read_word(value, algorithm_strings, sorted.options.algorithm);
    if (sorted[meaning]) return false;
    sorted[meaning] = value;
    return true;
  };
  for (int i = 0; i < num_args; ++i)
    if (!put(i + (i >= group_place), args[i])) return false;
  const Py_ssize_t num_keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < num_keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    int i = 0;  // keyword names in source code are interned: compared as pointers
    while (i < signature.num_params && param_names[size_t(verb)][size_t(i)] != name) ++i;
    if (i == signature.num_params || !put(i, args[num_args + k])) return false;
  }
  return !sorted[kAsyncOp] || PyBool_Check(sorted[kAsyncOp]);
}

// The group of a call; null if it is not known here.
class GroupArgument {
 public:
  ProcessGroup* group;
  PyObject* object;

  // Changes the root of a call on a process group of torch, which is a global rank, to the group's.
  [[gnu::always_inline]] GroupArgument(FastVerb verb, Args& args)
      : object(given(args[kGroup]) ? args[kGroup] : default_group_object),
        held_(Py_XNewRef(object)) {
    group = object == default_group_object ? default_group : group_in_object(object);
    if (group || !object || signature_of(verb).kind == VerbKind::transfer) return;
    stand_in_ = stand_in_of(object);
    group = stand_in_ ? group_in_object(stand_in_) : nullptr;
    if (!group) return;
    if (signature_of(verb).takes_root) args[kRoot] = root_ = group_rank_of(object, args[kRoot]);
    object = stand_in_;
    if (group->closed() || (signature_of(verb).takes_root && !root_)) group = nullptr;
  }
  GroupArgument(const GroupArgument&) = delete;
  GroupArgument& operator=(const GroupArgument&) = delete;
  ~GroupArgument() {
    Py_XDECREF(stand_in_);
    Py_XDECREF(root_);
    Py_XDECREF(held_);
  }

 private:
  PyObject* const held_;  // another thread may close the default group meanwhile
  PyObject *stand_in_ = nullptr, *root_ = nullptr;
};

// Pass a call on to Python. A method's group becomes an argument: by place if others follow it.
PyObject* call_fallback(FastVerb verb, PyObject* self, PyObject* const* args, size_t num_args,
                        PyObject* kwnames) {
  PyObject* fallback = fallbacks[size_t(verb)];
  if (!fallback) {
    PyErr_SetString(PyExc_RuntimeError, "import fastcoll, not fastcoll._C");
    return nullptr;
  }
  if (!self) return PyObject_Vectorcall(fallback, args, num_args, kwnames);
  const size_t place = std::min(num_args, size_t(signature_of(verb).group_place));
  const size_t num_keywords = kwnames ? size_t(PyTuple_GET_SIZE(kwnames)) : 0;
  std::vector<PyObject*> all(args, args + num_args + num_keywords);
  all.insert(all.begin() + Py_ssize_t(place), self);
  if (place < num_args) return PyObject_Vectorcall(fallback, all.data(), num_args + 1, kwnames);
  const Owned names(PyTuple_New(Py_ssize_t(num_keywords + 1)));
  if (!names.get()) return nullptr;
  PyTuple_SET_ITEM(names.get(), 0, PyUnicode_InternFromString("group"));
  for (size_t i = 0; i < num_keywords; ++i)
    PyTuple_SET_ITEM(names.get(), Py_ssize_t(i + 1),
                     Py_NewRef(PyTuple_GET_ITEM(kwnames, Py_ssize_t(i))));
  return PyObject_Vectorcall(fallback, all.data(), num_args, names.get());
}

// A verb: a function of the module, or a method of the group `self`. One body serves both, since
// two callers of its inlined functions cost 5 ns a call.
template <FastVerb kVerb>
PyObject* fast_call(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames) {
  Args sorted{};
  sorted[kGroup] = self;
  if (may_be_traced() && !refuse_traced(signature_of(kVerb).name)) return nullptr;
  try {
    if (sort_args(int(kVerb), args, num_args, kwnames, sorted)) {
      const GroupArgument target(kVerb, sorted);
      const CallSiteScope site(target.group && target.group->traces());
      if (PyObject* result =
              target.group ? run_fast<kVerb>({*target.group, target.object}, sorted) : nullptr)
        return result;
    }
    return call_fallback(kVerb, self, args, size_t(num_args), kwnames);
  } catch (const std::exception& error) {
    set_python_error(error);
  } catch (const Interrupted&) {
    // Its Python error is set already, but where an object of this call found no memory.
    if (!PyErr_Occurred()) PyErr_NoMemory();
  }
  return nullptr;
}

// As Python's definition of a C function.
template <FastVerb kVerb>
PyMethodDef define(const char* doc) {
  return {signature_of(kVerb).name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fast_call<kVerb>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

template <FastVerb kVerb>
bool bind(PyObject* module) {
  const Signature& signature = kSignatures[int(kVerb)];
  for (int i = 0; i < signature.num_params; ++i)
    param_names[size_t(kVerb)][size_t(i)] = PyUnicode_InternFromString(signature.params[i].name);
  docs[size_t(kVerb)] = signature.doc;
  PyMethodDef& definition = definitions[size_t(kVerb)];
  definition = define<kVerb>(docs[size_t(kVerb)].c_str());
  methods[size_t(kVerb)] = define<kVerb>(signature.method_doc);
  PyObject* package = PyUnicode_InternFromString("fastcoll");
  PyObject* function = PyCFunction_NewEx(&definition, nullptr, package);
  Py_XDECREF(package);
  const int failed = PyModule_AddObjectRef(module, signature.name, function);
  Py_XDECREF(function);
  return failed == 0;
}

template <size_t... kVerbs>
bool bind_all(PyObject* module, std::index_sequence<kVerbs...>) {
  return (bind<FastVerb(kVerbs)>(module) && ...);
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

PyObject* set_numpy_type(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "%R is not a type", type);
  set_array_type(reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

PyObject* set_numpy_integers(PyObject*, PyObject* types) {
  if (!PyTuple_Check(types))
    return PyErr_Format(PyExc_TypeError, "set_numpy_integers takes a tuple of types");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    PyObject* type = PyTuple_GET_ITEM(types, i);
    if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "%R is not a type", type);
    add_array_integer(reinterpret_cast<PyTypeObject*>(type));
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

// Give a class the verbs as methods; return the class.
PyObject* add_verbs(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "%R is not a type", type);
  for (PyMethodDef& method : methods) {
    const Owned added(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &method));
    if (!added.get() || PyObject_SetAttrString(type, method.ml_name, added.get()) != 0)
      return nullptr;
  }
  for (const Alias& alias : kAliases) {
    const Owned method(PyObject_GetAttrString(type, signature_of(alias.verb).name));
    if (!method.get() || PyObject_SetAttrString(type, alias.name, method.get()) != 0)
      return nullptr;
  }
  return Py_NewRef(type);
}

PyMethodDef setters[] = {
    {"add_verbs", add_verbs, METH_O, nullptr},
    {"set_default_group", set_default_group, METH_O, nullptr},
    {"set_reduce_ops", set_reduce_ops, METH_O, nullptr},
    {"learn_tensor_layout", learn_tensor_layout, METH_O, nullptr},
    {"learn_gpu_keys", learn_gpu_keys, METH_VARARGS, nullptr},
    {"set_tensor_types", set_tensor_types, METH_O, nullptr},
    {"set_numpy_type", set_numpy_type, METH_O, nullptr},
    {"set_numpy_integers", set_numpy_integers, METH_O, nullptr},
    {"set_fallback", set_fallback, METH_VARARGS, nullptr},
    {"set_torch_tracers", set_torch_tracers, METH_VARARGS, nullptr},
    {"set_call_work", set_call_work, METH_O, nullptr},
    {"set_gpu_works", set_gpu_works, METH_VARARGS, nullptr},
    {"set_row_norm", set_row_norm, METH_O, nullptr},
    {"set_transfer_work", set_transfer_work, METH_O, nullptr},
    {"set_p2p_op_type", set_p2p_op_type, METH_O, nullptr},
    {"set_wait_listener", set_wait_listener, METH_O, nullptr},
    {"set_stand_in", set_stand_in, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Apart, so that the calls without a name keep their code.
[[gnu::noinline, gnu::cold]] std::optional<Op> op_named(PyObject* name) {
  for (int op = 0; op < kNumOps; ++op)
    if (op_strings[size_t(op)] == name) return Op(op);
  return std::nullopt;
}

}  // namespace

std::optional<Op> op_of(PyObject* object) {
  if (!object) return Op::sum;
  for (int op = 0; op < kNumOps; ++op)
    if (reduce_ops[size_t(op)] == object) return Op(op);
  return op_named(object);
}

PyObject* default_group_of_calls() { return default_group ? default_group_object : nullptr; }

PyCFunction function_of(FastVerb verb) { return definitions[size_t(verb)].ml_meth; }

bool add_fast_calls(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  auto_string = PyUnicode_InternFromString("auto");
  for (int i = 0; i < kNumAlgorithms; ++i)
    algorithm_strings[size_t(i)] = PyUnicode_InternFromString(algorithm_name(Algorithm(i)));
  for (int op = 0; op < kNumOps; ++op) {
    std::string name = op_name(Op(op));
    for (char& letter : name) letter = char(std::tolower(letter));
    op_strings[size_t(op)] = PyUnicode_InternFromString(name.c_str());
  }
  numerics_strings = {PyUnicode_InternFromString("same_bits"), PyUnicode_InternFromString("fast")};
  return bind_all(module, std::make_index_sequence<kNumFastVerbs>()) && add_row_norm(module) &&
         add_call_work(module) && add_gpu_work(module) &&
         add_transfer_work(module, group_of_object) && PyModule_AddFunctions(module, setters) == 0;
}

}  // namespace fastcoll
