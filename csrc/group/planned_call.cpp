// SPDX-License-Identifier: Apache-2.0
#include "group/planned_call.h"

#include <exception>

namespace fastcoll {

QueuedCall::Begun PlannedCall::begin() noexcept {
  if (!more_.empty() || is_prepared_long_) return Begun::no;
  Begun begun = Begun::all;
  before();
  keep_failure(
      [&] { begun = group_.begin_half(first_.plan, first_.operands, timeout_s_, number_); });
  is_begun_ = begun == Begun::half;
  if (begun == Begun::all && !failure_) after();
  return begun;
}

void PlannedCall::run() noexcept {
  Host host;  // no signal interrupts a background thread
  if (is_begun_) {
    finish(host);
    return;
  }
  before();
  keep_failure([&] {
    group_.run(first_.plan, first_.operands, host, timeout_s_, number_);
    for (const Step& step : more_) group_.run(step.plan, step.operands, host, timeout_s_);
  });
  if (!failure_) after();
}

bool PlannedCall::finish(Host& host) noexcept {
  bool is_done = true;
  keep_failure([&] {
    try {
      group_.finish(first_.plan, first_.operands, host);
    } catch (const SteppedOut&) {
      is_done = false;
    }
  });
  if (is_done && !failure_) after();
  return is_done;
}

bool PlannedCall::finish_if_ready() noexcept {
  bool is_done = true;
  keep_failure([&] { is_done = group_.finish_if_ready(first_.plan, first_.operands); });
  if (is_done && !failure_) after();
  return is_done;
}

template <class Body>
void PlannedCall::keep_failure(Body body) noexcept {
  try {
    body();
  } catch (const Failure& failure) {
    failure_ = failure;
  } catch (const std::exception& error) {
    failure_.emplace(ErrorKind::driver, error.what());
  }
}

}  // namespace fastcoll
