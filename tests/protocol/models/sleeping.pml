/* SPDX-License-Identifier: Apache-2.0
 *
 * The sleeper's handshake (csrc/cpu/group.h signal and wake, csrc/cpu/group_wait.h sleep): an owner
 * publishes a word SIGNALS times, two waiters sleep on its futex until the word is there. Sleeps
 * have no limit here, so a missed wake is a deadlock. The owner's plain stores go through a store
 * buffer (the one reordering that x86 has and that the handshake is about). They reach memory at
 * any later moment, in order, or at a barrier.
 *
 * The switches plant one bug each (test_models.py).
 */
#define WAITERS 2
#ifndef SIGNALS
#define SIGNALS 2
#endif

byte word, in_buffer; /* the value in memory; the owner's store, 0 once it has drained */
bool sleepers;
byte wake_word;
bool asleep[WAITERS];
bool is_over;

inline drain() {
  d_step { if :: in_buffer > word -> word = in_buffer :: else fi }
}

active proctype StoreBuffer() {
  do
  :: in_buffer > word -> drain()
  :: is_over && in_buffer == word -> break
  od
}

proctype Owner() {
  byte value, peer;
  do
  :: value == SIGNALS -> break
  :: else ->
    value++;
    in_buffer = value;
    if
    :: sleepers ->
      /* wake: its locked instructions drain the buffer, too */
#ifdef WAKE_BEFORE_CLEAR
      atomic { drain(); wake_word++ };
      sleepers = false;
#else
      atomic { drain(); sleepers = false };
      wake_word++;
#endif
      d_step { asleep[0] = false; asleep[1] = false }
    :: else
    fi
  od
}

proctype Waiter(byte me) {
  byte seen, target;
  select(target : 1 .. SIGNALS);
  do
  :: word >= target -> break
  :: else ->
#ifdef LATE_LOOK_AT_WAKE
    sleepers = true;
    seen = wake_word;
#else
    seen = wake_word;
    sleepers = true;
#endif
#ifndef NO_BARRIER
    drain(); /* membarrier: the owner's earlier stores are in memory, its later loads not older */
#endif
#ifndef NO_SECOND_LOOK
    if :: word >= target -> break :: else fi;
#endif
    /* futex_wait: compares and sleeps in one step */
    atomic {
      if
#ifdef UNCOMPARED_SLEEP
      :: asleep[me] = true
#else
      :: wake_word == seen -> asleep[me] = true
      :: else
#endif
      fi
    }
    !asleep[me]
  od
}

init {
  atomic { run Owner(); run Waiter(0); run Waiter(1) }
  _nr_pr == 2;
  is_over = true
}
