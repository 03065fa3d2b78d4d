# SPDX-License-Identifier: Apache-2.0
"""From an exchange to connected ranks: describe, compare, connect.

Decides the order of the steps; the same for the first group and for a part of one. Must not know
how a group uses its connections.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import Exchange
from fastcoll.bootstrap.identity import (
    Hello,
    Terms,
    describe_rank,
    map_nodes,
    meet,
    refusal_to_join,
    require_same_nodes,
    why_apart,
)
from fastcoll.bootstrap.mesh import Mesh
from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.bootstrap.os_errors import REFUSALS, as_driver_error
from fastcoll.bootstrap.rendezvous import Listener, SideChannel
from fastcoll.errors import DesyncError, UsageError
from fastcoll.text import say_once


@dataclass(frozen=True)
class Peers:
    """The ranks of a group to be, connected within each node."""

    mesh: Mesh  # the connections to the ranks of this node
    hellos: Sequence[Hello]  # the introduction of each of these, in the order of the mesh
    # This process's place in the new group; None: all its ranks are on this node.
    seat: Seat | None = None


def checked_members(ranks: Sequence[int] | None, world_size: int) -> list[int]:
    """Return the ranks of a group's part in ascending order; None means all of them.

    Raises:
        UsageError: There are none, or not all are ranks of the group, or one stands twice.
    """
    try:
        members = sorted(range(world_size) if ranks is None else map(operator.index, ranks))
    except TypeError:
        raise UsageError(f"ranks must be a sequence of integers, not {ranks!r}") from None
    if not members or not set(members) <= set(range(world_size)):
        raise UsageError(f"ranks {members} are not ranks of a group of {world_size}")
    if len(set(members)) < len(members):
        raise UsageError(f"ranks {members} name a rank twice")
    return members


@as_driver_error("making a group")
def join(
    exchange: Exchange,
    terms: Terms,
    deadline: Deadline,
    members: Sequence[int] = (),
    tuning: str = "",
    *,
    on_failure: Callable[[Seat, BaseException], BaseException],
) -> Peers | None:
    """Connect some ranks of an exchange, node by node. Collective over all its ranks.

    Args:
        exchange: How the ranks reach each other so far.
        terms: The terms that all ranks must share.
        deadline: When to give up.
        members: The ranks to connect, in their new order; none means all.
        tuning: Digest of this rank's tuning table, for the others to compare.
        on_failure: Told of a failure on this node of several; returns the error to raise.

    Returns:
        The connected ranks, or None where this rank is not one of them.

    Raises:
        UsageError: Versions, users, numerics or carriers differ between the ranks, or their nodes
            are others than in the group that they are of.
        DesyncError: The ranks gave different `members`.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died on the way.
        DriverError: The operating system refused a rank a descriptor or memory.
    """
    with ExitStack() as at_end:
        try:
            listener = at_end.enter_context(closing(Listener()))
            hello = describe_rank(
                listener.address, listener.token, terms, members, tuning, exchange.serves_store
            )
        except REFUSALS as error:
            exchange.gather(refusal_to_join(error), deadline)  # the others wait for an introduction
            raise
        hellos = meet(exchange.gather(hello.to_dict(), deadline))
        ranks = list(members) or list(range(exchange.world_size))
        node_map = _map_ranks(exchange, hellos, ranks)
        if exchange.rank not in ranks:
            return None
        rank = ranks.index(exchange.rank)
        node, local_rank = node_map.places[rank]
        there = [ranks[peer] for peer in node_map.nodes[node]]
        here = [hellos[peer] for peer in there]
        seat = None
        if node_map.num_nodes > 1:
            serves = [number for number, one in enumerate(ranks) if hellos[one].serves_store]
            seat = Seat(node_map, rank, hellos[ranks[0]].token, serves[0] if serves else None)
        try:
            mesh = listener.connect(local_rank, here, deadline, _ExchangeChannel(exchange, there))
        except BaseException as error:
            if seat is None:
                raise
            raise on_failure(seat, error) from error
        return Peers(mesh, here, seat)


class _ExchangeChannel(SideChannel):
    """An exchange, for the ranks of one node."""

    def __init__(self, exchange: Exchange, ranks: Sequence[int]) -> None:
        self._exchange = exchange
        self._ranks = ranks  # at the exchange

    def is_gone(self, peer: int) -> bool:
        return self._exchange.is_gone(self._ranks[peer])

    def leave_farewell(self, farewell: bytes, deadline: Deadline) -> None:
        self._exchange.leave_farewell(farewell, deadline)

    def farewell_from(self, peer: int, deadline: Deadline) -> bytes:
        return self._exchange.farewell_from(self._ranks[peer], deadline)


def _map_ranks(exchange: Exchange, hellos: Sequence[Hello], ranks: Sequence[int]) -> NodeMap:
    """Return which of the ranks to connect share memory; raises as `join`, on every rank alike."""
    if any(other.ranks != hellos[0].ranks for other in hellos):
        sides = "; ".join(f"rank {rank}: {other.ranks}" for rank, other in enumerate(hellos))
        raise DesyncError(f"new_group() needs the same ranks on every rank, got {sides}")
    chosen = [hellos[rank] for rank in ranks]
    if exchange.node_map is not None:
        require_same_nodes(chosen, ranks, exchange.node_map)
    elif exchange.rank == 0 and (apart := why_apart(chosen)):
        say_once(apart)
    return map_nodes(chosen)
