# SPDX-License-Identifier: Apache-2.0
"""One step: a rank reads the data it needs from its owner. In multimem the switch does that."""

from fastcoll_model.builders.team import Team
from fastcoll_model.schedule import EVERY, Copy, Program, Reduce, Signal, Span, Wait


def reduce_scatter(team: Team) -> Program:
    """Add each member's chunk over all members, in their order."""
    yield from team.meet()
    yield from team.add(range(team.size), [team.me])


def all_gather(team: Team) -> Program:
    """Take every chunk from its owner; each member starts at another one."""
    yield from team.meet()
    for member in range(team.me + 1, team.me + team.size):
        yield from team.pull(member, [member])


def broadcast(team: Team) -> Program:
    """Take the message from the root."""
    if team.me == team.root:
        yield from (team.signal(team.me + k) for k in range(1, team.size))
    else:
        yield team.wait(team.root)
        yield from team.pull(team.root, team.everything())


def scatter(team: Team) -> Program:
    """Take each member's chunk from the root."""
    if team.me == team.root:
        yield from (team.signal(team.me + k) for k in range(1, team.size))
    else:
        yield team.wait(team.root)
        yield from team.pull(team.root, [team.me])


def reduce(team: Team) -> Program:
    """Add the messages of all members at the root, in the order of the members."""
    if team.me != team.root:
        yield team.signal(team.root)
        return
    yield from (team.wait(team.me + k) for k in range(1, team.size))
    yield from team.add(range(team.size), team.everything())


def gather(team: Team) -> Program:
    """Take every chunk from its owner to the root."""
    if team.me != team.root:
        yield team.signal(team.root)
        return
    for member in range(team.me + 1, team.me + team.size):
        yield team.wait(member)
        yield from team.pull(member, [member])


def one_shot_all_reduce(team: Team) -> Program:
    """Add the messages of all members, straight into each member's output."""
    rank = team.ranks[team.me]
    yield from team.meet()
    for piece in team.pieces(team.everything()):
        terms = tuple(team.span(member, piece) for member in range(team.size))
        yield Reduce(Span(rank, "output", *piece), terms)


def multimem_reduce(team: Team, *, then_gather: bool = False) -> Program:
    """Load each member's chunk, block by block, added up by the switch.

    With `then_gather` each block is handed to `multimem_gather` in the next channel.
    """
    yield from team.meet()
    for start, count in team.pieces([team.me]):
        for block in range(start, start + count):
            mine = team.span(team.me, (block, 1))
            yield Reduce(mine, (mine._replace(rank=EVERY),))
            if then_gather:
                yield Signal(team.ranks[team.me], team.channel + 1)


def multimem_gather(team: Team, *, after_reduce: bool = False) -> Program:
    """Store each member's chunk, block by block, to all members through the switch."""
    for start, count in team.pieces([team.me]):
        for block in range(start, start + count):
            if after_reduce:
                yield Wait(team.ranks[team.me], team.channel - 1)
            mine = team.span(team.me, (block, 1))
            yield Copy(mine._replace(rank=EVERY), mine)
    yield from team.meet()


def multimem_broadcast(team: Team) -> Program:
    """Store the root's message to all members through the switch."""
    if team.me != team.root:
        yield team.wait(team.root)
        return
    for piece in team.pieces(team.everything()):
        mine = team.span(team.me, piece)
        yield Copy(mine._replace(rank=EVERY), mine)
    yield from (team.signal(team.me + k) for k in range(1, team.size))


def multimem_to_root(team: Team) -> Program:
    """Load the message to the root, added up by the switch."""
    if team.me != team.root:
        yield team.signal(team.root)
        return
    yield from (team.wait(team.me + k) for k in range(1, team.size))
    for piece in team.pieces(team.everything()):
        mine = team.span(team.me, piece)
        yield Reduce(mine, (mine._replace(rank=EVERY),))
