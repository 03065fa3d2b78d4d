// SPDX-License-Identifier: Apache-2.0
// A machine with weak memory for the real templates. relacy runs the ranks as fibers of one thread,
// in orders drawn at random. It lets a load see any value that the C++ memory model allows.
//
// Shared words go through the functions below (by a policy like StdAtomics). All other accesses are
// seen because the templates are compiled with -fsanitize=thread, whose calls end here. An access
// to watched memory without an order to a conflicting one is a finding. The operating
// system (cpu/wait.h, cpu/process_memory.h) is the machine's, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace machine {

enum class Order { relaxed, acquire, release, acq_rel, seq_cst };

uint64_t load(const void* word, Order order);
// The memory of the word gets the value, too, for its owner to read plainly.
void store(uint64_t* word, uint64_t value, Order order);
void store(uint32_t* word, uint32_t value, Order order);
// 0 -> value; returns the word's value then.
uint64_t set_once(uint64_t* word, uint64_t value, Order order);
void increment(uint32_t* word, Order order);

void watch(const void* begin, size_t num_bytes);  // before simulate()
uint64_t draw(uint64_t limit);                    // 0 to limit - 1, another one in every iteration
void require(bool right, const char* what);       // else a finding

struct Scenario {
  int num_threads;  // 2 or 3
  uint64_t num_iterations;
  std::function<void()> before;  // of every iteration; all words are 0
  std::function<void(int)> thread;
  // Sleeps have no limit, so that a rank not woken is a finding, and there is membarrier. Elsewhere
  // it would hide accesses that are not ordered without it.
  bool wakes_all = false;
  bool has_barrier = true;  // membarrier works
};

// False: there was a finding, and it was printed.
bool simulate(const Scenario& scenario);

}  // namespace machine
