// SPDX-License-Identifier: Apache-2.0
// How a test program ends at its first finding.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

inline void require(bool right, const std::string& what) {
  if (right) return;
  std::fprintf(stderr, "WRONG: %s\n", what.c_str());
  std::exit(1);
}
inline void require_equal(const std::string& seen, const std::string& expected,
                          const std::string& what) {
  require(seen == expected, what + ": \"" + seen + "\", not \"" + expected + "\"");
}
template <class Number>
concept Numbered = std::is_integral_v<Number> || std::is_enum_v<Number>;
inline void require_equal(Numbered auto seen, Numbered auto expected, const std::string& what) {
  require_equal(std::to_string(int64_t(seen)), std::to_string(int64_t(expected)), what);
}
inline void require_part(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "\"" + text + "\" lacks \"" + part + "\"");
}
inline void require_start(const std::string& text, const std::string& start) {
  require_equal(text.substr(0, start.size()), start, "the start of a text");
}
