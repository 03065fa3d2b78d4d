// SPDX-License-Identifier: Apache-2.0
// The memory of what goes on although its handle is gone. Everything here needs the GIL.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>

namespace fastcoll {

// Keep an object, whose reference passes over, until `done` says so and somebody calls
// release_kept.
void keep_until(std::shared_ptr<const std::atomic<bool>> done, PyObject* kept);

// Let go of what is done with.
void release_kept();

}  // namespace fastcoll
