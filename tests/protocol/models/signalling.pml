/* SPDX-License-Identifier: Apache-2.0
 *
 * The signalling of csrc/cpu/group.h and of the algorithms above it, as kernels/README.md states
 * it: arrival lines, inline lines, progress words, the ring of slots, `done` and the rule of reuse.
 * Every interleaving of RANKS ranks is explored over every sequence of CALLS calls (one shared
 * access is one step). Memory is sequentially consistent here; ThreadSanitizer finds the races of
 * weak memory.
 *
 * Data are tags: a segment's is its number over all calls, an arrival's the number of its call. A
 * reader that finds another tag than its call's would have computed wrong data. A deadlock is an
 * invalid end state.
 *
 * -DSTOPS: one rank stops for ever at any point; the others must end, with right data or an error.
 * The remaining switches plant one bug each (test_models.py).
 */
#ifndef DEPTH
#define DEPTH 2 /* kDepth and kNumSlots: the rule is the same for any number, fewer reuse sooner */
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef FEW
#define FEW SLOTS /* the share of a two_shot: kFewSlots */
#endif
#define SEGMENTS 2 /* of a staged call */

#ifdef SINGLE_LINE
#define LINES 1
#else
#define LINES DEPTH
#endif
#ifdef SINGLE_SLOT
#define SLOTS_USED 1
#else
#define SLOTS_USED (kind[call] == TWO_SHOT -> FEW : SLOTS)
#endif
#ifdef EQUALITY_WAIT
#define REACHED(seen, target) ((seen) == (target))
#else
#define REACHED(seen, target) ((seen) >= (target))
#endif

/* What a call is. A broadcast is its number plus its root. */
#define BARRIER 1
#define INLINE_REDUCE 2    /* one_shot inlined, as long as a line and a further one */
#define ONE_SHOT 3         /* staged; an all_gather of private tensors signals alike */
#define TWO_SHOT 4
#define SYMMETRIC_GATHER 5 /* peers read the owner's tensor where it lies */
#define INLINE_BROADCAST 10
#define STAGED_BROADCAST 20
#define SYMMETRIC_BROADCAST 30
#ifndef VERBS
#define VERBS 255 /* the kinds of call that take part, as bits in the order above */
#endif
#define CHOOSE(bit, which) ((VERBS >> (bit)) & 1) -> kind[call] = which
#define CHOOSE_WITH_ROOT(bit, which) ((VERBS >> (bit)) & 1) -> select(root : 0 .. RANKS - 1); kind[call] = which + root
#define IS_STAGED(k) ((k) == ONE_SHOT || (k) == TWO_SHOT || ((k) >= 20 && (k) < 30))

byte kind[CALLS + 1]; /* chosen by the first rank that comes to the call */

/* The words of the pads. */
byte arrive[RANKS * DEPTH], payload[RANKS * DEPTH];
byte inlined[RANKS * DEPTH], inline_payload[RANKS * DEPTH];
byte staged[RANKS], reduced[RANKS], done_word[RANKS];
/* Scratch: the staged data; of that the chunk for the rank before, which two_shot overwrites. */
byte slot[RANKS * SLOTS], result[RANKS * SLOTS];
#define REDUCED 128 /* and the tag: the sum that it wrote */
#define AFTER(r) (((r) + 1) % RANKS)
byte symmetric[RANKS];
bool has_stopped[RANKS], someone_stopped, failed;

#define LINE(r) ((r) * DEPTH + call % LINES)
#define SLOT(r, k) ((r) * SLOTS + (turn + (k)) % SLOTS_USED)

/* A wait that can't be met any more ends with the group's verdict (CollectiveTimeout,
 * PeerLostError); the awaited word is read once more before. */
#ifdef STOPS
#define WAIT(condition) \
  if :: (condition) :: ((someone_stopped || failed) && !(condition)) -> goto give_up fi
#else
#define WAIT(condition) (condition)
#endif

#ifdef UNCHECKED_DONE
#define REQUIRE_DONE(target) skip
#else
#define REQUIRE_DONE(target) \
  peer = 0; \
  do \
  :: peer == RANKS -> break \
  :: peer < RANKS && (peer == me || known_done[peer] + SLOTS >= (target) + SLOTS) -> peer++ \
  :: else -> WAIT(done_word[peer] >= (target)); known_done[peer] = target; peer++ \
  od
