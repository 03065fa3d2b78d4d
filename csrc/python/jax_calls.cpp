// SPDX-License-Identifier: Apache-2.0
// A call runs here, without the GIL, where its plan is known. The first of a kind goes to Python
// (set_jax_fallback), as do all calls of groups that C++ does not know, as those over nodes.
#include "python/jax_calls.h"

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "fastcoll/integrations/gil.h"
#include "group/process_group.h"
#include "memory/huge_pages.h"
#include "python/errors.h"
#include "python/host.h"
#include "python/jax_frame.h"
#include "python/read_parts.h"

namespace fastcoll {

namespace {

PyObject* take_python_error() {
#if PY_VERSION_HEX >= 0x030c0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value && trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
#endif
}

// The error that Python raised. A thread of XLA's forgets it with the GIL.
struct PythonError {
  PyObject* error;
};

GroupOf* group_in_object = nullptr;
PyObject* fallback = nullptr;
PyObject* last_error = nullptr;  // guarded by the GIL

// A group that compiled programs name by its number. It lives as long as the process, since a
// program may be called at any time.
class JaxGroup {
 public:
  explicit JaxGroup(PyObject* object) : core_(group_in_object(object)) { Py_INCREF(object); }

  ProcessGroup* core() const { return core_; }

  // The plan for calls of a kind; the group's own table needs the GIL.
  std::optional<Plan> plan(Verb verb, DType dtype, Op op, uint64_t numel, int root) {
    const Key key{verb, dtype, op, root, numel};
    const std::lock_guard lock(mutex_);
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
    return std::nullopt;
  }
  std::optional<Plan> look_up(Verb verb, DType dtype, Op op, uint64_t numel, int root) {
    constexpr size_t kMost = size_t{1} << 16;  // a program of ever new sizes must not grow for ever
    const GilHeld gil;
    const Plan* found = core_->cached_plan(verb, dtype, op, numel, root);
    if (!found) return std::nullopt;
    const std::lock_guard lock(mutex_);
    if (plans_.size() >= kMost) plans_.clear();
    return plans_[Key{verb, dtype, op, root, numel}] = *found;
  }

