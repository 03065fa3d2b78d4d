# SPDX-License-Identifier: Apache-2.0
"""Which ranks go on: deaths and stops at every step, ranks that come back, and all of them at once.

The agreement is pure, so a world of it runs in one thread. Every rank is a generator that does what
`bootstrap.shrink` does, one access of shared things at a time. A seeded scheduler picks the rank
that comes next, dies or is stopped. Planted bugs must be found.
"""

import random
from collections.abc import Collection, Iterator

import pytest

from fastcoll.bootstrap.agreement import GRACE_S, Agreement, bits, ranks_in

LIMIT_S = 5.0
STEP_S = 0.001
LOOK_S = 0.25  # longer than the real one: as many looks as it takes to see a step go wrong


class World:
    """Some ranks of a broken group, and what they share."""

    agreement: type[Agreement] = Agreement

    def __init__(self, size: int, seed: int, **events: int) -> None:
        """`events`: how often each happens at most: die, stop, freeze (all), lose (a part)."""
        self.chance = random.Random(seed)
        self.size = size
        self.now_s = 0.0
        self.events = events
        self.sent: dict[int, set[int]] = {rank: set() for rank in range(size)}  # by receiver
        self.taken = {rank: {rank} for rank in range(size)}
        self.words = [0] * size
        self.survivors = 0
        self.gone: set[int] = set()  # dead, or through and away
        self.dead: set[int] = set()
        self.lost: set[tuple[int, int]] = set()  # whose part never reaches whom
        self.may_miss_it: set[int] = set()  # were stopped, or one has not the other's part
        self.asleep_until_s = [0.0] * size
        self.stopped_until_s = [0.0] * size
        self.answers: dict[int, int] = {}  # also of ranks that died afterwards
        self.steps = {rank: self.rank_steps(rank) for rank in range(size)}

    # ---- what a rank does, one access at a time --------------------------------------------------

    def rank_steps(self, me: int) -> Iterator[None]:
        agreement = self.agreement(me, self.size, self.now_s, LIMIT_S)
        yield from self.join(me)
        while True:
            now_s = self.now_s
            yield
            gone = self.gone - {me}
            yield
            self.take(me)
            yield
            held = []
            for word in self.words:
                held.append(word)
                yield
            proposal = agreement.proposal(held, gone, now_s)
            yield
            if answer := self.decide(me, proposal):
                self.answers[me] = answer
                yield
                return
            self.asleep_until_s[me] = self.now_s + LOOK_S
            yield

    def join(self, me: int) -> Iterator[None]:
        for peer in range(self.size):
            if peer != me:
                self.sent[peer].add(me)
                yield
        self.words[me] = 1 << me

    def take(self, me: int) -> None:
        self.taken[me] |= {peer for peer in self.sent[me] if (peer, me) not in self.lost}
        self.words[me] = bits(self.taken[me])

    def decide(self, me: int, proposal: int) -> int:
        self.survivors = self.survivors or proposal
        return self.survivors

    # ---- what happens to it ----------------------------------------------------------------------

    def run(self) -> None:
        often = self.chance.choice([0.01, 0.05, 0.2])
        for _ in range(20_000):
            left = [rank for rank in self.steps if rank not in self.gone]
            if not left:
                return
            ready_s = {r: max(self.stopped_until_s[r], self.asleep_until_s[r]) for r in left}
            self.now_s = max(self.now_s, min(ready_s.values()))
            rank = self.chance.choice([r for r in left if ready_s[r] <= self.now_s])
            if next(self.steps[rank], "end") == "end":
                self.gone.add(rank)
            elif self.chance.random() < often:
                self.happen(rank, left)
            self.now_s += STEP_S
        raise AssertionError("no answer")

    def happen(self, rank: int, left: list[int]) -> None:
        events = [event for event, number in self.events.items() if number]
        if not events:
            return
        event = self.chance.choice(events)
        self.events[event] -= 1
        if event == "die":
            self.gone.add(rank)
            self.dead.add(rank)
            return
        if event == "lose":
            other = self.chance.randrange(self.size)
            self.lost.add((other, rank))
            self.may_miss_it.update((rank, other))
            return
        if event == "stop":
            self.may_miss_it.add(rank)
        until_s = self.now_s + self.chance.choice([0.1, 0.5, 2, 6]) * LIMIT_S
        for one in left if event == "freeze" else [rank]:
            self.stopped_until_s[one] = max(self.stopped_until_s[one], until_s)


