// SPDX-License-Identifier: Apache-2.0
// The descriptors that ranks write of their calls, and the group's one verdict. Rank 0's poison
// word decides among ranks that fail at once, so all ranks report the same error.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "cpu/group.h"
#include "cpu/status.h"

namespace fastcoll {

template <class P>
FASTCOLL_HOT void Group<P>::write_descriptor() {
  Descriptor& entry = my_entry();
  const PlanWords words = plan_words(*plan_);
  P::store_relaxed(entry.sequence, 2 * call_ - 1);
  P::store_release(entry.words[0], words.kinds);
  P::store_release(entry.words[1], words.numel);
  P::store_release(entry.words[2], words.root_and_segment);
  P::store_release(entry.words[3], uint64_t(stamp_) << 32 | uint32_t(next_segment_));
  P::store_release(entry.words[4], words.splits);
  if (options_.traces) [[unlikely]] {
    P::store_release(entry.began_us, uint64_t(now_us()));
    P::store_relaxed(entry.ended_us, 0);
    write_site<P>(me_->sites[call_ % kRingEntries], host_->call_site());
  }
  P::store_release(entry.sequence, 2 * call_);
  static_assert(kNumGpuVerbs <= kCountedVerbs);
  VerbCount& count = me_->counts[size_t(plan_->verb)];
  add_to<P>(count.calls, 1);
  add_to<P>(count.num_bytes, plan_->numel * plan_->elem_bytes());
}

template <class P>
uint64_t Group<P>::last_entered_call(int peer) {
  uint64_t last = options_.first_call;
  for (const Descriptor& entry : pad(peer).ring) {
    // Odd while it is written: that rounds down to the call before, which it entered, too.
    last = std::max(last, P::load_relaxed(entry.sequence) / 2);
  }
  return last;
}

template <class P>
void Group<P>::compare_descriptors(int peer) {
  // A stamp depends on all earlier ones: where the latest entries of both ranks agree, nothing
  // differs. Otherwise walk back to the first difference and report it.
  std::optional<Operation> mine, theirs;  // where they first differ
  for (uint64_t age = 0; age < std::min<uint64_t>(call_, kRingEntries); ++age) {
    const uint64_t call = call_ - age;
    auto one = read_operation<P>(*me_, call), other = read_operation<P>(pad(peer), call);
    if (!one || !other) continue;
    if (one->stamp == other->stamp) break;
    mine = std::move(one);
    theirs = std::move(other);
  }
  if (!mine) return;
  // The lower rank comes first, so that the text is the same from whichever side it is found.
  const bool am_first = rank() < peer;
  const Operation &first = am_first ? *mine : *theirs, &second = am_first ? *theirs : *mine;
  const int low = std::min(rank(), peer), high = std::max(rank(), peer);
  const std::string found = difference(first.plan, low, second.plan, high);
  const bool same_verb = first.plan.verb == second.plan.verb;
  std::string text = (same_verb ? verb_name(first.plan.verb) : "call") + std::string(" #") +
                     std::to_string(mine->call) + " in group \"" + options_.name + "\": ";
  text += found.empty() ? "the ranks made different calls before this one" : found;
  if (same_verb) text += ". Rank " + std::to_string(low) + " called " + describe(first.plan);
  if (!first.site.empty() && !second.site.empty())
    text += ". Called at " + first.site + " on rank " + std::to_string(low) + ", at " +
            second.site + " on rank " + std::to_string(high);
  text += ". Found by rank " + std::to_string(rank());
  if (mine->call != call_ && plan_)
    text += " in " + describe(*plan_) + " #" + std::to_string(call_);
  fail(ErrorKind::desync, text + ". Outputs of this call are undefined",
       uint64_t{1} << rank() | uint64_t{1} << peer);
}

template <class P>
std::string Group<P>::call_name() const {
  const std::string place = " in group \"" + options_.name + "\" (seen by rank " +
                            std::to_string(rank()) + " of " + std::to_string(world_size()) + ")";
  if (!plan_) return "between calls, after #" + std::to_string(call_) + place;
  const std::string site = options_.traces ? host_->call_site() : "";
  return describe(*plan_) + " #" + std::to_string(call_) + place +
         (site.empty() ? "" : ", called at " + site + ",");
}

template <class P>
void Group<P>::check() const {
  if (const uint64_t poison = P::load_acquire(me_->poison.value)) throw_verdict(poison);
}

template <class P>
void Group<P>::throw_verdict(uint64_t poison) const {
  // A peer wrote these words: none of them may lead outside the page.
  if (poison > uint64_t(world_size()))
    throw Failure(ErrorKind::desync, "group \"" + options_.name + "\": a poison word is damaged");
  const VerdictPage& verdict = peers_[poison - 1].pad->verdict;
  const uint32_t kind = std::clamp(verdict.kind, uint32_t(ErrorKind::usage), uint32_t(kLastKind));
  const size_t length = std::min(size_t(verdict.length), sizeof verdict.text);
  const uint64_t ranks = verdict.ranks & (~uint64_t{0} >> (kMaxWorld - world_size()));
  throw Failure(ErrorKind(kind), printable({verdict.text, length}), ranks);
}

template <class P>
uint64_t Group<P>::decide_verdict(ErrorKind kind, const std::string& text, uint64_t ranks) {
  // The page is written once, so never torn, even if two threads of this rank find an error.
  Page page = Page::blank;
  if (page_.compare_exchange_strong(page, Page::being_written)) {
    VerdictPage& verdict = me_->verdict;
    constexpr std::string_view kOver =
        ". Use of this group is over: call fastcoll.shrink() or fastcoll.destroy()";
    std::string_view told = text;
    if (told.ends_with(kOver)) told.remove_suffix(kOver.size());  // it quotes an earlier verdict
    told = told.substr(0, sizeof verdict.text - kOver.size());
    std::memcpy(verdict.text, told.data(), told.size());
    std::memcpy(verdict.text + told.size(), kOver.data(), kOver.size());
    verdict.length = uint32_t(told.size() + kOver.size());
    verdict.ranks = ranks;
    verdict.kind = uint32_t(kind);
    page_ = Page::written;
  }
  while (page_ != Page::written) sched_yield();
  // Rank 0's word decides between ranks that fail at once; then all ranks get the winner.
  const uint64_t winner = P::set_once(peers_[0].pad->poison.value, uint64_t(rank()) + 1);
  for (int peer = 0; peer < world_size(); ++peer)
    P::set_once(peers_[peer].pad->poison.value, winner);
  wake();
  return winner;
}

}  // namespace fastcoll
