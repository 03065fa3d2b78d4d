# SPDX-License-Identifier: Apache-2.0
"""Phases in log2(n) rounds of pairwise exchange: halving, doubling, Bruck.

Halving and doubling run on the largest power of two of members, the core. The other members, the
guests, hand their part to a core member first and get their share back at the end. Guests are the
even ones of the first 2 x extra members. Member 2i + 1 is host of guest 2i, so that the core's
chunks stay in order. Sources: Thakur, Rabenseifner and Gropp 2005, section 4.4; Rabenseifner 2004.
"""

from typing import NamedTuple

from fastcoll_model.builders.team import Team
from fastcoll_model.schedule import Copy, Program, Reduce, Span


class Core(NamedTuple):
    """The core of a team: `size` members, of which the first `num_hosts` have a guest each."""

    size: int
    num_hosts: int

    @classmethod
    def of(cls, team_size: int) -> "Core":
        """Return the core of a team."""
        size = 1 << (team_size.bit_length() - 1)
        return cls(size, team_size - size)

    def member(self, place: int) -> int:
        """Return which member is at a place of the core."""
        return 2 * place + 1 if place < self.num_hosts else place + self.num_hosts

    def place(self, member: int) -> int:
        """Return the member's place in the core."""
        return member // 2 if member < 2 * self.num_hosts else member - self.num_hosts

    def is_guest(self, member: int) -> bool:
        """Return whether the member stands outside the core."""
        return member < 2 * self.num_hosts and member % 2 == 0

    def is_host(self, member: int) -> bool:
        """Return whether the member acts for a guest, the one before it."""
        return member < 2 * self.num_hosts and member % 2 == 1

    def chunks(self, start: int, end: int) -> range:
        """Return the chunks that the core's places start to end answer for, guests' included."""
        first, last = (min(2 * p, p + self.num_hosts) for p in (start, end))
        return range(first, last)


def halving_reduce_scatter(team: Team, *, serve_guests: bool = True) -> Program:
    """Exchange half of the rest with the partner in each round, and add the half that I keep."""
    core, me = Core.of(team.size), team.me
    if core.is_guest(me):
        yield team.signal(me + 1)
        if serve_guests:
            yield team.wait(me + 1)
            yield from team.pull(me + 1, [me])
        return
    if core.is_host(me):
        yield team.wait(me - 1)
        yield from team.add([me - 1, me], team.everything())
    place, start, half = core.place(me), 0, core.size // 2
    while half:
        start += place & half
        partner = core.member(place ^ half)
        yield team.signal(partner)
        yield team.wait(partner)
        yield from team.add(sorted((me, partner)), core.chunks(start, start + half))
        half //= 2
    if core.is_host(me) and serve_guests:
        yield team.signal(me - 1)


def doubling_all_gather(team: Team, *, collect_guests: bool = True) -> Program:
    """Exchange all chunks gathered so far with the partner in each round."""
    core, me = Core.of(team.size), team.me
    if core.is_guest(me):
        if collect_guests:
            yield team.signal(me + 1)
        yield team.wait(me + 1)
        kept = [me] if collect_guests else []
        yield from team.pull(me + 1, [c for c in team.everything() if c not in kept])
        return
    if core.is_host(me) and collect_guests:
        yield team.wait(me - 1)
        yield from team.pull(me - 1, [me - 1])
    place, width = core.place(me), 1
    while width < core.size:
        partner = core.member(place ^ width)
        start = (place ^ width) & -width
        yield team.signal(partner)
        yield team.wait(partner)
        yield from team.pull(partner, core.chunks(start, start + width))
        width *= 2
    if core.is_host(me):
        yield team.signal(me - 1)


def doubling_all_reduce(team: Team) -> Program:
    """Exchange the sum so far in each round, into fresh scratch, as the partner still reads."""
    core, me = Core.of(team.size), team.me
    pieces = list(team.pieces(team.everything()))
    round_blocks = sum(count for _, count in pieces)

    def part(member: int, level: int, start: int, count: int) -> Span:
        return Span(team.ranks[member], "scratch", start + level * round_blocks, count)

    last = core.size.bit_length() - 1
    if core.is_guest(me):
        yield team.signal(me + 1)
        yield team.wait(me + 1)
        for piece in pieces:
            yield Copy(part(me, 0, *piece)._replace(buffer="output"), part(me + 1, last, *piece))
        return
    if core.is_host(me):
        yield team.wait(me - 1)
        yield from team.add([me - 1, me], team.everything())
    for level in range(last):
        partner = core.member(core.place(me) ^ (1 << level))
        yield team.signal(partner)
        yield team.wait(partner)
        for piece in pieces:
            terms = tuple(part(member, level, *piece) for member in sorted((me, partner)))
            yield Reduce(part(me, level + 1, *piece), terms)
    if core.is_host(me):
        yield team.signal(me - 1)
    for piece in pieces:
        yield Copy(part(me, 0, *piece)._replace(buffer="output"), part(me, last, *piece))


def bruck_all_gather(team: Team) -> Program:
    """Take in each round as many chunks as I have, from the member so far ahead; any size.

    Bruck, Ho, Kipnis, Upfal and Weathersby 1997.
    """
    have = 1
    while have < team.size:
        more = min(have, team.size - have)
        yield team.signal(team.me - have)
        yield team.wait(team.me + have)
        yield from team.pull(team.me + have, range(team.me + have, team.me + have + more))
        have *= 2
