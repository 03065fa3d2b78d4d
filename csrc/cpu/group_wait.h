// SPDX-License-Identifier: Apache-2.0
// Whether a call would wait to begin, and the slow side of waiting. A rank spins on if peers come
// soon (patience.h), yields unless others want the CPU (company.h), and sleeps. Every millisecond
// it looks for the reason (patrol). A wait ends by its word, by the group's verdict, by the program
// or by its limit.
#pragma once

#include <sched.h>

#include "cpu/group.h"

namespace fastcoll {

template <class P>
bool Group<P>::may_begin(bool stages) {
  uint64_t segment = first_segments_[(call_ + 2) % kDepth];  // as begin() will ask for
  const uint64_t claimed = slots_.done_before_next();        // as claim_slot(0) will
  if (stages && int64_t(claimed - segment) > 0) segment = claimed;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (int64_t(peers_[peer].known_done - segment) >= 0 || peer == rank()) continue;
    if (!met({&pad(peer).done.value, segment, false})) return false;
    peers_[peer].known_done = segment;
  }
  return true;
}

template <class P>
bool Group<P>::has_next_arrivals(const Plan& plan) const {
  const uint32_t stamp = P::kChecksCalls ? stamp_after(stamp_, plan.hash) : stamp_;
  const uint64_t slot = (call_ + 1) << 32 | stamp;
  for (int peer = 0; peer < world_size(); ++peer) {
    const uint64_t& word = peers_[peer].pad->arrive[(call_ + 1) % P::kLines].slot;
    if (peer != rank() && !met({&word, slot, true})) return false;
  }
  return true;
}

template <class P>
void Group<P>::wake() {
  P::clear_sleepers(me_->sleep);
  P::advance_wake(me_->sleep);
  futex_wake_all(&me_->sleep.wake);
}

template <class P>
bool Group<P>::spin_until(int peer, const Awaited& awaited, int64_t start_us) {
  if (!patience_.is_there()) return false;
  int64_t looked_us = start_us;
  while (!company_.is_there(looked_us) && looked_us - start_us < Patience::kSpinUs) {
    cpu_ = current_cpu();
    if (peers_[peer].cpu == cpu_) return false;
    for (int spin = 0; spin < P::kSpinsPerYield; ++spin) {
      cpu_pause();
      if (met(awaited)) return true;
    }
    const int64_t time_us = now_us();
    company_.note_pause(looked_us, time_us);
    looked_us = time_us;
  }
  return false;
}

template <class P>
bool Group<P>::yield_until(int peer, const Awaited& awaited) {
  int64_t before_us = now_us();
  for (int i = 0; i < P::kYields && !company_.is_there(before_us); ++i) {
    sched_yield();
    const int64_t after_us = now_us();
    company_.note_pause(before_us, after_us);
    before_us = after_us;
    if (met(awaited)) return true;
    cpu_ = current_cpu();
    if (i < kTrustedYields && peers_[peer].cpu == cpu_) continue;
    for (int spin = 0; spin < P::kSpinsPerYield; ++spin) {
      cpu_pause();
      if (met(awaited)) return true;
    }
  }
  return false;
}

template <class P>
void Group<P>::spread() {
  std::array<uint32_t, kMaxWorld> cpus;
  for (int peer = 0; peer < world_size(); ++peer) cpus[size_t(peer)] = peers_[peer].cpu;
  cpus[size_t(rank())] = current_cpu();
  spread_out({cpus.data(), size_t(world_size())}, rank());
}

template <class P>
void Group<P>::wait_long(int peer, const Awaited& awaited) {
  host_->blocking();
  const int64_t start_us = now_us();
  if (start_us >= next_spread_us_) {
    if (next_spread_us_ != 0) spread();  // by now the arrival lines hold the peers' CPUs
    next_spread_us_ = start_us + kSpreadUs;
  }
  int64_t next_patrol_us = start_us + kPatrolUs;
  WaitedTime waited(std::max(timeout_s_, WaitedTime::kAtOnceS), start_us);
  bool is_noted = false;
  bool is_met = spin_until(peer, awaited, start_us);
  // A sleep that no peer ended is followed by the next one. Yields between them took 80 us of CPU
  // time, on a Xeon.
  bool is_awake = true;
  while (!is_met && !(is_awake && yield_until(peer, awaited))) {
    if (const int64_t time_us = now_us(); time_us >= next_patrol_us) {
      if (!is_noted) note_wait(start_us);
      is_noted = true;
      waited.until(time_us);
      patrol(peer, awaited, waited);
      next_patrol_us = time_us + kPatrolUs;
    }
    is_awake = sleep(peer, awaited);
    is_met = met(awaited);
  }
  const int64_t end_us = now_us();
  patience_.note_wait(end_us - start_us);
  const bool is_short = is_crowded_ || company_.is_there(end_us);
  num_spins_ = is_short ? P::kSpinsIfCrowded : P::kSpins;
  if (is_noted) P::store_relaxed(my_entry().wait_ended_us, uint64_t(end_us));
  if (plan_) add_to<P>(me_->counts[size_t(plan_->verb)].waited_us, uint64_t(end_us - start_us));
}

