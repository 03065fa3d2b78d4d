# SPDX-License-Identifier: Apache-2.0
"""Symbolic contents of a block: the contributions added up, and their order."""

from collections.abc import Iterator
from typing import NamedTuple

from fastcoll_model.schedule import Contribution


class Sum(NamedTuple):
    """The parts added from left to right; `in_switch`: in an order that the switch chooses."""

    parts: tuple["Value", ...]
    in_switch: bool = False


Value = Contribution | Sum


def contributions(value: Value) -> Iterator[Contribution]:
    """Yield everything that was added up, as often as it was."""
    if isinstance(value, Contribution):
        yield value
        return
    for part in value.parts:
        yield from contributions(part)


def order(value: Value) -> str:
    """Return the order of summation: "0 + 1 + 2", "(0 + 1) + (2 + 3)", "{0, 1, 2}" in a switch."""
    if isinstance(value, Contribution):
        return str(value.rank)
    if value.in_switch:
        return "{" + ", ".join(order(part) for part in value.parts) + "}"
    first, *others = value.parts
    # Additions from left to right need no brackets around the first ones.
    texts = [
        order(first),
        *(f"({order(o)})" if isinstance(o, Sum) and not o.in_switch else order(o) for o in others),
    ]
    return " + ".join(texts)


def in_rank_order(value: Value) -> bool:
    """Return whether the ranks were added one by one, 0 first."""
    ranks: list[int] = []
    while isinstance(value, Sum):
        if value.in_switch or not all(isinstance(p, Contribution) for p in value.parts[1:]):
            return False
        ranks += [p.rank for p in reversed(value.parts[1:]) if isinstance(p, Contribution)]
        value = value.parts[0]
    ranks.append(value.rank)
    return ranks == sorted(ranks, reverse=True)


def node_by_node(num_nodes: int, local_size: int) -> str:
    """Return the order "0 + 1 + (2 + 3) + (4 + 5)": within nodes, then over them."""
    firsts = range(0, num_nodes * local_size, local_size)
    sums = [" + ".join(map(str, range(first, first + local_size))) for first in firsts]
    return " + ".join([sums[0], *(f"({s})" if local_size > 1 else s for s in sums[1:])])
