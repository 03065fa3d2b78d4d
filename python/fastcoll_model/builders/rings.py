# SPDX-License-Identifier: Apache-2.0
"""Phases between neighbours: the ring in either direction, and the chain."""

from fastcoll_model.builders.team import Piece, Team
from fastcoll_model.schedule import Program, Signal, Wait


def reduce_scatter(team: Team, direction: int = 1) -> Program:
    """Pass chunk c from behind member c to c; it collects each member's part on its way.

    Patarasuk and Yuan 2009.
    """
    before, behind = team.me - direction, team.me + direction
    for step in range(1, team.size):
        yield team.signal(behind)
        yield team.wait(before)
        yield from team.add([before, team.me], [team.me - direction * (step + 1)])


def all_gather(team: Team, direction: int = 1) -> Program:
    """Pass every chunk once round the ring."""
    before, behind = team.me - direction, team.me + direction
    for step in range(1, team.size):
        yield team.signal(behind)
        yield team.wait(before)
        yield from team.pull(before, [team.me - direction * step])


def _segments(team: Team) -> list[Piece]:
    """Return the blocks one by one: a chain moves one at a time, so that all links are busy."""
    return [
        (block, 1)
        for start, count in team.pieces(team.everything())
        for block in range(start, start + count)
    ]


def chain_broadcast(team: Team) -> Program:
    """Pass the message from the root to the member before it, segment by segment."""
    place = (team.me - team.root) % team.size
    for segment in _segments(team):
        if place > 0:
            yield team.wait(team.me - 1)
            yield from team.copy(team.me - 1, team.me, segment)
        if place < team.size - 1:
            yield team.signal(team.me + 1)


def chain_reduce(team: Team) -> Program:
    """Pass partial sums from the member behind the root round to the root, by segments."""
    place = (team.root - team.me) % team.size
    for segment in _segments(team):
        if place < team.size - 1:
            yield team.wait(team.me - 1)
            yield from team.sum([team.me - 1, team.me], segment)
        if place > 0:
            yield team.signal(team.me + 1)


def chain_forward(team: Team) -> Program:
    """Pass partial sums from member 0 to the last, in rank order; it starts `chain_back`."""
    for segment in _segments(team):
        if team.me > 0:
            yield team.wait(team.me - 1)
            yield from team.sum([team.me - 1, team.me], segment)
        last = team.me == team.size - 1
        yield Signal(team.ranks[team.me], team.channel + 1) if last else team.signal(team.me + 1)


def chain_back(team: Team) -> Program:
    """Pass the result from the last member back to member 0."""
    for segment in _segments(team):
        if team.me == team.size - 1:
            yield Wait(team.ranks[team.me], team.channel - 1)
        else:
            yield team.wait(team.me + 1)
            yield from team.copy(team.me + 1, team.me, segment)
        if team.me > 0:
            yield team.signal(team.me - 1)
