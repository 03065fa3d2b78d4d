// SPDX-License-Identifier: Apache-2.0
// The compiled loops of `fastcoll bench --level c`: no Python between the calls.
#include <chrono>

#include "cpu/halves.h"
#include "cpu/p2p.h"
#include "group/process_group.h"

namespace fastcoll {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Takes every line of the bytes back from the caches of those who read it.
void rewrite(void* bytes, size_t num_bytes) {
  auto* at = static_cast<volatile std::byte*>(bytes);
  for (size_t i = 0; i < num_bytes; i += kLineBytes) at[i] = at[i];
}

// meet(): all ranks are there. make_call(): the call to be timed.
template <class Meet, class MakeCall>
double time_loop(int iterations, const Rewriting& rewriting, Meet meet, MakeCall make_call) {
  if (!rewriting.meeting) {
    const auto start = Clock::now();
    for (int i = 0; i < iterations; ++i) make_call();
    return seconds_since(start);
  }
  double total_s = 0;
  for (int i = 0; i < iterations; ++i) {
    rewrite(rewriting.bytes, rewriting.num_bytes);
    meet();
    const auto start = Clock::now();
    make_call();
    total_s += seconds_since(start);
  }
  return total_s;
}

}  // namespace

double ProcessGroup::time_calls(const Plan& plan, const Operands& operands, int iterations,
                                const Rewriting& rewriting, Host& host) {
  const Turn turn(*this, host);
  require_usable();
  return time_loop(
      iterations, rewriting,
      [&] { fastcoll::run(*group_, *rewriting.meeting, nullptr, nullptr, host); },
      [&] {
        Call<StdAtomics> call = call_of(plan, operands);
        fastcoll::run(call, host, -1);
      });
}

double ProcessGroup::time_exchanges(const Transfer& sent, const Transfer& received, int iterations,
                                    const Rewriting& rewriting, Host& host) {
  require_usable();
  const auto fresh = [&](const Transfer& like) {
    auto transfer = std::make_shared<Transfer>();
    transfer->sends = &like == &sent;
    transfer->peer = like.peer;
    transfer->dtype = like.dtype;
    transfer->numel = like.numel;
    transfer->data = like.data;
    transfer->num_bytes = like.numel * dtype_size(like.dtype);
    transfer->timeout_s = -1;
    return transfer;
  };
  return time_loop(
      iterations, rewriting, [&] { run(*rewriting.meeting, {}, host, -1); },
      [&] {
        const auto send = fresh(sent), receive = fresh(received);
        post(send, host);
        post(receive, host);
        wait(*receive, host, 0);
        wait(*send, host, 0);
      });
}

double ProcessGroup::time_one_way_flag(int iterations, Host& host) {
  const Turn turn(*this, host);
  require_usable();
  return group_->time_one_way_flag(iterations, host);
}

}  // namespace fastcoll
