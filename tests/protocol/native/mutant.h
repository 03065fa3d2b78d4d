// SPDX-License-Identifier: Apache-2.0
// The switch of every mutation that mutation_points.py writes into a copy of csrc/cpu. All of them
// are compiled at once; MUTANT is the number of the one that is on. With
// MUTANT_TRACE the program writes down, when it ends, which ones it came past.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace mutant {

inline constexpr int kMost = 1 << 14;
inline unsigned char reached[kMost];

inline int read_active() {
  const char* text = std::getenv("MUTANT");
  return text ? std::atoi(text) : -1;
}
inline void write_reached() {
  std::FILE* file = std::fopen(std::getenv("MUTANT_TRACE"), "w");
  if (!file) std::abort();
  for (int id = 0; id < kMost; ++id)
    if (reached[id]) std::fprintf(file, "%d\n", id);
  std::fclose(file);
}
inline bool start_trace() { return std::getenv("MUTANT_TRACE") && std::atexit(write_reached) == 0; }
inline const int active = read_active();
inline const bool traces = start_trace();

constexpr bool on(int id) {
  if (std::is_constant_evaluated()) return false;
  if (traces) __atomic_store_n(&reached[id], 1, __ATOMIC_RELAXED);
  return id == active;
}

constexpr int bound(int id, int value) {
  return on(id) ? value - 1 : on(id + 1) ? value + 1 : value;
}

template <class F>
constexpr F* choose(int id, F* right, F* wrong) {
  return on(id) ? wrong : right;
}

template <class T>
constexpr T unless(int id, T value) {
  return on(id) ? T{} : value;
}

template <class Group, class Index>
auto* claim(int id, Group& group, Index segment) {
  return on(id) ? group.slot(group.rank(), segment) : group.claim_slot(segment);
}

// Two logical operands that are combined keep their precedence: `a && b` becomes
// `a | Flag && Flag | b`, and `a || b` becomes `a & Flag || Flag & b`.
struct True {
  int id;
};
struct False {
  int id;
};
template <class T>
constexpr bool operator|(const T& value, True flag) {
  return bool(value) | on(flag.id);
}
template <class T>
constexpr bool operator|(True flag, const T& value) {
  return on(flag.id) | bool(value);
}
template <class T>
constexpr bool operator&(const T& value, False flag) {
  return bool(value) & !on(flag.id);
}
template <class T>
constexpr bool operator&(False flag, const T& value) {
  return !on(flag.id) & bool(value);
}

// `a < b` becomes `a <= Compare{id, '<'} <= b`, and `a == b` becomes `a == Equal{id} == b`. The
// precedence is the same, so that no parentheses are needed.
enum class Op { less, less_or_equal, more, more_or_equal, equal, unequal };
struct Compare {
  int id;
  Op op;
};
struct Equal {
  int id;
  Op op;
  bool has_ordered;  // id + 1 is `>=`
};
template <class T, class C>
struct Left {
  const T& value;
  C compare;
};
template <class T>
constexpr Left<T, Compare> operator<=(const T& value, Compare compare) {
  return {value, compare};
}
template <class T, class U>
constexpr bool operator<=(const Left<T, Compare>& left, const U& right) {
  const bool is_on = on(left.compare.id);
  switch (left.compare.op) {
    case Op::less:
      return is_on ? left.value <= right : left.value < right;
    case Op::less_or_equal:
      return is_on ? left.value < right : left.value <= right;
    case Op::more:
      return is_on ? left.value >= right : left.value > right;
    default:
      return is_on ? left.value > right : left.value >= right;
  }
}
template <class T>
constexpr Left<T, Equal> operator==(const T& value, Equal compare) {
  return {value, compare};
}
template <class T, class U>
constexpr bool operator==(const Left<T, Equal>& left, const U& right) {
  if constexpr (requires { left.value >= right; })
    if (left.compare.has_ordered && on(left.compare.id + 1)) return left.value >= right;
  return (left.value == right) != ((left.compare.op == Op::unequal) != on(left.compare.id));
}

}  // namespace mutant
