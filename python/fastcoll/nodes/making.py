# SPDX-License-Identifier: Apache-2.0
"""A group over several nodes while it is made: a rank that fails or dies then is lost to all nodes.

Within a node the sockets report it (bootstrap/rendezvous.py); this file reports it to other nodes.
Decides which ranks must have arrived before a rank continues, and which ranks an error names. Must
not know how a carrier works.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import Store

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.tensors import Call
from fastcoll.errors import CollectiveTimeout, DriverError, FastcollError, PeerLostError
from fastcoll.nodes.carriers import make_lane
from fastcoll.nodes.carriers.carrier import Carrier, MakeCarrier
from fastcoll.nodes.carriers.given_up import give_up, let_go
from fastcoll.nodes.verdict.backoff import wait_until
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.store import PollingStore
from fastcoll.nodes.verdict.watch import GRACE_S
from fastcoll.text import error_in_words
from fastcoll.types import Verb


def decide_verdict(board: Board, seat: Seat, error: BaseException) -> BaseException:
    """Tell all nodes why a group can't be made; return the error that this rank raises.

    An error that is one rank's own is to the others the loss of that rank.
    """
    if isinstance(error, CollectiveTimeout | PeerLostError | DriverError):
        return board.decide_verdict(error)
    reason = f"rank {seat.rank} gave up: {error_in_words(error)}"
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
        PeerLostError: A rank died, or gave up, or a connection broke.
    """
    node, local_rank = seat.node_map.places[seat.rank]
    let_go()  # first: descriptors may be few
    making = _Making(own, seat, board, Deadline(limit_s), _Look(board, seat, node_group))
    try:
        making.report_arrival()
        lanes = [making.lane(make, lane) for lane in seat.node_map.lanes_of(node, local_rank)]
    except BaseException as error:
        raise decide_verdict(board, seat, error) from error
    try:
        # A rank that waits here notices a node's rank that dies in its lanes, and tells the nodes.
        node_group.issue(Call(verb=Verb.barrier))
    except BaseException as error:
        raise decide_node_verdict(board, seat, error) from error
    return lanes


@dataclass(frozen=True)
class _Making:
    """One rank while it makes its lanes."""

    own: Store  # the group's part of the store
    seat: Seat
    board: Board
    deadline: Deadline
    look: Callable[[], None]  # raises the error that ends a wait from elsewhere

    def report_arrival(self) -> None:
        try:
            ask(lambda: self.own.set(f"come/{self.seat.rank}", ""), self.deadline.left_s())
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveTimeout(
                f"init (rank {self.seat.rank}): the store failed, or did not answer within "
                f"{self.deadline.limit_s:g} s: {error}"
            ) from error

    def lane(self, make: MakeCarrier, lane: int) -> Carrier:
        """Make one lane. Collective over it."""
        node_map = self.seat.node_map
        node, _ = node_map.places[self.seat.rank]
        ranks = node_map.ranks_of(lane)
        store = PollingStore(
            self.own, f"lane{lane}", self.deadline, self.look, ranks, self.seat.rank
        )
        try:
            made = make_lane(make, store, node, node_map.num_nodes)
            self._greet(made, lane)
        except CollectiveTimeout as error:
            self.look()  # torch may have wrapped the error that ended the wait
            raise self._failed(lane, str(error)) from error
        return made

    def _greet(self, made: Carrier, lane: int) -> None:
        """Exchange a byte with each rank of a lane, so that all are known to have it.

        A rank that has its group may leave at once. Without this wait it would break the connection
        of a rank whose thread has yet to notice that it is connected.
        """
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        greeting = made.all_gather(nothing.new_empty(self.seat.node_map.num_nodes), nothing)

        has_said = False

        def check() -> None:
            nonlocal has_said
            if not has_said:
                self._announce_rank(lane)
            has_said = True
            self.look()

        try:
            if not wait_until(greeting.is_completed, check, self.deadline):
                raise RuntimeError(f"no answer within {self.deadline.limit_s:g} s")
            greeting.wait()
        except BaseException as error:
            give_up(made)
            if isinstance(error, RuntimeError) and not isinstance(error, FastcollError):
                raise CollectiveTimeout(f"init: a new connection between nodes: {error}") from error
            raise

    def _announce_rank(self, lane: int) -> None:
        """Write on the board that this rank tried to have the lane, and lives."""
        self.board.append(f"lane {lane}", str(self.seat.rank), Board.ANSWER_S)

    def _failed(self, lane: int, text: str) -> FastcollError:
        """Return the error of a lane that was not made; raise a better-informed rank's if it comes.

        It names the ranks that did not come. If all came, it names those of the lane that did not
        say that they live, or all others.
        """
        if broke := not self.deadline.passed():
            self._announce_rank(lane)
            wait_until(lambda: False, self.look, Deadline(GRACE_S))
        live = set(map(int, self.board.appended(f"lane {lane}", 0)))
        others = set(self.seat.node_map.ranks_of(lane)) - {self.seat.rank}
        missing = self._absent() or sorted(others - live or others)
        node_map = self.seat.node_map
        there = node_map.describe(sorted({node_map.places[rank][0] for rank in missing}))
        kind = PeerLostError if broke and live else CollectiveTimeout
        return kind(f"{text}: no answer from ranks {missing}, of {there}", missing)

    def _absent(self) -> list[int]:
        """Return the ranks that did not begin to make their lanes, as far as is known."""

        def look() -> list[int]:
            places = self.seat.node_map.places
            return [rank for rank in places if not self.own.check([f"come/{rank}"])]

        with contextlib.suppress(RuntimeError, TimeoutError):  # the store itself may be late
            return ask(look, Board.ANSWER_S)
        return []
