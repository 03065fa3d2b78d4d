# SPDX-License-Identifier: Apache-2.0
"""The phases that calls are made of: within the node, and across nodes in lanes.

Decides how data is laid out between phases, and how segments overlap. A lane buffer has a place for
the data of each lane: [local rank][slot]. Lane l belongs to local rank l % n in slot l // n. Must
not know verbs.

There is no flat plan beside the hierarchical one. A rank alone on its node skips the steps within
the node. The rest is an exchange over all ranks, as in a flat plan. Where several ranks share a
node, a flat plan would save a trip through shared memory, and send more over the link. That trip is
cheaper than a link. A network as quick as memory was not measured.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.tensors import Call
from fastcoll.errors import FastcollError
from fastcoll.nodes.arrays import as_bytes, copy, split
from fastcoll.nodes.carriers.carrier import Carrier, Started
from fastcoll.nodes.carriers.given_up import give_up, let_go
from fastcoll.nodes.verdict.watch import SPEAKING_S
from fastcoll.types import REDUCE_OPS, Op, Verb

# A piece of a call: it yields the transfers it waits for, the same number of times on every rank.
Segment = Generator[Sequence[Started], None, None]

# Of a message, over all lanes. Enough for a link of 1 Gbit/s and 4 ms of round trip, with as many
# segments on their way as there are at once.
SEGMENT_BYTES = 4 << 20
_NUM_AT_ONCE = 4
# A node's group waits this long beyond the limit for the rank that waits for other nodes. That rank
# gives the error. It may have entered the call later, and be slow.
_NODE_SLACK_S = SPEAKING_S + 3.0


@dataclass(frozen=True)
class Buffers:
    """Where the data of lanes lies, and how much of a message goes through them at once."""

    device: torch.device
    segment_bytes: int


class Waits(Protocol):
    """Waits for other nodes: `Watch` on CPUs, `CallsInFlight` in the stream of a GPU."""

    def wait(
        self, transfers: Sequence[Started], deadline: Deadline, behind: Iterable[Started] = ()
    ) -> None:
        """Wait for transfers to be over; `behind` are others under way, which may fail first."""

    def of_node(self, error: FastcollError) -> FastcollError:
        """Return an error of this node's ranks with their numbers in the whole group."""


