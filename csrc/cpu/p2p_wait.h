// SPDX-License-Identifier: Apache-2.0
// The waits for sends and receives. A thread that waits moves all open transfers of its rank. It
// spins on if peers come soon (patience.h), yields unless others want its CPU (company.h), then
// sleeps until the peer does something.
#pragma once

#include "cpu/p2p.h"
#include "cpu/status.h"

namespace fastcoll {

template <class P>
template <class Over>
bool PointToPoint<P>::poll_until(Over over, Host& host, const Transfer* awaited) {
  bool is_blocked = false;
  if (awaited) num_looking_.fetch_add(1);
  const bool is_over = poll(over, host, awaited, is_blocked);
  if (awaited) num_looking_.fetch_add(-1);
  if (is_blocked) say_blocked(0);
  return is_over;
}

template <class P>
template <class Over>
bool PointToPoint<P>::poll(Over over, Host& host, const Transfer* awaited, bool& is_blocked) {
  int64_t next_patrol_us = 0;
  int64_t late_us = 0;    // since when the peer is late
  int64_t looked_us = 0;  // the last look, if this thread spun since
  // A driving thread rests at first: the program may wait itself soon, and is quicker alone.
  for (int round = awaited ? 0 : P::kTransferSpins + P::kYields; !over(); ++round) {
    if (!awaited && num_looking_.load(std::memory_order_relaxed) > 0) {
      host.blocking();
      rest(nullptr);  // a thread that waits moves all transfers, and is quicker alone
      continue;
    }
    bool moved = false, is_under_way = false;
    if (const auto guard = awaited ? lock(host) : try_lock(); guard.owns_lock()) {
      if (awaited && has_large_) say_polling(true);
      moved = pass(awaited != nullptr);
      is_under_way = is_under_way_;
    }
    if (moved) {
      looked_us = 0;
      if (awaited || is_under_way) round = 0;
      if (!is_under_way) continue;
      host.blocking();  // a large message takes its time
      if (!look_around(host, next_patrol_us, true)) return false;
      continue;
    }
    if (round < P::kTransferSpins) {
      cpu_pause();
      continue;
    }
    host.blocking();
    const int64_t before_us = now_us();
    if (awaited && !is_blocked) {
      is_blocked = true;
      late_us = before_us;
      say_blocked(uint64_t(awaited->sends ? 1 : 2) | uint64_t(uint8_t(awaited->peer)) << 8);
    }
    if (next_patrol_us == 0) next_patrol_us = before_us + kPatrolUs;
    Company& company = group_.company();
    if (looked_us != 0) company.note_pause(std::exchange(looked_us, 0), before_us);
    const bool has_company = company.is_there(before_us);
    if (awaited && before_us - late_us < Patience::kSpinUs && !has_company &&
        patience_.is_there() && patience_.has_cpus_for_threads()) {
      cpu_pause();
      looked_us = before_us;
      --round;
    } else if (round >= P::kTransferSpins + P::kYields || has_company) {
      rest(awaited);
    } else {
      sched_yield();
      company.note_pause(before_us, now_us());
    }
    if (!look_around(host, next_patrol_us, false)) return false;
  }
  if (is_blocked && is_main_thread()) patience_.note_wait(now_us() - late_us);
  return true;
}

template <class P>
bool PointToPoint<P>::look_around(Host& host, int64_t& next_patrol_us, bool moves) {
  const int64_t time_us = now_us();
  if (next_patrol_us == 0) next_patrol_us = time_us + kPatrolUs;
  if (time_us < next_patrol_us) return true;
  next_patrol_us = time_us + kPatrolUs;
  if (host.interrupted()) return interrupt(host.interruption());
  if (moves) return true;
  const std::lock_guard guard(mutex_);
  patrol(time_us);
  return true;
}

// Sleep until the peer of the only open transfer does something; with more of them, for a moment.
// The handshake is Group::sleep's.
template <class P>
void PointToPoint<P>::rest(const Transfer* awaited) {
  uint32_t seen = 0;
  SleepLine* line = nullptr;
  bool is_sure = false;
  if (awaited) {
    const std::lock_guard guard(mutex_);
    if (!awaited->done && open_.size() == 1 && awaited->peer != kAnyPeer) {
      line = &group_.pad(awaited->peer).sleep;
      seen = P::load_wake(*line);
      P::set_sleepers(*line);
      is_sure = membarrier_everywhere();
      if (P::kLooksBeforeSleep && pass(true)) return;
      if (is_patient(*awaited)) line = nullptr;  // nobody wakes it
    }
  }
  // The group may be closed by now; then the kernel finds no such memory.
  if (awaited) num_looking_.fetch_add(-1);
  if (line) futex_wait(&line->wake, seen, is_sure ? kSleepUs : kShortSleepUs);
  else std::this_thread::sleep_for(awaited ? kNap : kLongNap);
  if (awaited) num_looking_.fetch_add(1);
}

template <class P>
bool PointToPoint<P>::interrupt(const std::string& interruption) {
  const std::lock_guard guard(mutex_);
  if (closed_) return false;
  try {
    group_.fail(ErrorKind::peer_lost,
                "rank " + std::to_string(group_.rank()) + " was interrupted (" + interruption +
                    ") and left a send or receive in group \"" + group_.options().name + "\"",
                uint64_t{1} << group_.rank());
  } catch (const Failure&) {
    fail_all(std::current_exception());
  }
  return false;
}

}  // namespace fastcoll