#endif

/* Reused: when all ranks are through with the last segment in the slot, of this call or before. */
#ifdef ALL_SLOTS_CLAIMED
#define SLOTS_CLAIMED SLOTS
#else
#define SLOTS_CLAIMED SLOTS_USED
#endif
#define DONE_WITH(k) done_with[(turn + (k)) % SLOTS_CLAIMED]
#define CLAIM(k) \
  if \
  :: (k) < SLOTS_CLAIMED -> REQUIRE_DONE(DONE_WITH(k)) \
  :: else -> REQUIRE_DONE(first + (k) + 1 - SLOTS_CLAIMED) \
  fi
#define STAGE(k) \
  CLAIM(k); \
  atomic { slot[SLOT(me, k)] = first + (k) + 1; result[SLOT(me, k)] = first + (k) + 1 }
#ifdef EARLY_ARRIVE
#define ARRIVE(write) arrive[LINE(me)] = call; write
#else
#define ARRIVE(write) write; arrive[LINE(me)] = call
#endif
/* Who arrived here is through with every earlier call. */
#define WAIT_ARRIVAL(r) \
  WAIT(arrive[LINE(r)] == call); \
  if :: known_done[r] < first -> known_done[r] = first :: else fi
#define FOR_PEERS(statements) \
  other = 0; \
  do \
  :: other == RANKS -> break \
  :: other < RANKS && other == me -> other++ \
  :: else -> statements; other++ \
  od
#define READ_SLOT(r, k) assert(slot[SLOT(r, k)] == first + (k) + 1)
#define CONSUME(count) done_word[me] = first + (count)

/* Around the reads of segment k. */
#ifdef EARLY_CONSUME
#define BEFORE_READS(k) CONSUME((k) + 1)
#define AFTER_READS(k) skip
#else
#define BEFORE_READS(k) skip
#define AFTER_READS(k) CONSUME((k) + 1)
#endif

#ifdef NO_ACKNOWLEDGEMENT
#define WAIT_CONSUMED skip
#else
#define WAIT_CONSUMED REQUIRE_DONE(next)
#endif

