# SPDX-License-Identifier: Apache-2.0
"""A group over several nodes while it is made: a rank that fails or dies then is lost to all nodes.

Within a node the sockets report it (bootstrap/rendezvous.py); this file reports it to other nodes.
Decides which ranks must have arrived before a rank continues, and which ranks an error names. Must
not know how a carrier works.
"""

import contextlib

from torch.distributed import Store

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.tensors import Call
from fastcoll.errors import CollectiveTimeout, DriverError, PeerLostError
from fastcoll.nodes.carriers import make_lane
from fastcoll.nodes.carriers.carrier import Carrier, MakeCarrier
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.store import PollingStore
from fastcoll.types import Verb


def decide_verdict(board: Board, seat: Seat, error: BaseException) -> BaseException:
    """Tell all nodes why a group can't be made; return the error that this rank raises.

    An error that is one rank's own is to the others the loss of that rank.
    """
    if isinstance(error, CollectiveTimeout | PeerLostError | DriverError):
        return board.decide_verdict(error)
    reason = f"rank {seat.rank} gave up: {type(error).__name__}: {error}"
    board.decide_verdict(PeerLostError(reason, [seat.rank]))
    return error


def decide_node_verdict(board: Board, seat: Seat, error: BaseException) -> BaseException:
    """Do the same with an error that counts the ranks as this node does."""
    node, _ = seat.node_map.places[seat.rank]
    if isinstance(error, CollectiveTimeout | PeerLostError):
        ranks = [seat.node_map.nodes[node][one] for one in error.ranks]
        names = f", whose ranks {list(error.ranks)} are ranks {ranks} of the group"
        error = type(error)(f"rank {seat.rank} on node {node}{names}: {error}", ranks)
    elif isinstance(error, DriverError):
        error = DriverError(f"rank {seat.rank} on node {node}: {error}")
    return decide_verdict(board, seat, error)


class _Look:
    """How a rank's wait for its lanes ends: a verdict, or the end of a rank of its node."""

    def __init__(self, board: Board, seat: Seat, node_group: BaseGroup) -> None:
        self._board = board
        self._node_group = node_group
        node, mine = seat.node_map.places[seat.rank]
        ranks = seat.node_map.nodes[node]
        self._mates = [(local, rank) for local, rank in enumerate(ranks) if local != mine]

    def __call__(self) -> None:
        """Raise it."""
        if verdict := self._board.verdict():
            raise verdict
        if gone := [rank for local, rank in self._mates if self._node_group.peer_is_gone(local)]:
            raise PeerLostError(f"init: ranks {gone} ended while their group was made", gone)


def make_lanes(
    make: MakeCarrier, own: Store, seat: Seat, node_group: BaseGroup, board: Board, limit_s: float
) -> list[Carrier]:
    """Make a rank's lanes, and wait until all of its node have theirs. Collective.

    Raises:
        CollectiveTimeout: A rank did not come.
        PeerLostError: A rank died, or gave up.
    """
    node_map = seat.node_map
    node, local_rank = node_map.places[seat.rank]
    look = _Look(board, seat, node_group)
    deadline = Deadline(limit_s)
    try:
        _report_arrival(own, seat, deadline)
        lanes = []
        for lane in node_map.lanes_of(node, local_rank):
            store = PollingStore(own, f"lane{lane}", deadline, look, node_map.ranks_of(lane))
            try:
                lanes.append(make_lane(make, store, node, node_map.num_nodes))
            except CollectiveTimeout as error:
                look()  # torch may have wrapped the error that ended the wait
                raise _late(own, seat, lane, error) from error
    except BaseException as error:
        raise decide_verdict(board, seat, error) from error
    try:
        # A rank that waits here notices a node's rank that dies in its lanes, and tells the nodes.
        node_group.issue(Call(verb=Verb.barrier))
    except BaseException as error:
        raise decide_node_verdict(board, seat, error) from error
    return lanes


def _report_arrival(own: Store, seat: Seat, deadline: Deadline) -> None:
    try:
        ask(lambda: own.set(f"come/{seat.rank}", ""), deadline.left_s())
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveTimeout(
            f"init (rank {seat.rank}): the store failed, or did not answer within "
            f"{deadline.limit_s:g} s: {error}"
        ) from error


def _late(own: Store, seat: Seat, lane: int, error: CollectiveTimeout) -> CollectiveTimeout:
    """Return an error that names the missing ranks; if all began to, the others of the lane."""
    places = seat.node_map.places
    missing: list[int] = []
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store itself may be late

        def look() -> list[int]:
            return [rank for rank in places if not own.check([f"come/{rank}"])]

        missing = ask(look, Board.ANSWER_S)
    if not missing:
        missing = [rank for rank in seat.node_map.ranks_of(lane) if rank != seat.rank]
    there = seat.node_map.describe(sorted({places[rank][0] for rank in missing}))
    return CollectiveTimeout(f"{error}: no answer from ranks {missing}, of {there}", missing)
