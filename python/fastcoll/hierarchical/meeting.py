# SPDX-License-Identifier: Apache-2.0
"""How a call begins: all ranks say what they call, and small messages are delivered on the way.

Decides the packet, which has one size whatever the call, since carriers do not survive messages of
different sizes: Gloo ends the process. So nothing else crosses before all nodes have agreed, and a
call of up to a packet is over after one trip. Every rank's bytes travel in it, and each rank works
out its result for itself.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastcoll.errors import DesyncError
from fastcoll.hierarchical.arrays import finish, partial_dtype, reduce_into, widen
from fastcoll.hierarchical.lanes import Lanes
from fastcoll.types import COUNTED, ITEMSIZE, REDUCTIONS, TORCH_DTYPES, DType, Op, Verb

_WORDS = struct.Struct("=QQQiBBBB")
_HEAD_BYTES = 64
PACKET_BYTES = 4096
# All packets together, which a rank gets from its leader.
_MOST_BYTES = 64 << 10
_ROOTED = (Verb.broadcast, Verb.gather, Verb.scatter, Verb.reduce)


@dataclass(frozen=True)
class Asked:
    """What must be equal on all ranks of a call; fields as in `fastcoll.types.Request`.

    Attributes:
        sequence: Number of the call in its group.
        by_carrier: See `reductions.Reduction`.
    """

    sequence: int
    verb: Verb
    dtype: DType
    op: Op
    numel: int
    root: int
    splits: int
    by_carrier: bool

    def pack(self) -> bytes:
        """Return the fields as bytes."""
        words = _WORDS.pack(
            self.sequence,
            self.numel,
            self.splits,
            self.root,
            self.verb,
            self.dtype,
            self.op,
            self.by_carrier,
        )
        return words.ljust(_HEAD_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Asked":
        """Read what `pack` wrote."""
        sequence, numel, splits, root, verb, dtype, op, by_carrier = _WORDS.unpack_from(data)
        return Asked(
            sequence, Verb(verb), DType(dtype), Op(op), numel, root, splits, bool(by_carrier)
        )

    def describe(self) -> str:
        """Return the call as a line of text."""
        words = []
        if self.verb in REDUCTIONS:
            words.append(self.op.name)
        if self.verb is not Verb.barrier:
            words.append(self.dtype.name)
            words.append("split sizes given" if self.splits == COUNTED else f"numel={self.numel}")
        if self.splits > COUNTED:
            words.append(f"uneven parts #{self.splits % 100000}")
        if self.verb in _ROOTED:
            words.append(f"root={self.root}")
        if self.verb in REDUCTIONS:
            words.append("numerics=" + ("fast" if self.by_carrier else "same_bits"))
        return f"{self.verb.name}({', '.join(words)}) #{self.sequence}"

    def given_bytes(self, world_size: int) -> int:
        """Return what each rank gives; of broadcast and scatter only the root's means anything."""
        many = (Verb.reduce_scatter, Verb.scatter, Verb.all_to_all)
        return self.numel * ITEMSIZE[self.dtype] * (world_size if self.verb in many else 1)

    def is_small(self, lanes: Lanes, world_size: int) -> bool:
        """Return whether what all ranks of a node give fits into a packet."""
        num_bytes = self.given_bytes(world_size) * lanes.num_lanes
        most = min(PACKET_BYTES - _HEAD_BYTES, _MOST_BYTES // lanes.num_nodes)
        return self.splits == 0 and num_bytes <= most


def meet(lanes: Lanes, asked: Asked, given: torch.Tensor, limit_s: float) -> list[torch.Tensor]:
    """Let all ranks see that they make the same call.

    Args:
        lanes: This rank's lanes.
        asked: What this rank calls.
        given: Bytes for all other ranks, of one size everywhere; none if they do not fit.
        limit_s: How long the ranks of the island may let each other wait.

    Returns:
        What each rank gave.

    Raises:
        DesyncError: The ranks make different calls; all of them raise it.
    """
    own = torch.frombuffer(bytearray(asked.pack()), dtype=torch.uint8)
    heads = lanes.island_all_gather(own, limit_s=limit_s)
    _compare(lanes, lanes.islands.nodes[lanes.node], heads.view(-1, _HEAD_BYTES))
    size = given.numel()
    everything = torch.empty(lanes.num_nodes, lanes.num_lanes * size + 1, dtype=torch.uint8)
    rows = lanes.island_all_gather(given) if size else given
    if lanes.is_leader:
        packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        packet[:_HEAD_BYTES] = own
        packet[_HEAD_BYTES:][: rows.numel()] = rows
        others = [node != lanes.node for node in range(lanes.num_nodes)]
        packets, transfer = lanes.exchange(
            0, [packet if other else None for other in others], [PACKET_BYTES * o for o in others]
        )
        lanes.wait([transfer])
        packets[lanes.node] = packet
        leaders = [ranks[0] for ranks in lanes.islands.nodes]
        _compare(lanes, leaders, torch.stack([packet[:_HEAD_BYTES] for packet in packets]))
        for row, packet in zip(everything, packets, strict=True):
            row.copy_(packet[_HEAD_BYTES:][: row.numel()])
    lanes.island_broadcast(everything.view(-1), 0)
    places = lanes.islands.places
    ranks = sorted(places)
    return [everything[places[rank][0]][places[rank][1] * size :][:size] for rank in ranks]


def _compare(lanes: Lanes, ranks: Sequence[int], heads: torch.Tensor) -> None:
    """Check that some ranks say the same."""
    if bool((heads == heads[0]).all()):
        return
    calls = [Asked.unpack(head.numpy().tobytes()).describe() for head in heads]
    by_call: dict[str, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        by_call.setdefault(call, []).append(rank)
    sides = "; ".join(f"ranks {some} called {call}" for call, some in by_call.items())
    raise DesyncError(
        f"the ranks made different calls: {sides}. Use of this group is over: call "
        "fastcoll.destroy()"
    )


def deliver(
    lanes: Lanes, asked: Asked, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Work out a small call's result from what every rank gave.

    Args:
        lanes: This rank's lanes.
        asked: The call.
        given: The bytes of each rank.
        outputs: Where this rank's result goes; a part for each rank where the verb has such.
    """
    rank = lanes.rank
    if not outputs:
        return
    if asked.verb is Verb.broadcast:
        results = [given[asked.root]]
    elif asked.verb in (Verb.all_gather, Verb.gather):
        results = list(given)
    elif asked.verb is Verb.scatter:
        results = [_parts(given[asked.root], len(given))[rank]]
    elif asked.verb is Verb.all_to_all:
        results = [_parts(one, len(given))[rank] for one in given]
    else:
        if asked.verb is Verb.reduce_scatter:
            given = [_parts(one, len(given))[rank] for one in given]
        for output in outputs:
            _reduce(lanes, asked, given, output)
        return
    for output, result in zip(outputs, results, strict=True):
        output.view(torch.uint8).copy_(result)


def _parts(data: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(data.view(count, -1))


def _reduce(
    lanes: Lanes, asked: Asked, given: Sequence[torch.Tensor], output: torch.Tensor
) -> None:
    """Reduce in the one order: ranks within a node, then nodes."""
    partial = partial_dtype(asked.dtype, asked.op)
    inputs = torch.empty(len(given), output.numel(), dtype=TORCH_DTYPES[partial])
    for row, one in zip(inputs, given, strict=True):
        widen(row, one.clone().view(TORCH_DTYPES[asked.dtype]), asked.dtype)
    totals = []
    for ranks in lanes.islands.nodes:
        totals.append(torch.empty(output.numel(), dtype=inputs.dtype))
        reduce_into(totals[-1], [inputs[rank] for rank in ranks], partial, asked.op)
    total = torch.empty(output.numel(), dtype=inputs.dtype)
    reduce_into(total, totals, partial, asked.op)
    finish(output, total, asked.dtype, asked.op, len(given))
