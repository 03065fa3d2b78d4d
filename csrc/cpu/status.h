// SPDX-License-Identifier: Apache-2.0
// Reads and writes the status ring of a pad: a rank's last calls, for its peers and for readers
// outside the group. An entry counts only if its sequence is the same before and after the read.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/atomics.h"
#include "cpu/text.h"
#include "plan.h"

namespace fastcoll {

// One entry of a status ring.
struct Operation {
  uint64_t call = 0;
  Plan plan;
  uint32_t stamp = 0;
  uint32_t end_segment = 0;    // low half of the `done` of a rank that is through with the call
  uint64_t wait_began_us = 0;  // CLOCK_MONOTONIC; both 0 if it did not wait long
  uint64_t wait_ended_us = 0;  // 0 while it waits
  // Of a group that traces; else 0 and empty.
  uint64_t began_us = 0;
  uint64_t ended_us = 0;  // 0 while the call runs, and if it failed
  std::string site;       // where the program made the call
};

template <class P>
std::string read_site(const SiteText& site) {
  std::array<char, sizeof(SiteText)> text;
  for (size_t i = 0; i < SiteText::kWords; ++i) {
    const uint64_t word = P::load_acquire(site.words[i]);
    std::memcpy(text.data() + i * sizeof word, &word, sizeof word);
  }
  return printable({text.data(), strnlen(text.data(), text.size())});
}

// A site too long loses its beginning: the file's name is worth more than its folder's.
template <class P>
void write_site(SiteText& site, std::string text) {
  if (text.size() > sizeof(SiteText))
    text = "..." + text.substr(text.size() + 3 - sizeof(SiteText));
  text.resize(sizeof(SiteText));
  for (size_t i = 0; i < SiteText::kWords; ++i) {
    uint64_t word;
    std::memcpy(&word, text.data() + i * sizeof word, sizeof word);
    P::store_release(site.words[i], word);
  }
}

inline std::string at_site(const std::string& site) { return site.empty() ? "" : " at " + site; }

// Adds to a word that its owner alone writes: no locked instruction is needed.
template <class P>
void add_to(uint64_t& word, uint64_t amount) {
  P::store_relaxed(word, P::load_relaxed(word) + amount);
}

// A rank's counts, by verb.
template <class P>
std::vector<VerbCount> read_counts(const Pad& pad) {
  std::vector<VerbCount> counts;
  for (int verb = 0; verb < kNumVerbs; ++verb) {
    const VerbCount& count = pad.counts[verb];
    counts.push_back({P::load_relaxed(count.calls), P::load_relaxed(count.num_bytes),
                      P::load_relaxed(count.waited_us), 0});
  }
  return counts;
}

// Readers look the codes in a peer's words up in tables, so the codes must be in range.
inline bool has_names(const Plan& plan) {
  return int(plan.verb) < kNumGpuVerbs && int(plan.dtype) < kNumDTypes && int(plan.op) < kNumOps &&
         int(plan.algorithm) < kNumGpuAlgorithms;
}

// The entry if it holds this call, whole and readable.
template <class P>
std::optional<Operation> read_operation(const Pad& pad, uint64_t call) {
  const Descriptor& entry = pad.ring[call % kRingEntries];
  if (P::load_acquire(entry.sequence) != 2 * call) return std::nullopt;
  PlanWords words;
  words.kinds = P::load_acquire(entry.words[0]);
  words.numel = P::load_acquire(entry.words[1]);
  words.root_and_segment = P::load_acquire(entry.words[2]);
  const uint64_t stamp_and_end = P::load_acquire(entry.words[3]);
  words.splits = P::load_acquire(entry.words[4]);
  Operation operation;
  operation.call = call;
  operation.plan = plan_from_words(words);
  if (!has_names(operation.plan)) return std::nullopt;
  operation.stamp = uint32_t(stamp_and_end >> 32);
  operation.end_segment = uint32_t(stamp_and_end);
  if (P::load_acquire(entry.timed_call) == call) {
    operation.wait_began_us = P::load_relaxed(entry.wait_began_us);
    operation.wait_ended_us = P::load_relaxed(entry.wait_ended_us);
  }
  operation.began_us = P::load_acquire(entry.began_us);
  if (operation.began_us != 0) {
    operation.ended_us = P::load_relaxed(entry.ended_us);
    operation.site = read_site<P>(pad.sites[call % kRingEntries]);
  }
  if (P::load_relaxed(entry.sequence) != 2 * call) return std::nullopt;  // it changed meanwhile
  return operation;
}

// All whole entries, oldest first.
template <class P>
std::vector<Operation> read_operations(const Pad& pad) {
  std::vector<Operation> all;
  for (const Descriptor& entry : pad.ring) {
    const uint64_t sequence = P::load_relaxed(entry.sequence);
    if (sequence == 0 || sequence % 2 != 0) continue;
    if (auto operation = read_operation<P>(pad, sequence / 2)) all.push_back(std::move(*operation));
  }
  std::sort(all.begin(), all.end(),
            [](const Operation& a, const Operation& b) { return a.call < b.call; });
  return all;
}

}  // namespace fastcoll
