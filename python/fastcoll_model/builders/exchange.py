# SPDX-License-Identifier: Apache-2.0
"""all_to_all in its forms, and pairwise exchange for reduce_scatter.

An all_to_all's scratch holds my input: chunk j is for member j. Results go straight to
the output.
"""

from fastcoll_model.builders.team import Team
from fastcoll_model.schedule import Copy, Program, Signal, Span, Wait


def _take(team: Team, source: int, where: int, width: int) -> Program:
    """Copy a chunk-wide run of the source's scratch to where the source's part goes."""
    source %= team.size
    output = Span(team.ranks[team.me], "output", source * width, width)
    yield Copy(output, Span(team.ranks[source], "scratch", where, width))


def _width(team: Team) -> int:
    [(_, width)] = team.chunks[0]
    return width


def direct_all_to_all(team: Team) -> Program:
    """Take my chunk from every member; each member starts at another one."""
    width = _width(team)
    yield from team.meet()
    for member in range(team.me, team.me + team.size):
        yield from _take(team, member, team.me * width, width)


def pairwise_all_to_all(team: Team) -> Program:
    """Take from the member k ahead in round k of n - 1."""
    width = _width(team)
    yield from _take(team, team.me, team.me * width, width)
    for step in range(1, team.size):
        yield team.signal(team.me - step)
        yield team.wait(team.me + step)
        yield from _take(team, team.me + step, team.me * width, width)


def pairwise_reduce_scatter(team: Team) -> Program:
    """Add the part of the member k ahead in round k of n - 1 (Thakur et al. 2005, 4.3)."""
    for step in range(1, team.size):
        yield team.signal(team.me - step)
        yield team.wait(team.me + step)
        yield from team.add([team.me, team.me + step], [team.me])


def bruck_all_to_all(team: Team) -> Program:
    """Move, in the round of bit b, all chunks whose way has that bit 2^b ahead; log2(n) rounds.

    The way of a chunk is how far ahead of its first owner the one is that it is meant for. A round
    writes to scratch of its own, as that of the round before may still be read (Bruck et al. 1997).
    """
    size, me, width = team.size, team.me, _width(team)

    def at(member: int, way: int, level: int) -> Span:
        """Return where a member has its chunk of a way, before the round `level`."""
        done = way & ((1 << level) - 1)
        block = (done.bit_length() * size + way) * width
        if not done:
            block = (member + way) % size * width
        return Span(team.ranks[member], "scratch", block, width)

    for level in range((size - 1).bit_length()):
        step = 1 << level
        behind = (me - step) % size
        yield team.signal(me + step)
        yield team.wait(behind)
        for way in range(size):
            if way & step:
                yield Copy(at(me, way, level + 1), at(behind, way, level))
    for way in range(size):
        result = Span(team.ranks[me], "output", (me - way) % size * width, width)
        yield Copy(result, at(me, way, size.bit_length()))


def _meet(others: list[int]) -> Program:
    yield from (Signal(other) for other in others)
    yield from (Wait(other) for other in others)


def hierarchical_all_to_all(rank: int, num_nodes: int, local_size: int, width: int) -> Program:
    """Collect the node's chunks for ranks of my place, then exchange with those ranks.

    So a node sends one message to each other node and rank, not local_size ones.
    """
    node, local = divmod(rank, local_size)
    size = num_nodes * local_size
    mates = [node * local_size + (local + k) % local_size for k in range(1, local_size)]
    twins = [(node + k) % num_nodes * local_size + local for k in range(1, num_nodes)]

    def collected(owner: int, to_node: int, from_local: int) -> Span:
        return Span(owner, "scratch", (size + to_node * local_size + from_local) * width, width)

    yield from _meet(mates)
    for mate in [rank, *mates]:
        for to_node in range(num_nodes):
            block = (to_node * local_size + local) * width
            source = Span(mate, "scratch", block, width)
            yield Copy(collected(rank, to_node, mate % local_size), source)
    yield from _meet(twins)
    for twin in [rank, *twins]:
        output = Span(rank, "output", twin // local_size * local_size * width, local_size * width)
        yield Copy(output, collected(twin, node, 0)._replace(num_blocks=local_size * width))