template <class P>
bool Group<P>::sleep(int peer, const Awaited& awaited) {
  SleepLine& line = pad(peer).sleep;
  const uint32_t seen = P::load_wake(line);
  P::set_sleepers(line);
  // The owner stores its word, then loads `sleepers`; we stored `sleepers` and now load the word.
  // One of the two must see the other's store, and that takes a full barrier on both sides. We pay
  // both barriers here, so that the owner's fast path has none.
  const bool sure = membarrier_everywhere();
  if (met(awaited)) return true;
  futex_wait(&line.wake, seen,
             std::min(host_->longest_sleep_us(), sure ? kSleepUs : kShortSleepUs));
  return P::load_wake(line) != seen;
}

template <class P>
void Group<P>::patrol(int peer, const Awaited& awaited, const WaitedTime& waited) {
  // A peer may have given its part and ended the group since my last look.
  if (P::load_acquire(me_->poison.value) && !met(awaited)) check();
  for (int other = 0; other < world_size(); ++other) {
    Peer& seen = peers_[other];
    const uint64_t next = seen.last_call + 1;
    if (P::load_relaxed(pad(other).ring[next % kRingEntries].sequence) < 2 * next) continue;
    seen.last_call = last_entered_call(other);
    seen.since_us = now_us();
    seen.was_seen = true;
  }
  for (int other = 0; other < world_size(); ++other)
    if (other != rank()) compare_descriptors(other);
  if (host_->steps_out()) throw SteppedOut{};
  if (host_->interrupted()) {
    try {
      fail(ErrorKind::peer_lost,
           call_name() + ": rank " + std::to_string(rank()) + " was interrupted (" +
               host_->interruption() + ") and left the call",
           uint64_t{1} << rank());
    } catch (const Failure&) {  // the peers get it; here the host's own exception counts
    }
    throw Interrupted{};
  }
  look_for_loss(peer, awaited);
  if (waited.left_us() <= 0) fail_timeout(peer, waited.waited_us());
}

template <class P>
void Group<P>::look_for_loss(int peer, const Awaited& awaited) {
  if (!peer_is_gone(options_.links[peer])) {
    // A call that one rank can't finish ends on no rank, and the awaited one may be slow. Each look
    // takes a system call, so the others have their turns.
    peer = watched_ = (watched_ + 1) % world_size();
    if (!plan_ || peer == rank() || !peer_is_gone(options_.links[peer])) return;
    if (met({&pad(peer).done.value, next_segment_, false})) return;
  }
  // It may have done its part first and exited: that is no loss.
  if (met(awaited)) return;
  check();  // of a broken group: its verdict stands, and the socket's message is for shrink()
  Farewell farewell;
  if (std::string text; read_farewell(options_.links[peer], &farewell, &text))
    fail(ErrorKind(farewell.kind),
         call_name() + " lost rank " + std::to_string(peer) +
             ", which could not finish init: " + text,
         farewell.ranks);
  const int pid = options_.links[peer].pid;
  fail(ErrorKind::peer_lost,
       call_name() + " lost rank " + std::to_string(peer) + ": " +
           (pid > 0 ? "process " + std::to_string(pid) : "its process, in another namespace,") +
           " " + fate(options_.links[peer]) + "; it had " + describe_last_call(peer, now_us()),
       uint64_t{1} << peer);
}

template <class P>
double Group<P>::time_one_way_flag(int iterations, Host& host) {
  if (rank() > 1 || world_size() < 2) return 0;
  host_ = &host;
  timeout_s_ = limit_s();
  const int peer = 1 - rank();
  const uint64_t first = me_->ping.value;
  const int64_t start_us = now_us();
  for (uint64_t i = 1; i <= uint64_t(iterations); ++i) {
    if (rank() == 0) signal(me_->ping, first + i);
    wait(peer, {&pad(peer).ping.value, first + i, false});
    if (rank() == 1) signal(me_->ping, first + i);
  }
  return double(now_us() - start_us) * 1e-6 / (2.0 * iterations);
}

