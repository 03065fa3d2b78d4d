// SPDX-License-Identifier: Apache-2.0
// Text and words that another process wrote, and the time of a wait, each function by itself: a
// table of inputs and results. Needs no group.
//
//   test_text
#include <climits>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/status.h"
#include "cpu/text.h"
#include "cpu/wait.h"
#include "require.h"

using namespace fastcoll;

namespace {

// ---- text ---------------------------------------------------------------------------------------

std::string utf8(uint32_t value) {
  std::string bytes;
  const auto rest = [&](int shift) { bytes += char(0x80 | (value >> shift & 0x3f)); };
  if (value < 0x80) return {char(value)};
  if (value < 0x800) bytes += char(0xc0 | value >> 6);
  else if (value < 0x10000) bytes += char(0xe0 | value >> 12), rest(6);
  else bytes += char(0xf0 | value >> 18), rest(12), rest(6);
  rest(0);
  return bytes;
}

void check_printable() {
  constexpr uint32_t kShown[] = {' ',    '~',    0xa0,   0xac,    0xae,   0xff,   0x100,
                                 0x61b,  0x61d,  0x7ff,  0x800,   0x200a, 0x2010, 0x2027,
                                 0x202f, 0x205f, 0x2070, 0xd7ff,  0xf900, 0xfefe, 0xff00,
                                 0xfff8, 0xfffc, 0xffff, 0x10000, 0xdffff};
  for (const uint32_t value : kShown)
    require_equal(printable(utf8(value)), utf8(value), "what a terminal shows");
  constexpr struct {
    uint32_t value;
    const char* shown;
  } kHidden[] = {{0, "\\x00"},        {0x1b, "\\x1b"},          {0x1f, "\\x1f"},
                 {0x7f, "\\x7f"},     {0x80, "\\x80"},          {0x9f, "\\x9f"},
                 {0xad, "\\xad"},     {0x61c, "\\u061c"},       {0x200b, "\\u200b"},
                 {0x200f, "\\u200f"}, {0x2028, "\\u2028"},      {0x202e, "\\u202e"},
                 {0x2060, "\\u2060"}, {0x206f, "\\u206f"},      {0xe000, "\\ue000"},
                 {0xf8ff, "\\uf8ff"}, {0xfeff, "\\ufeff"},      {0xfff9, "\\ufff9"},
                 {0xfffb, "\\ufffb"}, {0xe0000, "\\U000e0000"}, {0x10ffff, "\\U0010ffff"},
                 {'\n', "\\n"}};
  for (const auto& [value, shown] : kHidden)
    require_equal(printable(utf8(value)), shown, "escapes");
  // Each byte that is not UTF-8 is one mark.
  const std::string bad[] = {"\x80",
                             "\xa5\x80",
                             "\xf9\x80\x80\x80",
                             "\xbf",
                             "\xc2",
                             "\xc1\xbf",
                             "\xe0\x9f\xbf",
                             "\xe2\x82",
                             "\xed\xa0\x80",
                             "\xed\xbf\xbf",
                             "\xf0\x8f\xbf\xbf",
                             "\xf4\x90\x80\x80",
                             "\xf5\x80\x80\x80",
                             "\xf0\x90\x80",
                             "\xff"};
  for (const std::string& bytes : bad) {
    std::string marks;
    for (size_t i = 0; i < bytes.size(); ++i) marks += "\xef\xbf\xbd";
    require_equal(printable(bytes), marks, "not UTF-8");
    // The bytes behind it are read anew, and are no part of it.
    require_equal(printable(bytes + "a"), marks + "a", "not UTF-8, before a letter");
    require_equal(printable("a" + bytes + "\n"), "a" + marks + "\\n", "not UTF-8, in between");
  }
  require_equal(printable("\xc2"
                          "a"),
                "\xef\xbf\xbd"
                "a",
                "a letter in place of a byte");
  require_equal(printable(std::string_view("\xe2\x82\xac", 2)), "\xef\xbf\xbd\xef\xbf\xbd",
                "what ends inside a letter");
  require_equal(printable(""), "", "no text");
  require_equal(at_site(""), "", "no site");
  require_equal(at_site("a.py:1"), " at a.py:1", "a site");
}

// ---- a rank's words -----------------------------------------------------------------------------

Plan sample_plan() {
  Plan plan;
  plan.verb = Verb::all_reduce;
  plan.dtype = DType::int32;
  plan.op = Op::max;
  plan.algorithm = Algorithm::two_shot;
  plan.numel = 12345;
  plan.segment_bytes = uint32_t(kLeastSegmentBytes);
  return plan;
}

void write_entry(Pad& pad, uint64_t call, const Plan& plan) {
  Descriptor& entry = pad.ring[call % kRingEntries];
  const PlanWords words = plan_words(plan);
  entry.words[0] = words.kinds;
  entry.words[1] = words.numel;
  entry.words[2] = words.root_and_segment;
  entry.words[3] = uint64_t{7} << 32 | 9;
  entry.words[4] = words.splits;
  entry.wait_began_us = 11;
  entry.wait_ended_us = 12;
  entry.ended_us = 14;
  entry.sequence = 2 * call;
  write_site<StdAtomics>(pad.sites[call % kRingEntries], "a.py:1");
}

void check_entries() {
  const auto pad = std::make_unique<Pad>();
  std::memset(static_cast<void*>(pad.get()), 0, sizeof *pad);
  const uint64_t call = kRingEntries + 3;
  Descriptor& entry = pad->ring[3];
  const auto read = [&] { return read_operation<StdAtomics>(*pad, call); };
  require(!read(), "an entry that nobody wrote");
  write_entry(*pad, call, sample_plan());
  auto seen = read();
  require(seen.has_value(), "a whole entry");
  require(seen->plan == sample_plan(), "the plan of an entry");
  require_equal(seen->call, call, "its call");
  require_equal(seen->stamp, 7, "its stamp");
  require_equal(seen->end_segment, 9, "its end");
  require(seen->wait_began_us == 0 && seen->wait_ended_us == 0, "no wait in this call");
  require(seen->began_us == 0 && seen->ended_us == 0 && seen->site.empty(), "it is not traced");
  entry.timed_call = call;
  entry.began_us = 13;
  seen = read();
  require(seen->wait_began_us == 11 && seen->wait_ended_us == 12, "when it waited");
  require(seen->began_us == 13 && seen->ended_us == 14, "when it ran");
  require_equal(seen->site, "a.py:1", "its site");
  for (const uint64_t other : {call - kRingEntries, call + kRingEntries})
    require(!read_operation<StdAtomics>(*pad, other), "another call in the same place");
  entry.sequence = 2 * call - 1;
  require(!read(), "an entry that is being written");
  // Names are looked up in tables: a damaged kind has none.
  for (const auto& damage : std::vector<std::function<void(Plan&)>>{
           [](Plan& plan) { plan.verb = Verb(kNumGpuVerbs); },
           [](Plan& plan) { plan.dtype = DType(kNumDTypes); },
           [](Plan& plan) { plan.op = Op(kNumOps); },
           [](Plan& plan) { plan.algorithm = Algorithm(kNumGpuAlgorithms); }}) {
    Plan plan = sample_plan();
    damage(plan);
    write_entry(*pad, call, plan);
    require(!read(), "an entry without a name");
  }
  for (const uint64_t other : {call + 2, call + 1, call - 5})
    write_entry(*pad, other, sample_plan());
  pad->ring[20].sequence = 2 * 20 + 1;
  std::vector<uint64_t> calls;
  for (const Operation& one : read_operations<StdAtomics>(*pad)) calls.push_back(one.call);
  require(calls == std::vector<uint64_t>{call - 5, call + 1, call + 2},
          "all entries, oldest first");
}

void check_sites() {
  SiteText site;
  for (const size_t length : {size_t{0}, size_t{1}, sizeof site - 1, sizeof site}) {
    const std::string text(length, 's');
    std::memset(&site, 0xff, sizeof site);
    write_site<StdAtomics>(site, text);
    require_equal(read_site<StdAtomics>(site), text, "a site that fits");
  }
  const std::string tail(sizeof site - 3, 't');
  for (const std::string& before : {std::string("1234"), std::string(300, 'x')}) {
    write_site<StdAtomics>(site, before + tail);
    require_equal(read_site<StdAtomics>(site), "..." + tail, "a site that is too long");
  }
}

void check_waited_time() {
  WaitedTime waited(2, 1000);
  require_equal(waited.until(101000), 100000, "a wait");
  require_equal(waited.until(51000), 100000, "a clock read before");
  require_equal(waited.until(201000), 200000, "from the latest look on");
  require_equal(waited.until(9000000), 700000, "half a second of a long gap");
  require_equal(waited.left_us(), 1300000, "what is left");
  require(!waited.is_over(9000000), "a limit that is not over");
  for (int i = 1; i <= 3; ++i) waited.until(9000000 + i * 433333);
  require(!waited.is_over(9000000 + 3 * 433333), "a microsecond before the limit");
  require(waited.is_over(9000000 + 3 * 433333 + 1), "the limit");
  require_equal(WaitedTime(0.2, 0).until(1000000), 50000, "a quarter of the limit");
  require_equal(WaitedTime(0.01, 0).until(1000000), 20000, "at least a sleep");
  require_equal(WaitedTime(0, 0).left_us(), INT64_MAX, "no limit");
}

}  // namespace

int main() {
  check_printable();
  check_entries();
  check_sites();
  check_waited_time();
}
