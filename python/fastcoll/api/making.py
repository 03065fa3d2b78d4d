# SPDX-License-Identifier: Apache-2.0
"""How a group is made: of the ranks of one node, or of several nodes.

Decides which kind it is, from the ranks' hosts. Must not know which group is the default one. The
modules for several nodes are imported by groups that need them: they take 30 ms.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastcoll import env
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import Exchange
from fastcoll.bootstrap.join import Peers, join
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.settings import Settings
from fastcoll.choose import tuning
from fastcoll.choose.tuning import Tuning
from fastcoll.errors import CollectiveTimeout, UsageError
from fastcoll.group.communicator import Communicator
from fastcoll.memory.region import create_region
from fastcoll.native import _C
from fastcoll.nodes.carriers import identity, maker_of
from fastcoll.text import open_standard_streams, say, say_once


def connect(
    exchange: Exchange,
    name: str,
    settings: Settings,
    members: Sequence[int] = (),
    parent: BaseGroup | None = None,
) -> BaseGroup | None:
    """Make a group of some ranks of `exchange`, by default all. Collective over all of them.

    A part of `parent` on one node chooses by the same tuning table; others look for one.

    Returns:
        The group; None on ranks that are not in it.

    Raises:
        UsageError: Versions, users, numerics or carriers differ between the ranks.
        DesyncError: The ranks gave different `members`.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died on the way, or gave up.
        DriverError: The operating system refused descriptors or memory.
    """
    _apply_environment(exchange)
    settings = replace(settings)  # this group's own, which `set_timeout` changes
    found = parent.planner.tuning if isinstance(parent, Communicator) else tuning.find()
    deadline = Deadline(settings.making_s)
    terms = settings.terms(identity(settings.carrier))

    on_failure = partial(_report_to_nodes, exchange)
    peers = join(exchange, terms, deadline, members, found.digest, on_failure=on_failure)
    if peers is None:
        return None
    agreed = tuning.agree(found, [hello.tuning for hello in peers.hellos])
    if agreed.is_refusal and exchange.rank == 0:
        say(f'"{name}" chooses by the model: {agreed.reason}')
    seat = peers.seat
    if seat is None:
        return _make(name, settings, peers, agreed, deadline)
    from fastcoll.nodes.group import HierarchicalCommunicator

    node, _ = seat.node_map.places[seat.rank]
    try:
        node_group = _make(f"{name}, node {node}", settings, peers, agreed, deadline)
    except BaseException as error:
        raise on_failure(seat, error) from error
    try:
        return HierarchicalCommunicator(name, settings, seat, node_group, exchange.store)
    except BaseException:
        node_group.close()
        raise


def _report_to_nodes(exchange: Exchange, seat: Seat, error: BaseException) -> BaseException:
    """Tell the other nodes why the group is not made; return the error that all ranks raise."""
    if exchange.store is None:  # which a group over several nodes has to have
        return error
    from fastcoll.nodes.making import decide_node_verdict
    from fastcoll.nodes.verdict.board import Board

    try:
        board = Board(exchange.store, seat.nonce)
    except CollectiveTimeout:  # the store does not answer: no peer can be told
        return error
    return decide_node_verdict(board, seat, error)


def _apply_environment(exchange: Exchange) -> None:
    """Apply the process-wide settings of the environment, and name its misspelt variables."""
    open_standard_streams()
    if level := env.SIMD.get():
        if level not in _C.simd_levels():
            levels = ", ".join(_C.simd_levels())
            raise UsageError(f"FASTCOLL_SIMD={level}: this machine's levels are {levels}")
        _C.set_simd_level(level)
    if exchange.rank == 0 or env.is_first_on_node():
        for line in env.misspelt():
            say_once(line)


def _make(
    name: str, settings: Settings, peers: Peers, tuned: Tuning, deadline: Deadline
) -> Communicator:
    """Make a group of ranks of one node that are connected. Collective over them."""
    mesh = peers.mesh

    def make_region() -> int:
        maker_of(settings.carrier)  # refused here, where the others hear why
        return create_region(mesh.world_size)

    try:
        region_fds = mesh.exchange_fds(make_region, 0, deadline)
    except BaseException:
        mesh.close()
        raise
    return Communicator(name, settings, peers, tuned, region_fds)


def member(group: BaseGroup | None) -> BaseGroup:
    """Return a group that was made of all ranks."""
    assert group is not None
    return group


# Both kinds make groups: a method of one may return the other.
BaseGroup.make = staticmethod(connect)
