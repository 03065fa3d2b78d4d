# SPDX-License-Identifier: Apache-2.0
"""Phases on trees: the binomial tree, and two binary trees that share the work.

The parent moves the data in both directions, so that its children come one after the other.
"""

from collections.abc import Iterator

from fastcoll_model.builders.team import Team
from fastcoll_model.schedule import Program, Signal, Wait


def _children(place: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (child, end of its subtree) in a binomial tree rooted at place 0, smallest first."""
    step = 1
    while not place & step and place + step < size:
        yield place + step, min(place + 2 * step, size)
        step *= 2


def _parent(place: int) -> int:
    return place & (place - 1)


def reduce(team: Team) -> Program:
    """Pass sums up a binomial tree to the root."""
    place = (team.me - team.root) % team.size
    for child, _ in _children(place, team.size):
        yield team.wait(team.root + child)
        yield from team.add([team.me, team.root + child], team.everything())
    if place:
        yield team.signal(team.root + _parent(place))


def broadcast(team: Team) -> Program:
    """Pass the message down a binomial tree, to the largest subtree first."""
    place = (team.me - team.root) % team.size
    if place:
        yield team.wait(team.root + _parent(place))
    for child, _ in reversed(list(_children(place, team.size))):
        yield from team.push(team.root + child, team.everything())
        yield team.signal(team.root + child)


def gather(team: Team) -> Program:
    """Pass chunks up a binomial tree to the root, each subtree's together."""
    place = (team.me - team.root) % team.size
    for child, end in _children(place, team.size):
        yield team.wait(team.root + child)
        yield from team.pull(team.root + child, range(team.root + child, team.root + end))
    if place:
        yield team.signal(team.root + _parent(place))


def scatter(team: Team) -> Program:
    """Pass chunks down a binomial tree, each subtree's together."""
    place = (team.me - team.root) % team.size
    if place:
        yield team.wait(team.root + _parent(place))
    for child, end in reversed(list(_children(place, team.size))):
        yield from team.push(team.root + child, range(team.root + child, team.root + end))
        yield team.signal(team.root + child)


def binary_parent(place: int, size: int) -> int:
    """Return the parent of 1..size in a binary tree whose in-order is 1..size; 0 above the top.

    The lowest set bit is the height: odd places are leaves.
    """
    bit = place & -place
    above = (place ^ bit) | (bit << 1)
    return above if above <= size else place ^ bit


def double_parent(place: int, size: int, tree: int) -> int:
    """Return the parent of a place 1..size - 1 in one of two trees; the root 0 is above both tops.

    The second tree is the first one mirrored, or shifted by one. A place with children in one tree
    is a leaf in the other (Sanders, Speck and Traff 2009).
    """
    others = size - 1
    if tree == 0:
        return binary_parent(place, others)
    if others % 2 == 0:
        above = binary_parent(others + 1 - place, others)
        return others + 1 - above if above else 0
    above = binary_parent(place % others + 1, others)
    return (above - 2) % others + 1 if above else 0


def _family(team: Team, tree: int) -> tuple[int, int, list[int]]:
    """Return my place, my parent and my children as members."""
    place = (team.me - team.root) % team.size
    children = [
        team.root + other
        for other in range(1, team.size)
        if double_parent(other, team.size, tree) == place
    ]
    above = double_parent(place, team.size, tree) if place else 0
    return place, team.root + above, children


def pipelined_reduce(team: Team, tree: int, *, then_broadcast: bool = False) -> Program:
    """Pass sums up one of the two trees, block by block.

    With `then_broadcast` the root hands each block to `pipelined_broadcast` in the next channel.
    """
    place, parent, children = _family(team, tree)
    for start, count in team.pieces(team.everything()):
        for block in range(start, start + count):
            for child in children:
                yield team.wait(child)
                yield from team.sum([team.me, child], (block, 1))
            if place:
                yield team.signal(parent)
            elif then_broadcast:
                yield Signal(team.ranks[team.me], team.channel + 1)


def pipelined_broadcast(team: Team, tree: int, *, after_reduce: bool = False) -> Program:
    """Pass the message down one of the two trees, block by block."""
    place, parent, children = _family(team, tree)
    for start, count in team.pieces(team.everything()):
        for block in range(start, start + count):
            if place:
                yield team.wait(parent)
            elif after_reduce:
                yield Wait(team.ranks[team.me], team.channel - 1)
            for child in children:
                yield from team.copy(team.me, child, (block, 1))
                yield team.signal(child)
