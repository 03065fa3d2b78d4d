# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a broken group go on together: one answer for all who are left.

Decides by the uniform consensus of fail-stop systems with a leader (Cachin, Guerraoui, Rodrigues,
"Reliable and Secure Distributed Programming", section 5.3), with numbered rounds as in Paxos, since
a rank that is late may be taken for dead and come back. Pure: told what arrives, who is gone and
what time it is, it says what to send. Must not know sockets, processes or memory.

1. Everybody tells everybody that it has joined, and hands over its part of the new group.
2. The lowest rank that is left proposes those who joined. A rank accepts if it has the part of each
   of them, and holds that to be the answer if it ever leads itself; else it says whose it lacks,
   and accepts when they have come.
3. Once all have accepted the leader decides. Whoever hears the decision passes it on first.

So an answer that one rank may have acted on is held by all the others, and every later leader
proposes it again. It may therefore name a rank that has died since: the new group's first call
finds that out. That a rank is late is told by time alone. One that was stopped hears the others'
answer first; if several are stopped at once, one of them may go on alone, and shares no memory with
anybody then.
"""

from dataclasses import dataclass
from enum import IntEnum

GRACE_S = 2.0  # for a rank that has joined to answer, on a busy machine


class Kind(IntEnum):
    """What a message says."""

    JOIN = 1  # here I am, with my part; `time_ms` is how long I wait for the others
    PROPOSE = 2  # `ranks` shall go on
    ACCEPT = 3  # I can go on with those of `round`
    LACK = 4  # I can't yet: I have not got the parts of `ranks`
    LATE = 5  # I don't wait for `ranks` any longer, and the round is `round`
    DECIDE = 6  # `ranks` go on


@dataclass(frozen=True)
class Message:
    """What one rank tells another; `ranks` as bits. Round r is rank r's, modulo their number."""

    kind: Kind
    round: int = 0
    ranks: int = 0
    time_ms: int = 0


def bits(ranks: "set[int] | range") -> int:
    """Return ranks as bits."""
    return sum(1 << rank for rank in ranks)


def ranks_in(word: int) -> list[int]:
    """Return the ranks of a word of bits, in ascending order."""
    return [rank for rank in range(word.bit_length()) if word >> rank & 1]


