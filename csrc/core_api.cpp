// SPDX-License-Identifier: Apache-2.0
#include "core_api.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "fastcoll/integrations/core_api.h"
#include "process_group.h"
#include "python_errors.h"
#include "python_host.h"

namespace fastcoll {

namespace {

static_assert(sizeof(Plan) <= sizeof(FastcollPlan) && alignof(Plan) <= alignof(FastcollPlan));
static_assert(std::is_trivially_copyable_v<Plan>);
static_assert(int(Verb::all_reduce) == kFastcollAllReduce &&
              int(Verb::reduce_scatter) == kFastcollReduceScatter &&
              int(Verb::all_gather) == kFastcollAllGather &&
              int(Verb::broadcast) == kFastcollBroadcast && int(Verb::barrier) == kFastcollBarrier);
static_assert(int(DType::float32) == kFastcollFloat32 && int(DType::float64) == kFastcollFloat64 &&
              int(DType::float16) == kFastcollFloat16 &&
              int(DType::bfloat16) == kFastcollBfloat16 && int(DType::int8) == kFastcollInt8 &&
              int(DType::uint8) == kFastcollUint8 && int(DType::int32) == kFastcollInt32 &&
              int(DType::int64) == kFastcollInt64 && int(DType::boolean) == kFastcollBool);

GroupOf* group_in_object = nullptr;

ProcessGroup& ours(FastcollGroup* group) { return *reinterpret_cast<ProcessGroup*>(group); }

FastcollGroup* group_of(void* object) {
  return reinterpret_cast<FastcollGroup*>(group_in_object(static_cast<PyObject*>(object)));
}

bool find_plan(FastcollGroup* group, FastcollVerb verb, FastcollDType dtype, int op, uint64_t numel,
               int root, FastcollPlan* plan) {
  // Where the program made the call is known in Python alone.
  if (ours(group).traces()) return false;
  const Plan* known = ours(group).cached_plan(Verb(verb), DType(dtype), Op(op), numel, root);
  if (known) std::memcpy(plan->bytes, known, sizeof *known);
  return known != nullptr;
}

void raise(const FastcollFailure* failure) {
  set_python_error(Failure(ErrorKind(failure->kind), failure->text, failure->ranks));
}

bool idle(const FastcollGroup* group) {
  return reinterpret_cast<const ProcessGroup*>(group)->idle();
}

bool begin_async(FastcollGroup* group) { return ours(group).begin_native(); }
void end_async(FastcollGroup* group) { ours(group).end_native(); }

void put(FastcollFailure* into, ErrorKind kind, const char* text, uint64_t ranks) {
  into->kind = uint32_t(kind);
  into->ranks = ranks;
  const size_t length = std::min(std::strlen(text), sizeof into->text - 1);
  std::memcpy(into->text, text, length);
  into->text[length] = '\0';
}

FastcollOutcome run(FastcollGroup* group, const FastcollPlan* plan, const void* input, void* output,
                    double timeout_s, FastcollFailure* failure) {
  Plan copy;
  std::memcpy(static_cast<void*>(&copy), plan->bytes, sizeof copy);
  try {
    DetachedHost host;
    ours(group).run(copy, input, output, host, timeout_s);
    return kFastcollDone;
  } catch (const Failure& error) {
    put(failure, error.kind(), error.what(), error.ranks());
  } catch (const Interrupted&) {
    return kFastcollInterrupted;
  } catch (const std::exception& error) {
    put(failure, ErrorKind::driver, error.what(), 0);
  }
  return kFastcollFailed;
}

constexpr FastcollCoreApi kApi = {
    kFastcollCoreApiVersion, group_of, find_plan, raise, idle, begin_async, end_async, run,
};

}  // namespace

bool add_core_api(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  PyObject* capsule =
      PyCapsule_New(const_cast<FastcollCoreApi*>(&kApi), kFastcollCoreApiName, nullptr);
  const int failed = PyModule_AddObjectRef(module, "core_api", capsule);
  Py_XDECREF(capsule);
  return failed == 0;
}

}  // namespace fastcoll
