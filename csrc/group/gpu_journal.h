// SPDX-License-Identifier: Apache-2.0
// The last calls of every rank on its GPU, for the text of an error.
//
// A kernel that finds a different call sees its stamp only. So the host writes each collective, and
// each message to or from a peer, where all ranks can read it. An entry is one line of 64 bytes,
// and the call's site behind it where sites are noted. Nothing waits for these words. Only errors
// read them, and make text of them. The GIL guards this rank's own entries.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device_side.h"
#include "plan.h"

namespace fastcoll {

class GpuJournal {
 public:
  // A new memfd for the entries of one rank.
  static int create(int world_size);
  // Takes over the descriptors of all ranks, by rank.
  GpuJournal(int rank, const std::vector<int>& fds);
  ~GpuJournal() { close(); }
  GpuJournal(const GpuJournal&) = delete;
  GpuJournal& operator=(const GpuJournal&) = delete;

  // This rank's next collective, and where the program makes it, if that is known.
  void write(const Plan& plan, const std::string& site = {});
  // The next message to a peer, or the next that is expected from it.
  void write_message(bool sends, int peer, DType dtype, uint64_t numel, uint32_t tag,
                     const std::string& site);
  void finish();  // all of this rank's kernels have ended

  // The last start of this rank: its collective, or what was noted since.
  std::string started() const;
  void note_started(const std::string& text) { started_ = text; }
  // The same of messages, whose text is made only if it is asked for.
  void note_messages(std::span<const DeviceMessage> messages) {
    started_.clear();
    last_messages_.assign(messages.begin(), messages.end());
  }

  struct Text {
    uint64_t number;  // of the entry in its row
    std::string call, site;
  };
  // Those entries of a rank that are kept, in no order.
  std::vector<Text> calls(int rank) const;
  std::vector<Text> messages(int rank, bool sends, int peer) const;
  bool has_finished(int rank) const;
  uint64_t num_calls() const { return numbers_[0]; }  // that this rank wrote
  uint64_t num_messages(bool sends, int peer) const;

  void close();  // unmaps the entries; nothing is written or found any more

  using Words = std::array<uint64_t, 4>;  // of a plan, or of a message's facts

 private:
  static constexpr size_t kCalls = 64, kMessages = 8;  // kept: of all; of each peer and direction
  static constexpr size_t kSiteBytes = 3 * kLineBytes;
  // The number is stored last, and 0 before the others: a reader takes whole entries only.
  struct alignas(kLineBytes) Entry {
    uint64_t number;
    Words words;
    uint64_t site_bytes;
    uint64_t reserved[2];
    char site[kSiteBytes];
  };
  static_assert(sizeof(Entry) == 4 * kLineBytes);
  struct Row {
    size_t place;  // among the rows
    size_t first, size;
  };
  static Row calls_row() { return {0, 0, kCalls}; }
  Row messages_row(bool sends, int peer) const;
  Row last_row() const { return {numbers_.size() - 1, num_entries(world_size_) - 1, 1}; }
  static size_t num_entries(int world_size) {
    return kCalls + 2 * size_t(world_size) * kMessages + 1;
  }
  void write(const Row& row, const Words& words, const std::string& site);
  std::vector<Text> read(int rank, const Row& row, std::string (*describe)(const Words&)) const;

  const size_t rank_;
  const int world_size_;
  std::vector<Entry*> pages_;      // by rank; none once it is closed
  std::vector<uint64_t> numbers_;  // of the entries that this rank wrote, by row
  Plan last_;
  std::vector<DeviceMessage> last_messages_;  // since the last plan
  std::string started_;                       // empty: it is these messages, or the last plan
};

}  // namespace fastcoll
