// SPDX-License-Identifier: Apache-2.0
// How a test program ends at its first finding.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

inline void require(bool right, const std::string& what) {
  if (right) return;
  std::fprintf(stderr, "WRONG: %s\n", what.c_str());
  std::exit(1);
}
inline void require_equal(const std::string& seen, const std::string& expected,
                          const std::string& what) {
  require(seen == expected, what + ": \"" + seen + "\", not \"" + expected + "\"");
}
inline void require_equal(int64_t seen, int64_t expected, const std::string& what) {
  require_equal(std::to_string(seen), std::to_string(expected), what);
}
