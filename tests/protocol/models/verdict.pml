/* SPDX-License-Identifier: Apache-2.0
 *
 * One verdict for all (Group::fail in csrc/cpu/group_status.h). Every rank may find an error of
 * its own at any time (a rank without news finds its timeout), and may be killed at any step of
 * telling the others. All ranks that raise a verdict raise the same one, now and in every later
 * call, and its text is there.
 *
 * The switches plant one bug each (test_models.py).
 */
byte poison[RANKS];     /* 0, or 1 + the rank whose verdict holds */
bool is_written[RANKS]; /* its text */
byte verdict;           /* that of the first rank to raise one */
bool is_dead[RANKS];

#ifdef OVERWRITING
#define SETTLE(rank, value) poison[rank] = value
#else
#define SETTLE(rank, value) if :: poison[rank] == 0 -> poison[rank] = value :: else fi
#endif

inline raise(number) {
  d_step {
    assert(is_written[number - 1]);
    if :: verdict == 0 -> verdict = number :: else fi;
    assert(verdict == number)
  }
}

proctype Rank(byte me) {
  byte winner, peer;
  {
    if
    :: poison[me] != 0 -> winner = poison[me] /* told, in a wait or before a call */
    :: true ->
#ifndef NUMBER_BEFORE_TEXT
      is_written[me] = true;
#endif
#ifdef NO_ARBITER
      winner = me + 1;
#else
      atomic { SETTLE(0, me + 1); winner = poison[0] };
#endif
      do
      :: peer == RANKS -> break
      :: else -> atomic { SETTLE(peer, winner); peer++ }
      od;
#ifdef NUMBER_BEFORE_TEXT
      is_written[me] = true
#endif
    fi;
    raise(winner);
    raise(poison[me]) /* the next call */
  } unless { is_dead[me] }
}

init {
  byte rank;
  atomic {
    do
    :: rank == RANKS -> break
    :: else -> run Rank(rank); rank++
    od
  }
  do
  :: true -> atomic { select(rank : 0 .. RANKS - 1); is_dead[rank] = true }
  :: break
  od
}
