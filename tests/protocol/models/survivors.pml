/* SPDX-License-Identifier: Apache-2.0
 *
 * The survivors after a loss (python/fastcoll/bootstrap/agreement.py): each rank hands all others
 * its part, lists the parts that it has, and settles the word of survivors. Clocks are left out: at
 * any moment a rank may hold any others for gone or late and propose the rest. That covers ranks
 * that are stopped, which others run before, and that are killed, which never run again. All ranks
 * that get an answer get the same one. All ranks named there have the parts of each other.
 *
 * The switches plant one bug each (test_models.py).
 */
#define BIT(rank) (1 << (rank))

byte sent[RANKS];  /* by receiver: whose part lies in its sockets */
byte taken[RANKS]; /* by rank: whose parts it has */
byte held[RANKS];  /* the words */
byte survivors;    /* rank 0's word */
byte answer;       /* the first that a rank has heard */

#ifdef SURVIVORS_UNCOMPARED
#define SETTLE(mine) survivors = mine; heard = mine
#elif defined(SURVIVORS_UNHEARD)
#define SETTLE(mine) if :: survivors == 0 -> survivors = mine :: else fi; heard = mine
#else
#define SETTLE(mine) if :: survivors == 0 -> survivors = mine :: else fi; heard = survivors
#endif

proctype Rank(byte me) {
  byte peer, mine, heard;
  do
  :: peer == RANKS -> break
  :: else -> atomic { sent[peer] = sent[peer] | BIT(me); peer++ } /* its own, too */
  od;
  do
  :: heard == 0 ->
#ifdef HELD_BEFORE_TAKEN
    held[me] = held[me] | sent[me];
    taken[me] = held[me];
#else
    taken[me] = taken[me] | sent[me];
    held[me] = taken[me];
#endif
    atomic {
      select(mine : 0 .. BIT(RANKS) - 1);
      if :: mine & BIT(me) :: else -> mine = 0 fi; /* nothing to propose */
      peer = 0
    }
    do
    :: peer == RANKS || mine == 0 -> break
    :: else ->
      atomic {
        if :: (mine & BIT(peer)) && (mine & ~held[peer]) -> mine = 0 :: else fi;
        peer++
      }
    od;
    atomic {
      if :: mine != 0 -> SETTLE(mine) :: else -> heard = survivors fi;
      peer = 0;
      mine = 0
    }
  :: else -> break
  od;
  atomic {
    if :: answer == 0 -> answer = heard :: else fi;
    assert(heard == answer);
    do
    :: peer == RANKS -> break
    :: else -> assert((heard & BIT(peer)) == 0 || (heard & ~taken[peer]) == 0); peer++
    od
  }
}

init {
  byte rank;
  atomic {
    do
    :: rank == RANKS -> break
    :: else -> run Rank(rank); rank++
    od
  }
}
