// SPDX-License-Identifier: Apache-2.0
// A rank's pad as Python sees it: its last calls and its counts.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>
#include <vector>

#include "cpu/status.h"
#include "layout.h"

namespace fastcoll {

namespace py = pybind11;

// Text from shared memory may hold anything, and may be cut inside a character.
inline py::str decoded(std::string_view text) { return printable(text); }

// By verb: calls, bytes of their messages, and microseconds of their long waits.
inline py::dict counts_of(const std::vector<VerbCount>& counts) {
  py::dict by_name;
  for (size_t verb = 0; verb < counts.size(); ++verb) {
    const VerbCount& count = counts[verb];
    if (count.calls)
      by_name[verb_name(Verb(verb))] =
          py::make_tuple(count.calls, count.num_bytes, count.waited_us);
  }
  return by_name;
}

inline py::dict status_of(const Pad& pad) {
  if (StdAtomics::load_acquire(pad.identity.magic) != kLayoutMagic)
    throw Failure(ErrorKind::driver, "not a region of this version of fastcoll, or not ready yet");
  const uint64_t done = StdAtomics::load_acquire(pad.done.value);
  py::list operations;
  for (const Operation& operation : read_operations<StdAtomics>(pad)) {
    const Plan& plan = operation.plan;
    operations.append(
        py::dict(py::arg("call") = operation.call, py::arg("verb") = verb_name(plan.verb),
                 py::arg("what") = describe(plan), py::arg("plan") = describe_choice(plan),
                 py::arg("message_bytes") = plan.numel * plan.elem_bytes(),
                 py::arg("is_complete") = StdAtomics::reached(done, operation.end_segment),
                 py::arg("wait_began_us") = operation.wait_began_us,
                 py::arg("wait_ended_us") = operation.wait_ended_us,
                 py::arg("began_us") = operation.began_us, py::arg("ended_us") = operation.ended_us,
                 py::arg("site") = decoded(operation.site)));
  }
  const Identity& identity = pad.identity;
  const std::string_view name(identity.name, strnlen(identity.name, sizeof identity.name));
  return py::dict(py::arg("group") = decoded(name), py::arg("rank") = identity.rank,
                  py::arg("world_size") = identity.world_size,
                  py::arg("is_broken") = StdAtomics::load_acquire(pad.poison.value) != 0,
                  py::arg("counts") = counts_of(read_counts<StdAtomics>(pad)),
                  py::arg("operations") = operations);
}

}  // namespace fastcoll