proctype Rank(byte me) {
  byte call, first, next, turn, k, peer, other, root;
  byte known_done[RANKS], firsts[DEPTH], done_with[SLOTS];
  {
    do
    :: call == CALLS -> break
    :: else ->
      /* begin */
      atomic {
        call++;
        if
        :: kind[call] == 0 ->
          if
          :: CHOOSE(0, BARRIER)
          :: CHOOSE(1, INLINE_REDUCE)
          :: CHOOSE(2, ONE_SHOT)
          :: CHOOSE(3, TWO_SHOT)
          :: CHOOSE(4, SYMMETRIC_GATHER)
          :: CHOOSE_WITH_ROOT(5, INLINE_BROADCAST)
          :: CHOOSE_WITH_ROOT(6, STAGED_BROADCAST)
          :: CHOOSE_WITH_ROOT(7, SYMMETRIC_BROADCAST)
          fi;
          root = 0
        :: else
        fi;
        first = next;
        next = first + (IS_STAGED(kind[call]) -> SEGMENTS : 1);
        firsts[call % DEPTH] = first
      }
      REQUIRE_DONE(firsts[(call + 1) % DEPTH]);
      if
      :: kind[call] == BARRIER ->
        ARRIVE(skip);
        FOR_PEERS(WAIT_ARRIVAL(other))

      :: kind[call] == INLINE_REDUCE ->
        ARRIVE(payload[LINE(me)] = call);
        inline_payload[LINE(me)] = call;
        inlined[LINE(me)] = call;
        FOR_PEERS(
          WAIT_ARRIVAL(other);
          assert(payload[LINE(other)] == call);
          WAIT(inlined[LINE(other)] == call);
          assert(inline_payload[LINE(other)] == call))

      :: kind[call] == ONE_SHOT ->
        STAGE(0);
        ARRIVE(skip);
        FOR_PEERS(WAIT_ARRIVAL(other));
        k = 0;
        do
        :: k == SEGMENTS -> break
        :: else ->
          if
          :: k + 1 < SEGMENTS -> STAGE(k + 1); staged[me] = first + k + 2
          :: else
          fi;
          BEFORE_READS(k);
          FOR_PEERS(
            if :: k > 0 -> WAIT(REACHED(staged[other], first + k + 1)) :: else fi;
            READ_SLOT(other, k));
          AFTER_READS(k);
          k++
        od;
        k = 0

      :: kind[call] == TWO_SHOT ->
        STAGE(0);
        ARRIVE(skip);
        FOR_PEERS(WAIT_ARRIVAL(other));
        k = 0;
        do
        :: k == SEGMENTS + 1 -> break
        :: else ->
          if
          :: k + 1 < SEGMENTS -> STAGE(k + 1); staged[me] = first + k + 2
          :: else
          fi;
          if
          :: k < SEGMENTS ->
            FOR_PEERS(
              if :: k > 0 -> WAIT(REACHED(staged[other], first + k + 1)) :: else fi;
              READ_SLOT(other, k));
            assert(result[SLOT(AFTER(me), k)] == first + k + 1);
            result[SLOT(AFTER(me), k)] = REDUCED + first + k + 1;
            reduced[me] = first + k + 1
          :: else
          fi;
          if
          :: k > 0 ->
            BEFORE_READS(k - 1);
            FOR_PEERS(
              WAIT(REACHED(reduced[other], first + k));
              assert(result[SLOT(AFTER(other), k - 1)] == REDUCED + first + k));
            AFTER_READS(k - 1)
          :: else
          fi;
          k++
        od;
        k = 0

      :: kind[call] == SYMMETRIC_GATHER ->
        ARRIVE(symmetric[me] = call);
        FOR_PEERS(WAIT_ARRIVAL(other));
        BEFORE_READS(0);
        FOR_PEERS(assert(symmetric[other] == call));
        AFTER_READS(0);
        WAIT_CONSUMED;
        symmetric[me] = 0 /* its owner's again */

      :: kind[call] >= INLINE_BROADCAST && kind[call] < STAGED_BROADCAST ->
        root = kind[call] - INLINE_BROADCAST;
        ARRIVE(payload[LINE(me)] = call);
        if
        :: me != root -> WAIT_ARRIVAL(root); assert(payload[LINE(root)] == call)
        :: else
        fi

      :: kind[call] >= STAGED_BROADCAST && kind[call] < SYMMETRIC_BROADCAST ->
        root = kind[call] - STAGED_BROADCAST;
        if
        :: me == root ->
          STAGE(0);
          ARRIVE(skip);
          STAGE(1);
          staged[me] = first + 2;
          CONSUME(1)
        :: else ->
          ARRIVE(skip);
          WAIT_ARRIVAL(root);
          BEFORE_READS(0);
          READ_SLOT(root, 0);
          AFTER_READS(0);
          WAIT(REACHED(staged[root], first + 2));
          BEFORE_READS(1);
          READ_SLOT(root, 1);
          AFTER_READS(1)
        fi

      :: kind[call] >= SYMMETRIC_BROADCAST ->
        root = kind[call] - SYMMETRIC_BROADCAST;
        if
        :: me == root ->
          ARRIVE(symmetric[me] = call);
          CONSUME(1);
          WAIT_CONSUMED;
          symmetric[me] = 0
        :: else ->
          ARRIVE(skip);
          WAIT_ARRIVAL(root);
          BEFORE_READS(0);
          assert(symmetric[root] == call);
          AFTER_READS(0)
        fi
      fi;
      /* end */
      if
      :: IS_STAGED(kind[call]) ->
        atomic { DONE_WITH(0) = first + 1; DONE_WITH(1) = first + 2; turn = turn + SEGMENTS }
      :: else
      fi;
#ifndef NO_DONE
      done_word[me] = next;
#endif
      root = 0
    od;
    goto finished
#ifdef STOPS
  } unless { has_stopped[me] };
#else
  };
#endif
  goto finished;
give_up:
  assert(someone_stopped);
  failed = true;
finished:
  skip
}

init {
  byte rank;
  atomic {
    do
    :: rank == RANKS -> break
    :: else -> run Rank(rank); rank++
    od;
    rank = 0
  }
#ifdef STOPS
  /* At any moment, or never. */
  if
  :: atomic { has_stopped[0] = true; someone_stopped = true }
  :: atomic { has_stopped[RANKS - 1] = true; someone_stopped = true }
  :: skip
  fi
#endif
}
