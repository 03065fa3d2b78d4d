// SPDX-License-Identifier: Apache-2.0
#include "python/fast_calls.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "group/process_group.h"
#include "python/arguments.h"
#include "python/call_site.h"
#include "python/call_work.h"
#include "python/errors.h"
#include "python/host.h"
#include "python/numpy_view.h"
#include "python/outputs.h"
#include "python/prepare.h"
#include "python/tensor_layout.h"
#include "python/tensor_view.h"
#include "python/torch_groups.h"
#include "python/transfers.h"

namespace fastcoll {

namespace {

// Set up once by the Python side; guarded by the GIL. References are kept for the life of the
// process.
PyObject* default_group_object = nullptr;
ProcessGroup* default_group = nullptr;
std::array<PyObject*, kNumOps> reduce_ops{};
std::array<PyObject*, kNumFastVerbs> fallbacks{};
std::array<PyMethodDef, kNumFastVerbs> definitions{};
std::array<std::string, kNumFastVerbs> docs;  // the signature, then the fallback's docstring
std::array<std::array<PyObject*, Signature::kMostParams>, kNumFastVerbs> param_names{};
PyObject* auto_string = nullptr;
std::array<PyObject*, kNumAlgorithms> algorithm_strings{};
std::array<PyObject*, 2> numerics_strings{};
GroupOf* group_in_object = nullptr;

// What an option says, as 1 + its place among `words`. Words in source code are interned: compared
// as pointers.
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

// Sort the arguments by meaning. False if the call is not one for the fast path.
bool sort_args(int verb, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames,
               Args& sorted) {
  const Signature& signature = kSignatures[verb];
  if (num_args == 1 && !kwnames && signature.params[0].meaning == kTensor) {
    sorted[kTensor] = args[0];  // most calls: one tensor
    return true;
  }
  if (num_args > signature.num_positional) return false;
  const auto put = [&](int i, PyObject* value) {
    const Param meaning = signature.params[i].meaning;
    if (meaning == kTimeout) return read_limit(value, sorted.timeout_s);
    if (meaning == kNumerics)
      return value == Py_None || read_word(value, numerics_strings, sorted.options.numerics);
    if (meaning == kAlgorithm)
      return value == auto_string || read_word(value, algorithm_strings, sorted.options.algorithm);
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
  return !sorted[kAsyncOp] || PyBool_Check(sorted[kAsyncOp]);
}

// Keeps the tensors of a list alive while the GIL is away.
class ListSnapshot {
 public:
  explicit ListSnapshot(PyObject* object)
      : object_(object && (PyList_CheckExact(object) || PyTuple_CheckExact(object))
                    ? PySequence_Tuple(object)
                    : nullptr) {
    PyErr_Clear();
  }
  ListSnapshot(const ListSnapshot&) = delete;
  ListSnapshot& operator=(const ListSnapshot&) = delete;
  ~ListSnapshot() { Py_XDECREF(object_); }
  // The list's copy; what was given, if that is none.
  PyObject* or_given(PyObject* object) const { return object_ ? object_ : object; }

 private:
  PyObject* object_;
};

// Whether it was a fast call, which then has run.
template <FastVerb kVerb>
bool run_one(ProcessGroup& group, const Args& args, Op op) {
  Places places;
  Prepared call = prepare(kVerb, group, args, op, places.parts);
  if (!call.is_fast()) [[unlikely]]
    call = prepare_strided(kVerb, group, args, op, places.strided);
  if (!call.is_fast()) [[unlikely]]
    return false;
  count_writes(written_by<kVerb>(group, args));
  PythonHost host;
  if (call.num_bytes >= kGilFreeBytes) host.blocking();
  group.run(call.plan, call.operands(places), host, args.timeout_s);
  return true;
}

constexpr Verb verb_of_lists(FastVerb verb) {
  if (verb == FastVerb::all_reduce_coalesced) return Verb::all_reduce;
  return verb == FastVerb::reduce_scatter_tensor_coalesced ? Verb::reduce_scatter
                                                           : Verb::all_gather;
}

// Null if it is no fast call; then nothing has happened.
template <FastVerb kVerb>
PyObject* start_collective(const Caller& caller, const Args& args, Op op) {
  ProcessGroup& group = caller.group;
  group.refuse_handler();  // whose wait would be one for itself
  group.refuse_child();
  if (group.traces()) return nullptr;  // where it was made is known in this thread only
  const auto call = std::make_shared<AsyncCall>(group, args.timeout_s);
  if constexpr (kVerb < FastVerb::all_reduce_coalesced) {
    Prepared one = prepare(kVerb, group, args, op, call->places.parts);
    if (!one.is_fast()) one = prepare_strided(kVerb, group, args, op, call->places.strided);
    if (!one.is_fast()) return nullptr;
    call->is_to_run(one);
  } else {
    auto lists =
        prepare_lists(verb_of_lists(kVerb), group, args[kTensor], args[kSecond], op, args.options);
    if (lists.empty()) return nullptr;
    call->is_to_run(std::move(lists));
  }
  const Owned outputs(outputs_of<kVerb>(group, args));
  const Owned kept(PyTuple_Pack(2, args[kTensor] ? args[kTensor] : Py_None,
                                args[kSecond] ? args[kSecond] : Py_None));
  if (!outputs.get() || !kept.get()) throw Interrupted{};
  count_writes(written_by<kVerb>(group, args));
  return queue_call(caller, call, kept.get(), outputs.get());
}

// Whether a call may run now. Gets done what C++ has queued before it; behind what Python has
// queued it goes there.
bool may_run_now(ProcessGroup& group) {
  if (group.idle()) [[likely]]
    return true;
  group.refuse_handler();  // it would wait for the call that it interrupted
  group.refuse_child();
  WaitedTime waited(0);
  if (go_on_here(group.queue(), nullptr, waited) && group.idle()) return true;
  PythonHost host;
  host.blocking();
  group.await_queued(host);
  return group.idle();
}

// As start_collective.
template <FastVerb kVerb>
PyObject* run_collective(const Caller& caller, Args& args) {
  ProcessGroup& group = caller.group;
  const bool is_async = args[kAsyncOp] == Py_True;
  const std::optional<Op> op = op_of(args[kOp]);
  if (!op) return nullptr;
  if (!is_async && !may_run_now(group)) return nullptr;
  if constexpr (!takes_sequences(kVerb)) {
    if (is_async) return start_collective<kVerb>(caller, args, *op);
    return run_one<kVerb>(group, args, *op) ? Py_NewRef(Py_None) : nullptr;
  } else {
    const ListSnapshot first(args[kTensor]), second(args[kSecond]);
    args[kTensor] = first.or_given(args[kTensor]);
    args[kSecond] = second.or_given(args[kSecond]);
    if (is_async) return start_collective<kVerb>(caller, args, *op);
    if constexpr (kVerb < FastVerb::all_reduce_coalesced) {
      return run_one<kVerb>(group, args, *op) ? Py_NewRef(Py_None) : nullptr;
    } else {
      const auto lists = prepare_lists(verb_of_lists(kVerb), group, args[kTensor], args[kSecond],
                                       *op, args.options);
      if (lists.empty()) return nullptr;
      count_writes(written_by<kVerb>(group, args));
      PythonHost host;
      run_lists(group, lists, host, args.timeout_s);
      return Py_NewRef(Py_None);
    }
  }
}

// A new reference to the result; null if it is no fast call. Transfers go beside the group's calls,
// queued ones too.
template <FastVerb kVerb>
PyObject* run_fast(const Caller& caller, Args& args) {
  constexpr bool kSends = kVerb == FastVerb::send || kVerb == FastVerb::isend;
  if constexpr (kVerb == FastVerb::send || kVerb == FastVerb::recv)
    return run_transfer(kSends, caller.group, args);
  else if constexpr (kVerb == FastVerb::isend || kVerb == FastVerb::irecv)
    return start_transfer(kSends, caller, args);
  else if constexpr (kVerb == FastVerb::batch_isend_irecv) return start_batch(caller, args);
  else return run_collective<kVerb>(caller, args);
}

// The group that a call means; null if that is not known here.
class GroupArgument {
 public:
  ProcessGroup* group;
  PyObject* object;

  // Changes the root of a call on a process group of torch, which is a global rank, to the group's.
  [[gnu::always_inline]] GroupArgument(FastVerb verb, Args& args)
      : object(given(args[kGroup]) ? args[kGroup] : default_group_object) {
    group = object == default_group_object ? default_group : group_in_object(object);
    if (group || !object || is_transfer(verb)) return;
    stand_in_ = stand_in_of(object);
    group = stand_in_ ? group_in_object(stand_in_) : nullptr;
    if (!group) return;
    if (takes_root(verb)) args[kRoot] = root_ = group_rank_of(object, args[kRoot]);
    object = stand_in_;
    if (group->closed() || (takes_root(verb) && !root_)) group = nullptr;
  }
  GroupArgument(const GroupArgument&) = delete;
  GroupArgument& operator=(const GroupArgument&) = delete;
  ~GroupArgument() {
    Py_XDECREF(stand_in_);
    Py_XDECREF(root_);
  }

 private:
  PyObject *stand_in_ = nullptr, *root_ = nullptr;
};

template <FastVerb kVerb>
PyObject* fast_call(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* kwnames) {
  Args sorted{};
  if (sort_args(int(kVerb), args, num_args, kwnames, sorted)) {
    const GroupArgument target(kVerb, sorted);
    try {
      const CallSiteScope site(target.group && target.group->traces());
      if (PyObject* result =
              target.group ? run_fast<kVerb>({*target.group, target.object}, sorted) : nullptr)
        return result;
    } catch (const Failure& failure) {
      set_python_error(failure);
      return nullptr;
    } catch (const Interrupted&) {
      return nullptr;
    }
  }
  PyObject* fallback = fallbacks[size_t(kVerb)];
  if (!fallback) {
    PyErr_SetString(PyExc_RuntimeError, "import fastcoll, not fastcoll._C");
    return nullptr;
  }
  return PyObject_Vectorcall(fallback, args, size_t(num_args), kwnames);
}

template <FastVerb kVerb>
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
      // What Python says of wrong arguments is to name what the program called.
      if (PyObject* given_name = PyUnicode_FromString(name)) {
        PyObject_SetAttrString(function, "__name__", given_name);
        PyObject_SetAttrString(function, "__qualname__", given_name);
        Py_DECREF(given_name);
        PyErr_Clear();
      }
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
    {"learn_tensor_layout", learn_tensor_layout, METH_O, nullptr},
    {"set_tensor_types", set_tensor_types, METH_O, nullptr},
    {"set_numpy_type", set_numpy_type, METH_O, nullptr},
    {"set_numpy_integers", set_numpy_integers, METH_O, nullptr},
    {"set_fallback", set_fallback, METH_VARARGS, nullptr},
    {"set_call_work", set_call_work, METH_O, nullptr},
    {"set_transfer_work", set_transfer_work, METH_O, nullptr},
    {"set_p2p_op_type", set_p2p_op_type, METH_O, nullptr},
    {"set_stand_in", set_stand_in, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

std::optional<Op> op_of(PyObject* object) {
  if (!object) return Op::sum;
  for (int op = 0; op < kNumOps; ++op)
    if (reduce_ops[size_t(op)] == object) return Op(op);
  return std::nullopt;
}

PyCFunction function_of(FastVerb verb) { return definitions[size_t(verb)].ml_meth; }

bool add_fast_calls(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  auto_string = PyUnicode_InternFromString("auto");
  for (int i = 0; i < kNumAlgorithms; ++i)
    algorithm_strings[size_t(i)] = PyUnicode_InternFromString(algorithm_name(Algorithm(i)));
  numerics_strings = {PyUnicode_InternFromString("same_bits"), PyUnicode_InternFromString("fast")};
  return bind_all(module, std::make_index_sequence<kNumFastVerbs>()) && add_call_work(module) &&
         add_transfer_work(module, group_of_object) && PyModule_AddFunctions(module, setters) == 0;
}

}  // namespace fastcoll