 private:
  using Key = std::tuple<Verb, DType, Op, int, uint64_t>;
  ProcessGroup* const core_;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

std::mutex groups_mutex;
std::deque<std::unique_ptr<JaxGroup>> groups;  // by number

JaxGroup& group_at(int64_t number) {
  const std::lock_guard lock(groups_mutex);
  if (number < 0 || size_t(number) >= groups.size())
    throw Failure(ErrorKind::usage, "fastcoll.jax has no group " + std::to_string(number));
  return *groups[size_t(number)];
}

// ---- in Python ----

PyObject* array_object(const Operand& operand, int flags) {
  if (!operand.is_given) return Py_NewRef(Py_None);
  const TensorView& view = operand.view;
  PyObject* shape = PyTuple_New(view.ndim);
  for (int32_t dim = 0; shape && dim < view.ndim; ++dim)
    PyTuple_SET_ITEM(shape, dim, PyLong_FromLongLong(view.shape[dim]));
  static char empty;
  char* data = view.numel ? reinterpret_cast<char*>(view.ptr) : &empty;
  PyObject* memory = PyMemoryView_FromMemory(data, Py_ssize_t(view.num_bytes()), flags);
  return Py_BuildValue("(iNN)", int(view.dtype), memory, shape);
}

void run_in_python(const JaxCall& call) {
  const GilHeld gil;
  const Facts& facts = call.facts;
  PyObject* result = PyObject_CallFunction(
      fallback, "(LLLLLLLL)NN", facts.group, facts.verb, facts.op, facts.root, facts.dest,
      facts.source, facts.tag, facts.gets, array_object(call.input, PyBUF_READ),
      array_object(call.output, PyBUF_WRITE));
  if (!result) throw PythonError{take_python_error()};
  Py_DECREF(result);
}

// ---- in C++ ----

std::shared_ptr<Transfer> transfer_of(bool sends, const JaxCall& call) {
  const TensorView& view = sends ? call.input.view : call.output.view;
  auto transfer = std::make_shared<Transfer>();
  transfer->sends = sends;
  transfer->peer = int(sends ? call.facts.dest : call.facts.source);
  transfer->tag = uint32_t(call.facts.tag);
  transfer->dtype = view.dtype;
  transfer->numel = view.numel;
  transfer->data = view.ptr;
  transfer->num_bytes = view.num_bytes();
  transfer->timeout_s = -1;
  return transfer;
}

void run_transfers(ProcessGroup& group, const JaxCall& call, Host& host) {
  std::array<std::shared_ptr<Transfer>, 2> transfers;
  size_t size = 0;
  if (call.facts.verb != kRecv) transfers[size++] = transfer_of(true, call);
  if (call.facts.verb != kSend) transfers[size++] = transfer_of(false, call);
  group.start({transfers.data(), size}, host);
  for (size_t i = 0; i < size; ++i) group.wait(*transfers[i], host, 0);
}

struct Shape {
  uint64_t numel = 0;
  Operands operands = {};
};

// The message of a call and its places; none if its arrays do not fit together.
std::optional<Shape> shape_of(const ProcessGroup& group, const JaxCall& call, Parts& parts) {
  const TensorView &input = call.input.view, &output = call.output.view;
  switch (call.verb()) {
    case Verb::barrier:
      return Shape{};
    case Verb::all_reduce:
    case Verb::all_gather:
      return Shape{input.numel, {input.ptr, output.ptr}};
    case Verb::reduce_scatter:
      return Shape{output.numel, {input.ptr, output.ptr}};
    case Verb::broadcast:
    case Verb::reduce: {
      std::byte* own = call.either().ptr;  // a rank whose result is its own array has no other
      return Shape{call.either().numel, {own, call.output.is_given ? output.ptr : own}};
    }
    default:
      break;
  }
  const std::optional<PartsKind> kind =
      read_parts({.verb = call.verb(),
                  .rank = group.rank(),
                  .world_size = group.world_size(),
                  .root = int(call.facts.root),
                  .outputs = {&output, size_t(call.output.is_given)},
                  .inputs = {&input, size_t(call.input.is_given)},
                  .cuts = true},
                 parts);
  if (!kind) return std::nullopt;
  if (kind->is_whole) return Shape{kind->numel, {input.ptr, output.ptr}};
  return Shape{kind->numel, {.parts = &parts}};
}

bool may_run_now(ProcessGroup& group, Host& host) {
  if (group.idle()) [[likely]]
    return true;
  group.await_queued(host);
  return group.idle();
}

// False if it is to be left to Python.
bool run_natively(JaxGroup& jax_group, const JaxCall& call) {
  ProcessGroup* group = jax_group.core();
  if (!group || group->traces()) return false;  // the call's site is known in Python alone
  DetachedHost host;
  if (!may_run_now(*group, host)) return false;
  if (call.facts.verb >= kSend) {
    run_transfers(*group, call, host);
    return true;
  }
  Parts parts;
  const std::optional<Shape> shape = shape_of(*group, call, parts);
  if (!shape) return false;
  const DType dtype = call.verb() == Verb::barrier ? DType::uint8 : call.either().dtype;
  const Op op = verb_reduces(call.verb()) ? Op(call.facts.op) : Op::sum;
  const int root = int(call.facts.root);
  std::optional<Plan> plan = jax_group.plan(call.verb(), dtype, op, shape->numel, root);
  if (!plan) plan = jax_group.look_up(call.verb(), dtype, op, shape->numel, root);
  if (!plan) return false;
  group->run(*plan, shape->operands, host, -1);
  return true;
}

// ---- errors ----

xla::Code code_of(const char* type) {
  struct Row {
    const char* type;
    xla::Code code;
  };
  static constexpr Row kRows[] = {{"CollectiveTimeout", xla::kDeadlineExceeded},
                                  {"PeerLostError", xla::kUnavailable},
                                  {"AbortedError", xla::kAborted},
                                  {"UsageError", xla::kInvalidArgument},
                                  {"UnsupportedError", xla::kUnimplemented},
                                  {"KeyboardInterrupt", xla::kCancelled}};
  for (const Row& row : kRows)
    if (std::strcmp(row.type, type) == 0) return row.code;
  return xla::kInternal;
}

// A Python error as one of XLA. It is kept for take_jax_error, too.
xla::Error* error_of(const xla::Api& api, PyObject* error) {
  PyObject* text = error ? PyObject_Str(error) : nullptr;
  const char* said = text ? PyUnicode_AsUTF8(text) : nullptr;
  const char* name = error ? Py_TYPE(error)->tp_name : "RuntimeError";
  const char* dot = std::strrchr(name, '.');
  const char* type = dot ? dot + 1 : name;
  const std::string message = std::string(type) + ": " + (said ? said : "");
  xla::ErrorArgs args{sizeof args, nullptr, message.c_str(), code_of(type)};
  if (std::strcmp(type, "KeyboardInterrupt") == 0) PyErr_SetInterrupt();  // XLA's error hides it
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XSETREF(last_error, error);
  return api.create_error(&args);
}

xla::Error* handle(xla::CallFrame* frame) {
  if (frame->extensions && frame->extensions->type == xla::kMetadata) {
    xla::Metadata& metadata =
        *reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata;
    metadata.api_version = {sizeof(xla::ApiVersion), nullptr, xla::kMajor, xla::kMinor};
    metadata.traits = 0;
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  try {
    const JaxCall call = call_of(*frame);
    if (call.output.is_given)
      ask_for_huge_pages(call.output.view.ptr, call.output.view.num_bytes());
    if (call.verb() == Verb::broadcast && call.input.is_given && call.output.is_given)
      std::memcpy(call.output.view.ptr, call.input.view.ptr, call.input.view.num_bytes());
    if (!run_natively(group_at(call.facts.group), call)) run_in_python(call);
    return nullptr;
  } catch (const Failure& failure) {
    const GilHeld gil;
    set_python_error(failure);
    return error_of(*frame->api, take_python_error());
  } catch (const Interrupted&) {  // its Python error is set, in the main thread
    const GilHeld gil;
    return error_of(*frame->api, take_python_error());
  } catch (const PythonError& raised) {
    const GilHeld gil;
    return error_of(*frame->api, raised.error);
  } catch (const std::exception& error) {
    const GilHeld gil;
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return error_of(*frame->api, take_python_error());
  }
}

// ---- the module ----

// The number by which compiled programs name the group.
PyObject* add_jax_group(PyObject*, PyObject* object) {
  return or_python_error([&] {
    const std::lock_guard lock(groups_mutex);
    groups.push_back(std::make_unique<JaxGroup>(object));
    return PyLong_FromSize_t(groups.size() - 1);
  });
}

PyObject* set_jax_fallback(PyObject*, PyObject* function) {
  Py_XSETREF(fallback, Py_NewRef(function));
  Py_RETURN_NONE;
}

// The error of the last call that failed, or None; it is forgotten then.
PyObject* take_jax_error(PyObject*, PyObject*) {
  PyObject* error = last_error ? last_error : Py_NewRef(Py_None);
  last_error = nullptr;
  return error;
}

PyObject* jax_handler(PyObject*, PyObject*) {
  return PyCapsule_New(reinterpret_cast<void*>(&handle), nullptr, nullptr);
}

PyMethodDef functions[] = {
    {"add_jax_group", add_jax_group, METH_O, nullptr},
    {"set_jax_fallback", set_jax_fallback, METH_O, nullptr},
    {"take_jax_error", take_jax_error, METH_NOARGS, nullptr},
    {"jax_handler", jax_handler, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_jax_calls(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace fastcoll
