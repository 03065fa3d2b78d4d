// SPDX-License-Identifier: Apache-2.0
// The memory of calls and transfers that go on although their handles are gone. Everything here
// needs the GIL.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>

namespace fastcoll {

// Keep an object, whose reference passes over, until `done` is true and release_kept is called.
void keep_until(std::shared_ptr<const std::atomic<bool>> done, PyObject* kept);

// Release the objects whose `done` is true.
void release_kept();

}  // namespace fastcoll
