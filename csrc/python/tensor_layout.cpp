// SPDX-License-Identifier: Apache-2.0
#include "python/tensor_layout.h"

#include <algorithm>
#include <vector>

namespace fastcoll {

namespace {

struct Sample {
  PyObject* tensor;
  unsigned long long impl, storage, data, num_bytes, keys, counter, version;
};
using Samples = std::vector<Sample>;

bool read(PyObject* object, Sample& sample) {
  return PyArg_ParseTuple(object, "OKKKKKKK", &sample.tensor, &sample.impl, &sample.storage,
                          &sample.data, &sample.num_bytes, &sample.keys, &sample.counter,
                          &sample.version) != 0;
}

// The first multiple of `step` from `begin` on that fits; 0 if none does. Nothing behind it is
// read: the objects are not known to be longer.
template <class Fits>
uint32_t first_place(uint32_t begin, uint32_t end, uint32_t step, Fits fits) {
  for (uint32_t place = begin; place + step <= end; place += step)
    if (fits(place)) return place;
  return 0;
}

constexpr uint32_t kWord = 8;
// Not longer than the objects of any known torch: a vtable and reference counts come first.
constexpr uint32_t kImplBytes = 24 * kWord, kStorageBytes = 8 * kWord, kCounterBytes = 4 * kWord;

uint64_t word_at(uint64_t address, uint32_t place) {
  return value_at<uint64_t>(reinterpret_cast<const void*>(address), place);
}

// The place of a value in an object that every sample has.
uint32_t find_word(const Samples& samples, uint32_t num_bytes, unsigned long long Sample::* object,
                   unsigned long long Sample::* value) {
  return first_place(kWord, num_bytes, kWord, [&](uint32_t place) {
    return std::all_of(samples.begin(), samples.end(), [&](const Sample& sample) {
      return word_at(sample.*object, place) == sample.*value;
    });
  });
}

uint32_t find_impl(const Samples& samples) {
  Py_ssize_t num_bytes = PY_SSIZE_T_MAX;
  for (const Sample& sample : samples)
    num_bytes = std::min(num_bytes, Py_TYPE(sample.tensor)->tp_basicsize);
  return first_place(sizeof(PyObject), uint32_t(num_bytes), kWord, [&](uint32_t place) {
    return std::all_of(samples.begin(), samples.end(), [&](const Sample& sample) {
      return value_at<uint64_t>(sample.tensor, place) == sample.impl;
    });
  });
}

// The word that is the same in two tensors where they share a counter, and only there.
uint32_t find_counter(const Samples& samples) {
  return first_place(kWord, kImplBytes, kWord, [&](uint32_t place) {
    for (const Sample& one : samples) {
      const uint64_t word = word_at(one.impl, place);
      if ((word == 0) != (one.counter == 0) || word % kWord != 0) return false;
      for (const Sample& other : samples)
        if ((word == word_at(other.impl, place)) != (one.counter == other.counter)) return false;
    }
    return true;
  });
}

uint32_t find_version(const Samples& samples, uint32_t counter_place) {
  return first_place(kWord, kCounterBytes, sizeof(uint32_t), [&](uint32_t place) {
    return std::all_of(samples.begin(), samples.end(), [&](const Sample& sample) {
      if (sample.counter == 0) return true;
      const uint64_t counter = word_at(sample.impl, counter_place);
      return value_at<uint32_t>(reinterpret_cast<const void*>(counter), place) == sample.version;
    });
  });
}

TensorLayout learn(const Samples& samples) {
  TensorLayout found;
  found.impl = find_impl(samples);
  found.keys = find_word(samples, kImplBytes, &Sample::impl, &Sample::keys);
  found.storage = find_word(samples, kImplBytes, &Sample::impl, &Sample::storage);
  found.data = find_word(samples, kStorageBytes, &Sample::storage, &Sample::data);
  found.num_bytes = find_word(samples, kStorageBytes, &Sample::storage, &Sample::num_bytes);
  found.counter = find_counter(samples);
  if (found.counter) found.version = find_version(samples, found.counter);
  found.plain_keys = samples[0].keys;
  found.inference_keys = samples[1].keys;
  const bool is_known = found.impl && found.keys && found.storage && found.data &&
                        found.num_bytes && found.counter && found.version;
  return is_known ? found : TensorLayout{};
}

}  // namespace

PyObject* learn_tensor_layout(PyObject*, PyObject* tuples) {
  if (!PyTuple_Check(tuples) || PyTuple_GET_SIZE(tuples) < 2)
    return PyErr_Format(PyExc_TypeError, "learn_tensor_layout takes a tuple of samples");
  Samples samples(size_t(PyTuple_GET_SIZE(tuples)));
  for (size_t i = 0; i < samples.size(); ++i)
    if (!read(PyTuple_GET_ITEM(tuples, Py_ssize_t(i)), samples[i])) return nullptr;
  tensor_layout = learn(samples);
  return PyBool_FromLong(tensor_layout.impl != 0);
}

PyObject* learn_gpu_keys(PyObject*, PyObject* keys) {
  unsigned long long plain = 0, inference = 0;
  if (!PyArg_ParseTuple(keys, "KK", &plain, &inference)) return nullptr;
  tensor_layout.gpu_plain_keys = plain;
  tensor_layout.gpu_inference_keys = inference;
  Py_RETURN_NONE;
}

}  // namespace fastcoll
