// SPDX-License-Identifier: Apache-2.0
// The verbs of c10d_backend.cpp: their names in torch, in Python and in a profile. Part of that one
// source, compiled with it.
#pragma once

#include <ATen/record_function.h>

#include <utility>
#include <vector>

#include "c10d_work.h"

namespace {

// A verb's names.
struct Verb {
  const char* title;     // of the profiler's event
  const char* for_gloo;  // the title where a group stands in for Gloo
  const char* method;    // of the Python group
  c10d::OpType type;
};

using c10d::OpType;
#include "c10d_names.h"

// The terms of a call that the profiler and a Work need.
struct Terms {
  const Verb& verb;
  Tensors inputs;
  Tensors outputs;
  bool is_async = true;
  Milliseconds timeout = kNoTimeout;

  Terms(const Verb& verb, Tensors inputs, Tensors outputs)
      : verb(verb), inputs(std::move(inputs)), outputs(std::move(outputs)) {}
  template <class Options>
  Terms(const Verb& verb, const Options& opts, Tensors inputs, Tensors outputs)
      : Terms(verb, std::move(inputs), std::move(outputs)) {
    is_async = opts.asyncOp;
    timeout = opts.timeout;
  }
};

// The profiler's event of a synchronous call; an asynchronous one's belongs to its Work. All events
// of Gloo are asynchronous, and programs that read a profile may tell a backend's events by that.
class Event {
 public:
  Event(const Terms& terms, bool for_gloo) : event_(at::RecordScope::USER_SCOPE) {
    if (terms.is_async || !event_.isActive()) return;
    if (for_gloo) event_._setAsync();
    const char* title = for_gloo ? terms.verb.for_gloo : terms.verb.title;
    const std::vector<c10::IValue> inputs(terms.inputs.begin(), terms.inputs.end());
    event_.before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }

 private:
  at::RecordFunction event_;
};

}  // namespace