def check(world: World) -> None:
    """One answer for all, also for those who have died since, and nobody is left out for nothing.

    A rank that goes on has everybody's part.
    """
    world.run()
    answers = set(world.answers.values())
    assert len(answers) <= 1, [ranks_in(one) for one in answers]
    left = set(range(world.size)) - world.dead
    assert left == world.answers.keys() - world.dead
    if not left:
        return
    members = set(ranks_in(answers.pop()))
    assert left - world.may_miss_it <= members
    for rank in members:
        assert members <= world.taken[rank]


def check_all(kind: type[World], size: int, seeds: int, **most: int) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)
        events = {event: chance.randint(0, number) for event, number in most.items()}
        try:
            check(kind(size, seed, **events))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_one_answer_whoever_dies(size: int) -> None:
    for seed in range(200):
        world = World(size, seed, die=seed % (size + 1))
        check(world)
        assert world.now_s < GRACE_S  # a death is seen, nobody waits for the clock


@pytest.mark.parametrize(("size", "seeds"), [(2, 1500), (3, 800), (5, 300)])
def test_one_answer_whoever_stops(size: int, seeds: int) -> None:
    """Ranks stop again and again, several at once; some die, and some parts get lost."""
    check_all(World, size, seeds, stop=5, die=1, lose=1)


def test_nobody_pays_when_all_are_stopped_at_once() -> None:
    """As a suspended machine or a frozen container does; each takes the others for late then."""
    check_all(World, 3, 300, freeze=3, die=1)


class GoesOnAlone(World):
    """A rank that finds by the clock that the others are late goes on with that."""

    def decide(self, me: int, proposal: int) -> int:
        return super().decide(me, proposal) and (proposal or self.survivors)


class Overwriting(World):
    """The word is set without a compare."""

    def decide(self, me: int, proposal: int) -> int:
        self.survivors = proposal or self.survivors
        return self.survivors


class JoinsEarly(World):
    """A rank counts itself in before all were sent its part."""

    def join(self, me: int) -> Iterator[None]:
        self.words[me] = 1 << me
        yield
        yield from super().join(me)


class HoldsEarly(World):
    """A rank says that it has the parts of all who joined."""

    def take(self, me: int) -> None:
        super().take(me)
        self.words[me] |= bits(self.sent[me])


class Impatient(Agreement):
    """A rank that has not joined yet is out."""

    def proposal(self, held: list[int], gone: Collection[int], now_s: float) -> int:
        self._join_until_s = 0
        return super().proposal(held, gone, now_s)


class Hasty(Agreement):
    """A rank that has not taken all parts yet is out."""

    def proposal(self, held: list[int], gone: Collection[int], now_s: float) -> int:
        super().proposal(held, gone, now_s)
        self._moved_s = now_s - GRACE_S
        return super().proposal(held, gone, now_s)


class Unaware(Agreement):
    """A rank does not see that it was stopped itself."""

    def proposal(self, held: list[int], gone: Collection[int], now_s: float) -> int:
        self._looked_s = now_s
        return super().proposal(held, gone, now_s)


def world_of(agreement: type[Agreement]) -> type[World]:
    return type(agreement.__name__, (World,), {"agreement": agreement})


@pytest.mark.parametrize(
    "bug",
    [
        GoesOnAlone,
        Overwriting,
        JoinsEarly,
        HoldsEarly,
        *(world_of(kind) for kind in (Impatient, Hasty, Unaware)),
    ],
)
def test_planted_bugs_are_found(bug: type[World]) -> None:
    with pytest.raises(AssertionError, match="seed"):
        check_all(bug, 3, 1000, stop=2, die=1, freeze=1, lose=1)
