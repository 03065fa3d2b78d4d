# SPDX-License-Identifier: Apache-2.0
"""The survivors of a broken group over several nodes: one answer for all of them.

Within a node the ranks agree first (bootstrap/shrink.py). Then the nodes do, over the store. Each
node says which of its ranks are left, and the first list that reaches the store is the answer. So
there is one answer as long as the store lives; without it no rank goes on. Decides which nodes are
waited for, and how long. Must not know how the survivors are used.

Only the first of a node's survivors speaks for it. None of the others takes its place if it stops
there. By then the node's survivors are decided, with that rank among them, and so is the memory of
their next group. They would have to agree once more while the other nodes may count them in
already. So they raise an error, and the other nodes go on without them. If the node had named its
survivors before, the other nodes fail when they connect. That failure has a limit and a name, as
after any loss.
"""

import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from fastcoll.bootstrap.deadline import running_s
from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.tensors import Call
from fastcoll.errors import CollectiveTimeout, PeerLostError
from fastcoll.nodes.verdict.board import Board
from fastcoll.types import Verb

_PAUSE_S = 0.02
# For the store to answer, and for ranks on a busy machine to come.
_GRACE_S = 5.0
_NONCE_BYTES = 16


@dataclass(frozen=True)
class Survivors:
    """The ranks that go on."""

    ranks: list[int]  # in the group before, ascending: the new rank is the place in this list
    nonce: str  # a text that no other group has

    def node_map(self, before: NodeMap) -> NodeMap:
        new_ranks = {rank: number for number, rank in enumerate(self.ranks)}
        rows = [
            (tuple(new_ranks[rank] for rank in ranks if rank in new_ranks), host, name)
            for ranks, host, name in zip(before.nodes, before.hosts, before.ids, strict=True)
        ]
        return NodeMap(*zip(*sorted(row for row in rows if row[0]), strict=True))

    def seat(self, before: Seat) -> Seat:
        """Return the new place of the rank that had `before`."""
        new_ranks = {rank: number for number, rank in enumerate(self.ranks)}
        store_rank = None if before.store_rank is None else new_ranks.get(before.store_rank)
        node_map = self.node_map(before.node_map)
        return Seat(node_map, new_ranks[before.rank], self.nonce, store_rank)


def report_node(board: Board, node: int) -> None:
    """Publish that a node has ranks that want to go on, before these agree among themselves."""
    board.say(f"here/{node}", "yes", _GRACE_S)


def agree(
    board: Board,
    node_map: NodeMap,
    rank: int,
    node_group: BaseGroup,
    lost: Collection[int],
    limit_s: float,
) -> Survivors:
    """Return the ranks that go on. Collective over the ranks that are left.

    Args:
        board: The board of the group that broke.
        node_map: Its map.
        rank: This process's rank in it.
        node_group: The new group of those that are left on this node.
        lost: Ranks that an error named. A node of such a rank is waited for a moment only, unless
            a rank of it comes.
        limit_s: How long to wait for the other nodes.

    Raises:
        PeerLostError: The other nodes went on without this one.
        CollectiveTimeout: The store does not answer.
    """
    left = [row[0] for row in node_group.gather_words([rank])]
    node, _ = node_map.places[rank]
    told = torch.zeros(len(node_map.places) + _NONCE_BYTES, dtype=torch.uint8, device="cpu")
    if rank == left[0]:
        try:
            found = _Nodes(board, node_map, lost, limit_s).decide(node, left)
        except BaseException as error:
            node_group.abort(str(error))
            raise
        told[found.ranks] = 1
        nonce = bytearray(bytes.fromhex(found.nonce))
        told[-_NONCE_BYTES:] = torch.frombuffer(nonce, dtype=torch.uint8)
    wait_s = 2 * limit_s + 4 * _GRACE_S  # the leader's, and more
    node_group.issue(Call(verb=Verb.broadcast, input=told, output=told, timeout_s=wait_s))
    ranks = told[:-_NONCE_BYTES].nonzero().flatten().tolist()
    if rank not in ranks:
        raise PeerLostError(
            f"ranks {ranks} went on without node {node} ({node_map.hosts[node]}), whose ranks did "
            "not come to shrink() in time. This process has no group any more: end it, or make a "
            "new group with fastcoll.init()",
            left,
        )
    return Survivors(ranks, told[-_NONCE_BYTES:].numpy().tobytes().hex())


class _Nodes:
    """The nodes, as one leader has seen them so far."""

    def __init__(
        self, board: Board, node_map: NodeMap, lost: Collection[int], limit_s: float
    ) -> None:
        self._board = board
        self._limit_s = limit_s
        self._suspected = {node_map.places[rank][0] for rank in lost}
        self._missing = set(range(node_map.num_nodes))
        self._ranks: list[int] = []
        self._began_s = running_s()

    def decide(self, node: int, left: list[int]) -> Survivors:
        """Publish the ranks that are left on this node; return all ranks that go on."""
        self._board.say(f"left/{node}", json.dumps(left), _GRACE_S)
        while True:
            decision = self._read("survivors")
            if not decision and not self._waits():
                nonce = secrets.token_hex(_NONCE_BYTES)
                mine = json.dumps({"ranks": sorted(self._ranks), "nonce": nonce})
                decision = self._board.write_first("survivors", mine, _GRACE_S) or ""
            if decision:
                fields = json.loads(decision)
                return Survivors(fields["ranks"], fields["nonce"])
            time.sleep(_PAUSE_S)

    def _waits(self) -> bool:
        """Note the nodes that have come; return whether there is one to wait for."""
        for node in sorted(self._missing):
            if left := self._read(f"left/{node}"):
                self._ranks += json.loads(left)
                self._missing.remove(node)
        waited_s = running_s() - self._began_s
        return any(waited_s < self._limit_of_node_s(node) for node in self._missing)

    def _limit_of_node_s(self, node: int) -> float:
        if self._read(f"here/{node}"):  # its ranks may have to wait for one of their own first
            return 2 * self._limit_s + _GRACE_S
        return min(self._limit_s, _GRACE_S) if node in self._suspected else self._limit_s

    def _read(self, key: str) -> str:
        text = self._board.read(key, _GRACE_S)
        if text is None:
            raise CollectiveTimeout(
                "shrink(): the store of the group does not answer, over which its nodes agree. "
                "Call fastcoll.destroy(), then init() on a store that lives"
            )
        return text