class Agreement:
    """One rank's side of it.

    Attributes:
        outbox: What is to be sent, as (rank, message); the caller empties it.
        decision: The ranks that go on, as bits; None until it is known.
    """

    def __init__(self, rank: int, world_size: int, now_s: float, limit_s: float) -> None:
        self.rank = rank
        self.outbox: list[tuple[int, Message]] = []
        self.decision: int | None = None
        self._world_size = world_size
        self._everyone = bits(range(world_size))
        self._joined = 1 << rank
        self._out = 0  # gone, or late: nobody to wait for
        self._join_until_s = now_s + limit_s
        self._round = 0  # the latest I have heard of or begun; 0: none
        self._value = 0  # what I accepted last, or propose
        self._is_mine = False  # I thought of it: no other leader can have decided it
        self._proposed = 0  # another rank's proposal
        self._unanswered = False  # it waits for parts that I lack
        self._lacked = 0  # whose, as its leader knows
        self._accepted = 0  # of my own round
        self._lacking: dict[int, int] = {}  # in it: who can't accept yet, for whose parts
        self._looked_s = now_s
        self._answer_until_s = self._join_until_s + 2 * GRACE_S
        self._tell_all(Message(Kind.JOIN, time_ms=int(limit_s * 1000)))
        self._advance(now_s)

    def receive(self, peer: int, message: Message, now_s: float) -> None:
        """Take a message; what makes no sense is not answered."""
        if self.decision is not None:
            return
        if message.kind == Kind.JOIN:
            self._joined |= 1 << peer
            self._join_until_s = min(self._join_until_s, now_s + message.time_ms / 1000)
            if self._round == 0:
                self._answer_until_s = min(self._answer_until_s, self._join_until_s + 2 * GRACE_S)
        elif message.kind == Kind.PROPOSE:
            self._consider(peer, message, now_s)
        elif message.kind == Kind.ACCEPT and self._leads() and message.round == self._round:
            self._accepted |= 1 << peer
            self._lacking.pop(peer, None)
        elif message.kind == Kind.LACK and self._leads() and message.round == self._round:
            self._lacking[peer] = message.ranks & self._everyone
            self._is_mine = True  # it has not accepted, so nobody can have decided this
        elif message.kind == Kind.LATE:
            self._out |= message.ranks & self._everyone & ~(1 << self.rank)
            if message.round > self._round and message.round % self._world_size != self.rank:
                self._round, self._unanswered = message.round, False
            if not self._leads():  # its successor has time of its own
                self._answer_until_s = max(self._answer_until_s, now_s + 2 * GRACE_S)
        elif message.kind == Kind.DECIDE and message.ranks & ~self._everyone == 0:
            self._decide(message.ranks)
        self._advance(now_s)

    def lose(self, peer: int, now_s: float) -> None:
        """Note that a rank is gone; call this only when all it ever sent was received."""
        self._out |= 1 << peer
        self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Give up on those who are late; all that came before `now_s` must have been received."""
        if self.decision is not None:
            return
        if now_s - self._looked_s > GRACE_S / 2:  # this rank was stopped: others shall not pay
            self._join_until_s = max(self._join_until_s, now_s + GRACE_S)
            self._answer_until_s = max(self._answer_until_s, now_s + GRACE_S)
        self._looked_s = now_s
        late = 0
        if now_s >= self._join_until_s:
            late |= self._everyone & ~self._joined
        if now_s >= self._answer_until_s:
            late |= self._late()
            self._answer_until_s = now_s + 2 * GRACE_S
        if late := late & ~self._out & ~(1 << self.rank):
            self._out |= late
            self._tell_all(Message(Kind.LATE, self._round, late))
        self._advance(now_s)

    # ---- what follows --------------------------------------------------------------------------

    def _leader(self) -> int:
        """The rank whose turn it is: who proposed last, unless it is out, else the lowest."""
        last = self._round % self._world_size
        if self._round and not self._out >> last & 1:
            return last
        return ranks_in(self._everyone & ~self._out)[0]

    def _late(self) -> int:
        """Who keeps this rank waiting."""
        if not self._leads():
            return 1 << self._leader()
        late = self._value & ~self._accepted
        for peer, ranks in self._lacking.items():
            if silent := ranks & ~self._accepted:  # who accepted has sent its parts before
                late = late & ~(1 << peer) | silent
        return late

    def _leads(self) -> bool:
        return self._round > 0 and self._round % self._world_size == self.rank

    def _consider(self, peer: int, message: Message, now_s: float) -> None:
        is_its_own = message.round % self._world_size == peer
        if not is_its_own or message.ranks & ~self._everyone or not message.ranks >> self.rank & 1:
            return
        if message.round <= self._round:  # it was stopped, and another one leads
            self._tell(peer, Message(Kind.LATE, self._round))
            return
        self._joined |= 1 << peer
        self._round, self._proposed, self._unanswered = message.round, message.ranks, True
        self._answer_until_s = now_s + 3 * GRACE_S
        self._lacked = 0

    def _advance(self, now_s: float) -> None:
        if self.decision is not None:
            return
        if self._unanswered:
            self._answer()
        if self._leads():
            self._count(now_s)
        elif self._leader() == self.rank and (
            self._value or self._joined | self._out == self._everyone
        ):
            self._unanswered = False
            if not self._value:
                self._value, self._is_mine = self._joined & ~self._out, True
            self._propose(now_s)

    def _answer(self) -> None:
        leader = self._round % self._world_size
        lacking = self._proposed & ~self._joined
        if not lacking:
            self._value, self._is_mine, self._unanswered = self._proposed, False, False
            self._tell(leader, Message(Kind.ACCEPT, self._round))
        elif lacking != self._lacked:
            self._lacked = lacking
            self._tell(leader, Message(Kind.LACK, self._round, lacking))

    def _propose(self, now_s: float) -> None:
        above = self._round + 1
        self._round = above + (self.rank - above) % self._world_size
        self._accepted = 1 << self.rank
        self._lacking.clear()
        self._answer_until_s = now_s + GRACE_S
        for peer in ranks_in(self._value & ~(1 << self.rank)):
            self._tell(peer, Message(Kind.PROPOSE, self._round, self._value))
        self._count(now_s)

    def _count(self, now_s: float) -> None:
        """Decide, or propose anew without those who are out if that is still mine to do."""
        if self._is_mine and self._value & self._out:
            self._value &= ~self._out
            self._propose(now_s)
        elif not self._value & ~self._accepted & ~self._out:
            self._decide(self._value)

    def _decide(self, ranks: int) -> None:
        self.decision = ranks
        self._tell_all(Message(Kind.DECIDE, ranks=ranks))

    def _tell_all(self, message: Message) -> None:
        for peer in ranks_in(self._everyone & ~(1 << self.rank)):
            self._tell(peer, message)

    def _tell(self, peer: int, message: Message) -> None:
        self.outbox.append((peer, message))
