// SPDX-License-Identifier: Apache-2.0
// torch's table of its tensors by DLPack (csrc/python/tensor_view.cpp), with another device and
// current stream. The tensors are the CPU's.
#include <cstdint>

namespace {

int tensors_on = -1;  // the GPU on which they lie; -1: where they do
uintptr_t current_stream = 0;

struct DlTensor {
  void* data;
  int32_t device_type, device;  // the rest is copied as it is
};
struct ExchangeApi {
  const void *version, *prev, *allocator, *from_object, *to_object;
  int (*dltensor_from_py_object)(void*, DlTensor*);
  int (*current_work_stream)(int32_t, int32_t, void**);
};
const ExchangeApi* right_api = nullptr;
constexpr int32_t kGpu = 2;

int tensor_from_object(void* object, DlTensor* tensor) {
  const int failed = right_api->dltensor_from_py_object(object, tensor);
  if (failed || tensors_on < 0) return failed;
  tensor->device_type = kGpu;
  tensor->device = tensors_on;
  return 0;
}
int find_stream(int32_t type, int32_t, void** stream) {
  *stream = reinterpret_cast<void*>(current_stream);
  return type == kGpu ? 0 : -1;
}

}  // namespace

extern "C" {

#pragma GCC visibility push(default)
const void* fake_exchange_api(const ExchangeApi* real) {
  static ExchangeApi api;
  right_api = real;
  api = *real;
  api.dltensor_from_py_object = tensor_from_object;
  api.current_work_stream = find_stream;
  return &api;
}
void fake_put_tensors_on(int device) { tensors_on = device; }
void fake_use_stream(uintptr_t stream) { current_stream = stream; }
#pragma GCC visibility pop

}  // extern "C"
