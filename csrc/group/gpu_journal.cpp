// SPDX-License-Identifier: Apache-2.0
#include "group/gpu_journal.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "memory/memfd.h"

namespace fastcoll {

namespace {

std::atomic_ref<uint64_t> word(const uint64_t& place) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(place));
}

// Another process wrote these codes: none may lead out of a table.
std::string describe_words(const GpuJournal::Words& words) {
  const Plan plan = plan_from_words({words[0], words[1], words[2], words[3]});
  if (int(plan.verb) >= kNumGpuVerbs || int(plan.dtype) >= kNumDTypes || int(plan.op) >= kNumOps ||
      int(plan.algorithm) >= kNumGpuAlgorithms)
    return "something unknown";
  return describe(plan) + " by " + describe_choice(plan);
}

std::string describe_message(const GpuJournal::Words& words) {
  if (words[0] >= uint64_t(kNumDTypes)) return "something unknown";
  return std::string(dtype_name(DType(words[0]))) + ", numel=" + std::to_string(words[1]) +
         ", tag=" + std::to_string(words[2]);
}

}  // namespace

int GpuJournal::create(int world_size) {
  return memfd_create_sealed("fastcoll-journal", num_entries(world_size) * sizeof(Entry));
}

GpuJournal::GpuJournal(int rank, const std::vector<int>& fds)
    : rank_(size_t(rank)), world_size_(int(fds.size())), numbers_(2 + 2 * fds.size()) {
  const size_t num_bytes = num_entries(world_size_) * sizeof(Entry);
  std::optional<Failure> failure;
  for (const int fd : fds) {
    try {
      if (!failure) pages_.push_back(reinterpret_cast<Entry*>(memfd_open(fd, num_bytes)));
    } catch (const Failure& found) {
      failure = found;
    }
    ::close(fd);
  }
  if (!failure) return;
  close();
  throw *failure;
}

void GpuJournal::close() {
  for (const Entry* page : pages_)
    memfd_close(reinterpret_cast<const std::byte*>(page), num_entries(world_size_) * sizeof(Entry));
  pages_.clear();
}

GpuJournal::Row GpuJournal::messages_row(bool sends, int peer) const {
  if (peer < 0 || peer >= world_size_)
    throw Failure(ErrorKind::usage, std::to_string(peer) + " is no rank of this group");
  const size_t place = 2 * size_t(peer) + sends;
  return {1 + place, kCalls + place * kMessages, kMessages};
}

void GpuJournal::write(const Plan& plan, const std::string& site) {
  last_ = plan;
  last_messages_.clear();
  started_.clear();
  const PlanWords words = plan_words(plan);
  write(calls_row(), {words.kinds, words.numel, words.root_and_segment, words.splits}, site);
}

void GpuJournal::write_message(bool sends, int peer, DType dtype, uint64_t numel, uint32_t tag,
                               const std::string& site) {
  write(messages_row(sends, peer), {uint64_t(dtype), numel, tag, 0}, site);
}

void GpuJournal::finish() { write(last_row(), {}, {}); }

std::string GpuJournal::started() const {
  if (!started_.empty()) return started_;
  std::string text;
  for (const DeviceMessage& one : last_messages_) {
    text += text.empty() ? "" : ", ";
    text += one.sends ? "send(" : "recv(";
    text += describe_message({uint64_t(one.dtype), one.numel, one.tag, 0});
    text += (one.sends ? ") to rank " : ") from rank ") + std::to_string(one.peer);
  }
  if (!text.empty()) return text;
  return numbers_[0] == 0 ? "nothing" : describe(last_) + " by " + describe_choice(last_);
}

void GpuJournal::write(const Row& row, const Words& words, const std::string& site) {
  if (pages_.empty()) return;
  const uint64_t number = ++numbers_[row.place];
  Entry& entry = pages_[rank_][row.first + number % row.size];
  word(entry.number).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < words.size(); ++i)
    word(entry.words[i]).store(words[i], std::memory_order_relaxed);
  const size_t site_bytes = std::min(site.size(), kSiteBytes);
  word(entry.site_bytes).store(site_bytes, std::memory_order_relaxed);
  if (site_bytes != 0) std::memcpy(entry.site, site.data(), site_bytes);
  word(entry.number).store(number, std::memory_order_release);
}

std::vector<GpuJournal::Text> GpuJournal::read(int rank, const Row& row,
                                               std::string (*describe)(const Words&)) const {
  std::vector<Text> texts;
  if (rank < 0 || size_t(rank) >= pages_.size()) return texts;
  for (size_t i = 0; i < row.size; ++i) {
    const Entry& entry = pages_[size_t(rank)][row.first + i];
    const uint64_t number = word(entry.number).load(std::memory_order_acquire);
    Words words;
    for (size_t w = 0; w < words.size(); ++w)
      words[w] = word(entry.words[w]).load(std::memory_order_relaxed);
    const uint64_t site_bytes = word(entry.site_bytes).load(std::memory_order_relaxed);
    const std::string site(entry.site, std::min(site_bytes, uint64_t{kSiteBytes}));
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool is_whole = word(entry.number).load(std::memory_order_relaxed) == number;
    if (number != 0 && is_whole) texts.push_back({number, describe(words), site});
  }
  return texts;
}

std::vector<GpuJournal::Text> GpuJournal::calls(int rank) const {
  return read(rank, calls_row(), describe_words);
}

std::vector<GpuJournal::Text> GpuJournal::messages(int rank, bool sends, int peer) const {
  return read(rank, messages_row(sends, peer), describe_message);
}

bool GpuJournal::has_finished(int rank) const {
  return !read(rank, last_row(), [](const Words&) { return std::string(); }).empty();
}

uint64_t GpuJournal::num_messages(bool sends, int peer) const {
  return numbers_[messages_row(sends, peer).place];
}

}  // namespace fastcoll
