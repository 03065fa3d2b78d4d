# SPDX-License-Identifier: Apache-2.0
"""The packets that begin a call: all ranks compare their calls, and small messages travel along.

Decides the size of a packet, which is the same for every call: Gloo ends a process that receives
more bytes than it expects. So nothing else crosses before all nodes have agreed. A call whose
message fits into its packets is over after one trip.

All packets of a node together have room for 64 KiB. Where a second trip takes longer than 64 KiB,
this is the quickest way. At 1 Gbit/s with 2 ms, by arithmetic, 64 KiB take 2.5 ms instead of 4.5.
On other links it loses little.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastcoll.errors import DesyncError
from fastcoll.nodes.arrays import WIRE_BLOCK, coded_bytes, partial_dtype
from fastcoll.nodes.carriers.carrier import Started
from fastcoll.nodes.lanes import Lanes
from fastcoll.types import COUNTED, ITEMSIZE, REDUCTIONS, DType, Op, Verb, Wire, num_tensors

_WORDS = struct.Struct("=QQQQiBBBBBB")
_HEADER_BYTES = 64
# Bytes of all packets of a node together. Saving a second trip is worth that many. They take as
# long as a trip on a link of 10 Gbit/s and 50 us, or of 1 Gbit/s and 0.5 ms. On longer links they
# take less.
_MOST_BYTES = 64 << 10
# Of a packet, where it has to be sent whole.
_FIXED_BYTES = 4096 - _HEADER_BYTES
_ROOTED = (Verb.broadcast, Verb.gather, Verb.scatter, Verb.reduce)


@dataclass(frozen=True)
class Header:
    """The facts that are equal on all ranks of a call; fields as in `fastcoll.types.Request`."""

    sequence: int  # number of the call in its group
    verb: Verb
    dtype: DType
    op: Op
    numel: int
    root: int
    splits: int
    by_carrier: bool  # see `reductions.Reduction`
    on_gpus: bool = False
    wire: Wire = Wire.none
    of_list: int = 0  # `splits` of the list of which this is a tensor

    def numbered(self, sequence: int) -> "Header":
        return replace(self, sequence=sequence)

    def pack(self) -> bytes:
        words = _WORDS.pack(
            self.sequence,
            self.numel,
            self.splits,
            self.of_list,
            self.root,
            self.verb,
            self.dtype,
            self.op,
            self.by_carrier,
            self.on_gpus,
            self.wire,
        )
        return words.ljust(_HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Header":
        sequence, numel, splits, of_list, root, *codes = _WORDS.unpack_from(data)
        verb, dtype, op, by_carrier, on_gpus, wire = codes
        kinds = Verb(verb), DType(dtype), Op(op)
        sides = bool(by_carrier), bool(on_gpus), Wire(wire)
        return Header(sequence, *kinds, numel, root, splits, *sides, of_list)

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
        if self.wire is not Wire.none:
            words.append(f"wire={self.wire.name}")
        if self.on_gpus:
            words.append("on GPUs")
        if self.of_list:
            words.append(f"of {self._list()}")
        return f"{self.verb.name}({', '.join(words)}) #{self.sequence}"

    def facts(self) -> dict[str, str]:
        """Return the fields that an error compares, by their names there."""
        reduces = self.verb in REDUCTIONS
        parts = "counted" if self.splits == COUNTED else f"#{self.splits % 100000}"
        return {
            "number": f"#{self.sequence}",
            "op": self.op.name if reduces else "",
            "dtype": self.dtype.name,
            "numel": "" if self.splits == COUNTED else str(self.numel),
            "root": str(self.root),
            "sizes of parts": parts if self.splits else "equal",
            "numerics": "fast" if self.by_carrier and reduces else "same_bits",
            "wire": self.wire.name,
            "device": "GPUs" if self.on_gpus else "CPUs",
            "lists": self._list(),
        }

    def _list(self) -> str:
        """Return the list as csrc/plan.h describes it."""
        if not (count := num_tensors(self.of_list)):
            return "no list"
        return f"{count} tensor{'s' * (count > 1)} with sizes #{self.of_list % 100000}"

    def given_bytes(self, world_size: int) -> int:
        """Return the bytes of each rank's input; in broadcast and scatter only the root has one."""
        many = (Verb.reduce_scatter, Verb.scatter, Verb.all_to_all)
        return self.numel * ITEMSIZE[self.dtype] * (world_size if self.verb in many else 1)

    def is_small(self, lanes: Lanes, world_size: int) -> bool:
        """Return whether the message fits into packets, as small.py fills them."""
        num_bytes = self.given_bytes(world_size)
        if self.wire is not Wire.none:
            count = world_size if self.verb is Verb.reduce_scatter else 1
            padded = -(-self.numel // WIRE_BLOCK) * WIRE_BLOCK
            num_bytes = count * coded_bytes(self.wire, padded)
        elif self.verb in REDUCTIONS:
            num_bytes = (
                num_bytes // ITEMSIZE[self.dtype] * ITEMSIZE[partial_dtype(self.dtype, self.op)]
            )
        else:
            num_bytes *= lanes.num_lanes
        return self.splits == 0 and num_bytes <= packet_room(lanes)


def packet_room(lanes: Lanes) -> int:
    """Return how many bytes fit into a packet; whole headers, so that elements are aligned."""
    most = _MOST_BYTES // (lanes.num_nodes - 1) // _HEADER_BYTES * _HEADER_BYTES
    return most if lanes.accepts_short else min(most, _FIXED_BYTES)


def meet(lanes: Lanes, header: Header, limit_s: float) -> None:
    """Let the ranks of a node see that they make the same call.

    Args:
        lanes: This rank's lanes.
        header: This rank's call.
        limit_s: How long they may let each other wait.

    Raises:
        DesyncError: They make different calls.
    """
    headers = lanes.node_all_gather(_bytes_of(header), limit_s=limit_s)
    _compare(lanes.node_map.nodes[lanes.node], headers.view(-1, _HEADER_BYTES))


def exchange_packets(lanes: Lanes, header: Header, content: torch.Tensor) -> list[torch.Tensor]:
    """Compare the calls of all nodes, and exchange_packets contents. Collective over the leaders.

    Args:
        lanes: This rank's lanes.
        header: This rank's call.
        content: Bytes for all other leaders.

    Returns:
        The content of each node's packet, perhaps with more bytes behind it.

    Raises:
        DesyncError: The nodes make different calls; all leaders raise it.
    """
    packets = hand_over(lanes, 0, header, content)
    lanes.wait([packets.transfer])
    return packets.contents()


@dataclass(frozen=True)
class Packets:
    """The packets of a lane's ranks; complete when `transfer` is over."""

    ranks: Sequence[int]  # the rank that serves the lane on each node
    packets: Sequence[torch.Tensor]
    transfer: Started

    def contents(self) -> list[torch.Tensor]:
        """Return the content of each node's packet.

        Raises:
            DesyncError: The headers differ.
        """
        _compare(self.ranks, torch.stack([packet[:_HEADER_BYTES] for packet in self.packets]))
        return [packet[_HEADER_BYTES:] for packet in self.packets]


def hand_over(lanes: Lanes, slot: int, header: Header, content: torch.Tensor) -> Packets:
    """Start to exchange packets of this call in one of this rank's lanes."""
    packet = torch.cat([_bytes_of(header), content])
    room = _HEADER_BYTES + packet_room(lanes)
    if not lanes.accepts_short:
        packet = torch.cat([packet, packet.new_zeros(room - packet.numel())])
    others = [node != lanes.node for node in range(lanes.num_nodes)]
    packets, transfer = lanes.exchange(
        slot, [packet if other else None for other in others], [room * other for other in others]
    )
    packets[lanes.node] = packet
    _, lane = lanes.lanes()[slot]
    return Packets(lanes.node_map.ranks_of(lane), packets, transfer)


def _bytes_of(header: Header) -> torch.Tensor:
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)


def _compare(ranks: Sequence[int], headers: torch.Tensor) -> None:
    if bool((headers == headers[0]).all()):
        return
    calls = [Header.unpack(header.numpy().tobytes()) for header in headers]
    rows = [call.facts() for call in calls]
    if len({call.verb for call in calls}) > 1:
        rows = [{"verb": call.describe()} for call in calls]
    found = []
    for fact in rows[0]:
        sides: dict[str, list[int]] = {}
        for rank, row in zip(ranks, rows, strict=True):
            sides.setdefault(row[fact], []).append(rank)
        if len(sides) > 1:
            texts = [f"{value} on {_named(some)}" for value, some in sides.items()]
            found.append(f"{fact} {'differ' if fact[-1] == 's' else 'differs'}: {', '.join(texts)}")
    raise DesyncError(
        f"the ranks made different calls: {'; '.join(found)}. Rank {ranks[0]} called "
        f"{calls[0].describe()}"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
