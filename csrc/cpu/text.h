// SPDX-License-Identifier: Apache-2.0
// Text that another process wrote, made safe for a terminal or a log. Decides which characters are
// shown as they are. The result is one line of printable UTF-8.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace fastcoll {

// The code point that starts at `at`, and its bytes there; -1 and 1 if that is not UTF-8.
struct CodePoint {
  int64_t value = -1;
  size_t num_bytes = 1;
};

inline CodePoint code_point(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return uint32_t(static_cast<unsigned char>(text[at + i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {int64_t(first), 1};
  const size_t num_bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || num_bytes > text.size() - at) return {};
  uint32_t value = first & (0x7fu >> num_bytes);
  for (size_t i = 1; i < num_bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = value >= 0xd800 && value < 0xe000;
  if (value < kLeast[num_bytes] || value > 0x10ffff || is_surrogate) return {};
  return {int64_t(value), num_bytes};
}

// Whether a terminal shows it as it is: no control, no mark that hides or reorders its neighbours.
inline bool is_printable(int64_t value) {
  struct Range {
    int64_t first, last;
  };
  constexpr Range kOthers[] = {{0, 0x1f},        {0x7f, 0x9f},       {0xad, 0xad},
                               {0x61c, 0x61c},   {0x200b, 0x200f},   {0x2028, 0x202e},
                               {0x2060, 0x206f}, {0xfeff, 0xfeff},   {0xfff9, 0xfffb},
                               {0xe000, 0xf8ff}, {0xe0000, 0x10ffff}};
  for (const Range& range : kOthers)
    if (value >= range.first && value <= range.last) return false;
  return true;
}

// The same text in UTF-8, with escapes ("\x1b") in place of unprintable characters. Line ends are
// escaped, too: one text is one line.
inline std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const auto [value, num_bytes] = code_point(text, at);
    if (value < 0) result += "\xef\xbf\xbd";  // U+FFFD, as decoders have it
    else if (is_printable(value)) result += text.substr(at, num_bytes);
    else if (value == '\n') result += "\\n";
    else {
      char escaped[16];
      const char* form = value < 0x100 ? "\\x%02x" : value < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(escaped, sizeof escaped, form, unsigned(value));
      result += escaped;
    }
    at += num_bytes;
  }
  return result;
}

}  // namespace fastcoll
