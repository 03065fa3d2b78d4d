# SPDX-License-Identifier: Apache-2.0
"""Which ranks go on: every order of messages, deaths at every step, ranks that stop and come back.

The agreement is pure, so a world of it runs in one thread: messages wait in queues, one for each
pair of ranks, and a seeded scheduler picks what happens next. Planted bugs must be found.
"""

import random
from collections import deque

import pytest

from fastcoll.bootstrap import agreement
from fastcoll.bootstrap.agreement import GRACE_S, Agreement, Kind, Message, ranks_in

LIMIT_S = 5.0


class World:
    """Some ranks of a broken group. A rank that dies has sent a part of what it wanted to send."""

    def __init__(
        self, size: int, seed: int, deaths: int, stops: int, kind: type[Agreement] = Agreement
    ) -> None:
        self.chance = random.Random(seed)
        self.size = size
        self.now_s = 0.0
        self.queues: dict[tuple[int, int], deque[Message]] = {
            (a, b): deque() for a in range(size) for b in range(size)
        }
        self.dead: set[int] = set()
        self.stopped: dict[int, float] = {}  # until when
        self.were_stopped: set[int] = set()
        self.told: dict[int, set[int]] = {rank: set() for rank in range(size)}  # who is gone
        self.deaths, self.stops = deaths, stops
        self.ranks = [kind(rank, size, 0.0, LIMIT_S) for rank in range(size)]
        self.decided: dict[int, int] = {}
        self.decisions: set[int] = set()  # also of ranks that died afterwards
        for rank in range(size):
            self.flush(rank)

    def flush(self, rank: int) -> None:
        """Send what a rank has to send; it may die, or be stopped, in the middle of that."""
        outbox = self.ranks[rank].outbox
        sent = len(outbox)
        if outbox and self.chance.random() < 0.25:
            if self.deaths:
                sent = self.chance.randrange(sent + 1)
                self.deaths -= 1
                self.dead.add(rank)
            elif self.stops:
                sent = self.chance.randrange(sent + 1)
                self.stops -= 1
                self.stopped[rank] = self.now_s + self.chance.choice([0.1, 0.5, 2, 6]) * LIMIT_S
                self.were_stopped.add(rank)
        for peer, message in outbox[:sent]:
            self.queues[rank, peer].append(message)
        del outbox[:sent]
        decision = self.ranks[rank].decision
        if decision is not None and not outbox and rank not in self.dead:
            self.decided[rank] = decision
            self.decisions.add(decision)

    def drain(self, rank: int) -> None:
        """What a rank does in each turn: read all there is, note who is gone, look at the clock."""
        me, now_s = self.ranks[rank], self.now_s
        if me.outbox:  # it was stopped in the middle of sending
            self.flush(rank)
            return
        gone = [peer for peer in self.dead if peer not in self.told[rank]]
        peers = [peer for peer in range(self.size) if peer != rank]
        self.chance.shuffle(peers)
        for peer in peers:
            queue = self.queues[peer, rank]
            # Something may come later than this look; of who is gone all is there.
            count = len(queue) if peer in gone else self.chance.randint(0, len(queue))
            for _ in range(count):
                me.receive(peer, queue.popleft(), now_s)
        for peer in gone:
            self.told[rank].add(peer)
            me.lose(peer, now_s)
        if all(not self.queues[peer, rank] for peer in peers):
            me.tick(now_s)
        self.flush(rank)

    def run(self) -> None:
        for _ in range(4000):
            left = [rank for rank in range(self.size) if rank not in self.dead]
            if all(rank in self.decided for rank in left):
                return
            running = [rank for rank in left if self.stopped.get(rank, 0) <= self.now_s]
            if running:
                self.drain(self.chance.choice(running))
            is_idle = all(not queue for (_, to), queue in self.queues.items() if to in running)
            is_idle = is_idle and all(self.told[rank] >= self.dead for rank in running)
            self.now_s += 0.1 if is_idle else 0.002
        raise AssertionError("no decision")