template <class P>
void Group<P>::note_wait(int64_t since_us) {
  Descriptor& entry = my_entry();
  P::store_relaxed(entry.wait_ended_us, 0);
  if (P::load_relaxed(entry.timed_call) != call_)
    P::store_relaxed(entry.wait_began_us, uint64_t(since_us));
  P::store_release(entry.timed_call, call_);
  for (int peer = 0; peer < world_size(); ++peer) {
    peers_[peer].last_call = last_entered_call(peer);
    peers_[peer].since_us = since_us;
    peers_[peer].was_seen = false;
  }
}

inline std::string seconds_text(int64_t time_us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", double(time_us) * 1e-6);
  return text;
}

template <class P>
std::string Group<P>::describe_last_call(int peer, int64_t time_us) {
  const uint64_t last = last_entered_call(peer);
  if (last == options_.first_call) return "never called anything";
  const Operation entered = read_operation<P>(pad(peer), last).value_or(Operation{});
  std::string text = "entered ";
  text += (entered.call == last ? describe(entered.plan) + " #" : "call #") + std::to_string(last) +
          at_site(entered.site);
  if (int64_t(last - call_) < 0) text += ", not #" + std::to_string(call_);
  const Peer& seen = peers_[peer];
  // The time that the peer noted, if it waited there or traces; else the time seen from here.
  if (const uint64_t began_us = entered.began_us ? entered.began_us : entered.wait_began_us)
    text += ", " + seconds_text(time_us - int64_t(began_us)) + " ago";
  else if (seen.last_call == last)
    text +=
        (seen.was_seen ? ", " : ", more than ") + seconds_text(time_us - seen.since_us) + " ago";
  if (process_is_stopped(options_.links[peer].pid))
    text += "; process " + std::to_string(options_.links[peer].pid) + " is stopped";
  return text;
}

// Whether a peer is held up itself: it has waited long, in a call, a send or a receive.
template <class P>
bool Group<P>::waits_itself(int peer) {
  if (process_is_stopped(options_.links[peer].pid)) return false;
  if (P::load_relaxed(pad(peer).blocked.value) != 0) return true;
  const auto entered = read_operation<P>(pad(peer), last_entered_call(peer)).value_or(Operation{});
  return entered.wait_began_us != 0 && entered.wait_ended_us == 0;
}

template <class P>
uint64_t Group<P>::awaited_by(int peer) {
  const uint64_t call = last_entered_call(peer);
  const auto entered = read_operation<P>(pad(peer), call).value_or(Operation{});
  if (entered.wait_began_us == 0 || entered.wait_ended_us != 0) return 0;
  uint64_t ranks = 0;
  for (int other = 0; other < world_size(); ++other)
    if (int64_t(last_entered_call(other) - call) < 0 && !waits_itself(other))
      ranks |= uint64_t{1} << other;
  return ranks;
}

template <class P>
void Group<P>::fail_timeout(int peer, int64_t waited_us) {
  const int64_t time_us = now_us();
  uint64_t behind = 0, inside = 0, waiting = 0;  // in an earlier call; stuck in this one; see above
  for (int other = 0; other < world_size(); ++other) {
    if (other == rank()) continue;
    const uint64_t bit = uint64_t{1} << other;
    if (int64_t(last_entered_call(other) - call_) < 0) behind |= bit;
    else if (other == peer || !P::reached(P::load_acquire(pad(other).done.value), next_segment_) ||
             process_is_stopped(options_.links[other].pid))
      inside |= bit;
    if (waits_itself(other)) waiting |= bit;
  }
  const uint64_t late = behind != 0 ? behind : inside;
  uint64_t missing = late & ~waiting;
  if (missing == 0) missing = behind != 0 ? behind : uint64_t{1} << peer;
  std::string who, others;
  for (int other = 0; other < world_size(); ++other) {
    const std::string name = "rank " + std::to_string(other);
    if (missing >> other & 1)
      who += (who.empty() ? "" : ", ") + name + " (" + describe_last_call(other, time_us) +
             (behind != 0 ? ")" : ", but did not finish its part)");
    else if (late >> other & 1) others += (others.empty() ? "; " : ", ") + name;
  }
  if (!others.empty()) who += others + " had to wait, too";
  fail(ErrorKind::timeout,
       call_name() + " waited " + seconds_text(waited_us) + " for " + who +
           ". Plan: " + (plan_ ? describe_choice(*plan_) : "none") +
           ". If the ranks are only slow, raise the timeout (timeout_s=, FASTCOLL_TIMEOUT_S); "
           "`fastcoll "
           "inspect` shows what every rank of this machine does, `fastcoll doctor` the machine",
       missing);
}

}  // namespace fastcoll