class Lanes:
    """This rank's part in the phases of one call after another."""

    def __init__(
        self,
        node_map: NodeMap,
        rank: int,
        node_group: BaseGroup,
        carriers: Sequence[Carrier],
        watch: Waits,
        buffers: Buffers | None = None,
    ) -> None:
        self.node_map = node_map
        self.rank = rank
        self.node, self.local_rank = node_map.places[rank]
        self.num_nodes = node_map.num_nodes
        self.num_local = len(node_map.nodes[self.node])
        self.num_lanes = node_map.num_lanes
        self.num_slots = node_map.slots(self.node)
        buffers = buffers or Buffers(torch.device("cpu"), SEGMENT_BYTES)
        self.segment_bytes = buffers.segment_bytes
        self.is_leader = self.local_rank == 0
        self._node_group = node_group
        self._carriers = carriers
        self._watch = watch
        self._nothing = torch.empty(0, dtype=torch.uint8, device=buffers.device)
        self._deadline = Deadline(0)

    def begin(self, limit_s: float) -> None:
        """Start a call: all its phases together have one limit."""
        self._deadline = Deadline(limit_s)

    # ---- within the node -----------------------------------------------------------------------

    def _on_node(
        self,
        kind: type[Call] | type[PartsCall],
        verb: Verb,
        input: Any,
        output: Any,
        **options: Any,
    ) -> None:
        """Make a call of the node; by default its limit is the one of the call around it."""
        if self.num_local == 1:
            raise AssertionError("a rank alone on its node has no node to call")
        options.setdefault("timeout_s", self._limit_s)
        try:
            self._node_group.issue(kind(verb=verb, input=input, output=output, **options))
        except FastcollError as error:
            raise self._watch.of_node(error) from error

    @property
    def _limit_s(self) -> float:
        return self._deadline.left_s() + _NODE_SLACK_S

    def node_reduce_scatter(self, buffer: torch.Tensor, op: Op, numerics: str) -> torch.Tensor:
        """Reduce a lane buffer over the node; return this rank's lanes."""
        if self.num_local == 1:
            return buffer
        mine = buffer.new_empty(buffer.numel() // self.num_local)
        how = {"op": REDUCE_OPS[op], "numerics": numerics}
        self._on_node(Call, Verb.reduce_scatter, buffer, mine, **how)
        return mine

    def node_reduce(self, tensor: torch.Tensor, op: Op, numerics: str) -> torch.Tensor:
        """Reduce a tensor over the node; return the result on the leader."""
        if self.num_local > 1:
            target = tensor if self.is_leader else None
            how = {"op": REDUCE_OPS[op], "numerics": numerics}
            self._on_node(Call, Verb.reduce, tensor, target, **how)
        return tensor

    def node_all_gather(
        self, mine: torch.Tensor, out: torch.Tensor | None = None, limit_s: float | None = None
    ) -> torch.Tensor:
        """Put this rank's lanes and its neighbours' together, into `out` if there is one."""
        if self.num_local == 1 and out is None:
            return mine
        out = mine.new_empty(mine.numel() * self.num_local) if out is None else out
        if self.num_local == 1:
            copy(out, mine)
            return out
        limit_s = self._limit_s if limit_s is None else limit_s
        self._on_node(Call, Verb.all_gather, mine, out, timeout_s=limit_s)
        return out

    def node_broadcast(self, tensor: torch.Tensor, local_root: int) -> None:
        """Copy a local rank's tensor to all others of the node."""
        if self.num_local > 1:
            self._on_node(Call, Verb.broadcast, tensor, tensor, root=local_root)

    def node_gather(self, mine: torch.Tensor, local_root: int) -> torch.Tensor | None:
        """Put the lanes of all local ranks together on one of them."""
        if self.num_local == 1:
            return mine
        rows = None
        if self.local_rank == local_root:
            rows = mine.new_empty(self.num_local, mine.numel())
        parts = None if rows is None else list(rows)
        self._on_node(PartsCall, Verb.gather, mine, parts, root=local_root)
        return rows

    def node_scatter(
        self, buffer: torch.Tensor | None, mine: torch.Tensor, local_root: int
    ) -> None:
        """Hand out a lane buffer of one local rank."""
        if self.num_local == 1 and buffer is not None:
            mine.copy_(buffer.view(-1))
            return
        parts = None if buffer is None else list(buffer.view(self.num_local, -1))
        self._on_node(PartsCall, Verb.scatter, parts, mine, root=local_root)

    def node_all_to_all(
        self, source: torch.Tensor, given: Sequence[int], expected: Sequence[int]
    ) -> torch.Tensor:
        """Give each local rank its elements of `source`; return this rank's from all of them."""
        if self.num_local == 1:
            return source
        target = source.new_empty(sum(expected))
        splits = {"input_splits": given, "output_splits": expected}
        self._on_node(PartsCall, Verb.all_to_all, source, target, **splits)
        return target

    # ---- across nodes ----------------------------------------------------------------------------

    def lanes(self) -> list[tuple[int, int]]:
        """Return slot and lane of every lane that this rank serves."""
        return list(enumerate(self.node_map.lanes_of(self.node, self.local_rank)))

    def exchange(
        self, slot: int, given: Sequence[torch.Tensor | None], expected: Sequence[int]
    ) -> tuple[list[torch.Tensor], Started]:
        """Start to give each node of a lane a tensor, and to get bytes from each.

        Args:
            slot: Which of this rank's lanes.
            given: The tensor for each node, all of one type; None: nothing.
            expected: How many bytes come from each node; nothing goes from this node to itself.

        Returns:
            Where the bytes of each node will lie, and the transfer.
        """
        outgoing = [None if one is None else as_bytes(one) for one in given]
        sizes = [0 if one is None else one.numel() for one in outgoing]
        tensors = [one for one in outgoing if one is not None and one.numel() > 0]
        source = tensors[0] if len(tensors) == 1 else torch.cat([self._nothing, *tensors])
        target = self._nothing.new_empty(sum(expected))
        transfer = self._carriers[slot].all_to_all(target, source, expected, sizes)
        return split(target, expected), transfer

    @property
    def accepts_short(self) -> bool:
        return self._carriers[0].accepts_short

    def carrier(self, slot: int) -> Carrier:
        """Return the carrier of one of this rank's lanes."""
        return self._carriers[slot]

    def has_lost(self, rank: int) -> bool:
        """Return whether a rank of another node is known to be gone: one that shares a lane."""
        node, _ = self.node_map.places[rank]
        return any(
            self.node_map.ranks_of(lane)[node] == rank and self._carriers[slot].has_lost(node)
            for slot, lane in self.lanes()
        )

    def abandon(self) -> None:
        """Keep the lanes for ever, in a forked child."""
        for carrier in self._carriers:
            carrier.abandon()

    def give_up(self, *memory: object) -> None:
        """Give up transfers that may never end, and use this memory."""
        for carrier in self._carriers:
            give_up(carrier, *memory)

    def close(self, *, is_broken: bool, is_in_use: bool) -> None:
        """Leave the lanes of a group; `is_in_use`: a call of another thread has still to end."""
        if is_broken:
            self.give_up()
        else:
            for carrier in self._carriers:
                carrier.close()
        if not is_in_use:
            self._carriers = ()  # a carrier's threads and connections go with its last reference
        let_go()

    def by_lane(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        places = buffer.view(self.num_local, self.num_slots, -1)
        n = self.num_local
        return [places[lane % n, lane // n] for lane in range(self.num_lanes)]

    def by_rank(self, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each rank and its place in a lane buffer that has one for every rank."""
        for lane, place in enumerate(self.by_lane(buffer)):
            rows = place.view(self.num_nodes, -1)
            for rank, row in zip(self.node_map.owners_of(lane), rows, strict=True):
                if rank is not None:
                    yield rank, row

    @property
    def in_order(self) -> bool:
        """Whether a lane buffer has the lanes one after another."""
        return self.num_slots == 1 or self.num_local == 1

    def wait(self, transfers: Sequence[Started], behind: Iterable[Started] = ()) -> None:
        """Wait for transfers, for as long as the call may take; see `Waits`."""
        self._watch.wait(transfers, self._deadline, behind)

    def drive(self, segments: Iterable[Segment]) -> None:
        """Carry out segments, some at once, in the same order on every rank of the node."""
        active: deque[tuple[Segment, Sequence[Started]]] = deque()

        def advance() -> None:
            segment, transfers = active.popleft()
            self.wait(transfers, [one for _, later in active for one in later])
            following = next(segment, None)
            if following is not None:
                active.append((segment, following))

        for segment in segments:
            while len(active) >= _NUM_AT_ONCE:
                advance()
            active.append((segment, next(segment)))
        while active:
            advance()


def cuts(total: int, step: int) -> Iterable[tuple[int, int]]:
    """Cut a range into pieces of at most `step`; an empty range is one empty piece."""
    return ((first, min(first + step, total)) for first in range(0, max(total, 1), max(step, 1)))