def check(world: World) -> None:
    """One answer for all, also for those who have died since, and nobody is left out for nothing.

    Who is in has everybody's part.
    """
    world.run()
    assert len(world.decisions) == 1, [ranks_in(one) for one in world.decisions]
    members = set(ranks_in(world.decisions.pop()))
    left = set(range(world.size)) - world.dead
    assert left - world.were_stopped <= members
    if not world.were_stopped:
        assert world.now_s < GRACE_S  # a death is seen, nobody waits for the clock
    for rank in left & members - world.were_stopped:
        assert members <= set(ranks_in(world.ranks[rank]._joined))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_one_answer_whoever_dies(size: int) -> None:
    for seed in range(400):
        check(World(size, seed, deaths=seed % size, stops=0))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_answer_whoever_stops(size: int) -> None:
    for seed in range(200):
        check(World(size, seed, deaths=seed % 2, stops=1))


class NotPassedOn(Agreement):
    """Who hears the decision keeps it."""

    def _decide(self, ranks: int) -> None:
        heard = not self._leads()
        super()._decide(ranks)
        if heard:
            self.outbox.clear()


class Forgetful(Agreement):
    """A new leader proposes what it thinks itself, not what it accepted."""

    def _propose(self, now_s: float) -> None:
        if not self._is_mine:
            self._value = self._joined & ~self._out
        super()._propose(now_s)


class Hasty(Agreement):
    """A leader decides before all have accepted."""

    def _propose(self, now_s: float) -> None:
        super()._propose(now_s)
        if self.decision is None:
            self._decide(self._value)


class Impatient(Agreement):
    """Who has not joined yet is out."""

    def _leader(self) -> int:
        self._out |= self._everyone & ~self._joined
        return super()._leader()


@pytest.mark.parametrize("bug", [NotPassedOn, Forgetful, Hasty, Impatient])
def test_planted_bugs_are_found(bug: type[Agreement]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(1000):
            check(World(3, seed, deaths=1, stops=seed % 2, kind=bug))


def test_a_stopped_rank_is_left_out_and_told() -> None:
    world = World(3, 1, deaths=0, stops=0)
    world.stopped[0] = 3 * LIMIT_S
    world.were_stopped.add(0)
    world.run()
    # Its JOIN was sent already: it is taken in, and given up when it does not answer.
    assert ranks_in(world.decisions.pop()) == [1, 2]
    assert world.ranks[0].decision == world.ranks[1].decision
    assert LIMIT_S <= world.now_s <= 4 * LIMIT_S


def test_who_never_joins_costs_the_shortest_limit() -> None:
    one = Agreement(1, 3, 0.0, 100.0)
    one.receive(2, Message(Kind.JOIN, time_ms=2000), 0.0)
    for tenths in range(1, 20):
        one.tick(tenths / 10)
    assert not [to for to, message in one.outbox if message.kind == Kind.PROPOSE]
    one.tick(2.05)  # rank 0 is out: rank 1 leads
    proposed = [message for _, message in one.outbox if message.kind == Kind.PROPOSE]
    assert [ranks_in(message.ranks) for message in proposed] == [[1, 2]]


def test_nonsense_is_not_answered() -> None:
    one = Agreement(1, 3, 0.0, LIMIT_S)
    one.outbox.clear()
    for message in (
        Message(Kind.PROPOSE, round=4, ranks=0b111),  # round 4 is rank 1's own
        Message(Kind.PROPOSE, round=3, ranks=0b1111),  # there is no rank 3
        Message(Kind.PROPOSE, round=3, ranks=0b101),  # not for this rank
        Message(Kind.LATE, round=7, ranks=0b10),  # nor is round 7 another's
        Message(Kind.DECIDE, ranks=1 << 40 | 0b111),
        Message(Kind.ACCEPT, round=0),
        Message(Kind.LACK, round=0, ranks=0b111),
    ):
        one.receive(0, message, 0.0)
    assert one.outbox == []
    assert one.decision is None
    assert agreement.bits({0, 2}) == 0b101
    assert GRACE_S > 0
