# SPDX-License-Identifier: Apache-2.0
"""all_reduce, reduce and reduce_scatter over nodes, for messages of more than a packet.

The node reduces, each lane carries its chunk to the other nodes, the node gathers. Decides the data
that crosses. By default that is node partials in the type that has all their bits, and each rank
sums them in the order of the nodes. Where the bits may differ, the carrier sums. With m nodes a
chunk of S bytes costs 2 S (m-1)/m per lane and direction. Each node first gets its shard, then the
sum of each shard (Thakur et al. 2005). Two nodes, and short chunks, exchange whole chunks: the same
bytes, one trip less. In a reduce the last trip goes to the root's node only.

Integers, fp32 and fp64 cross in as many bytes as in a carrier's own ring. Sums of half types cross
in fp32, so that they are rounded once. An all_reduce over two nodes, and a reduce_scatter, then
need twice the bytes of a carrier that reduces in the type itself. Over more nodes it is 1.5 times,
as sums come back rounded. So "fast" is the default of half types, within a bound
(tests/nodes/test_bounds.py). MPI reduces only if the number of nodes is a power of two. On three
nodes, Open MPI 5 had one node send and receive twice as much as the others
(tests/nodes/test_mpi_on_hosts.py).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from fastcoll.nodes.arrays import (
    as_bytes,
    copy,
    finish,
    partial_dtype,
    partial_op,
    reduce_into,
    split,
    widen,
)
from fastcoll.nodes.carriers.carrier import Started
from fastcoll.nodes.lanes import Lanes, Segment, cuts
from fastcoll.types import ITEMSIZE, TORCH_DTYPES, DType, Numerics, Op

# The most bytes that a node gives to all others together where chunks go whole. Up to here a trip
# costs more than the bytes that it saves; not measured for more than two nodes.
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True)
class Reduction:
    """How to reduce."""

    dtype: DType
    op: Op
    numerics: Numerics  # the promise of the node's reductions
    by_carrier: bool  # node partials are rounded, and the carrier reduces them
    world_size: int  # the divisor of an average

    @property
    def partial(self) -> DType:
        """The type of node partials."""
        return self.dtype if self.by_carrier else partial_dtype(self.dtype, self.op)

    @property
    def block_numel(self) -> int:
        """Pieces of a message begin at multiples of so many elements."""
        return 1

    def padded(self, numel: int) -> int:
        """Return a number of elements in whole blocks."""
        return -(-numel // self.block_numel) * self.block_numel

    def of_segment(self, first: int, last: int) -> Self:
        """Return how to reduce these elements of the message."""
        del first, last
        return self

    def widen(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write a rank's elements as partials."""
        widen(target, source, self.dtype)

    def given_bytes(self, numel: int) -> int:
        """Return how many bytes cross of so many partials."""
        return numel * ITEMSIZE[self.partial]

    def give(self, partials: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return what crosses of partials that begin with element `first` of the segment."""
        del first
        return partials

    def reduce(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Reduce what all nodes gave, in their order, to the result that all ranks get."""
        dtype = TORCH_DTYPES[self.partial]
        typed = [row.view(dtype) for row in rows]
        if self.op is not Op.AVG and self.partial is self.dtype:
            reduce_into(target, typed, self.partial, self.op)
            return
        total = torch.empty(target.numel(), dtype=dtype, device="cpu")
        reduce_into(total, typed, self.partial, self.op)
        finish(target, total, self.dtype, self.op, self.world_size)

    def reduce_part(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Reduce what all nodes gave to a result that one rank alone gets."""
        self.reduce(target, rows)

    def total(self, rows: Sequence[torch.Tensor], numel: int, result: torch.Tensor) -> torch.Tensor:
        """Reduce what all nodes gave of a shard to what crosses of the sum.

        Args:
            rows: Of each node, fewer elements at the message's end.
            numel: Elements of a whole shard.
            result: Of the type of the call's result.
        """
        one = result.new_zeros(numel)
        self.reduce(one[: rows[0].nbytes // ITEMSIZE[self.partial]], rows)
        return one

    def take(self, target: torch.Tensor, total: torch.Tensor) -> None:
        """Write what crossed of sums as the result."""
        copy(target, total[: target.numel()])


def reduce(
    lanes: Lanes,
    how: Reduction,
    source: torch.Tensor,
    target: torch.Tensor | None,
    root: int | None = None,
) -> None:
    """Reduce `source` of all ranks into the root's `target`, without a root into every rank's.

    `source` and `target` may be one.
    """
    blocks = lanes.segment_bytes // ITEMSIZE[how.dtype] // lanes.num_lanes // how.block_numel
    step = max(blocks, 1) * how.block_numel * lanes.num_lanes
    lanes.drive(
        _reduce(
            lanes,
            how.of_segment(first, last),
            source[first:last],
            None if target is None else target[first:last],
            root,
        )
        for first, last in cuts(source.numel(), step)
    )


def _reduce(
    lanes: Lanes,
    how: Reduction,
    source: torch.Tensor,
    target: torch.Tensor | None,
    root: int | None,
) -> Segment:
    root_node, local_root = (None, 0) if root is None else lanes.node_map.places[root]
    chunks = _of_node(lanes, how, source)
    result, results = _room(lanes, chunks, source.dtype)
    if how.by_carrier:
        yield from _by_carrier(lanes, how, chunks, results)
    else:
        firsts = [lane * chunks[0].numel() for _, lane in lanes.lanes()]
        given = [how.give(chunk, first) for chunk, first in zip(chunks, firsts, strict=True)]
        if _sends_whole(lanes, given):
            yield from _whole_chunks(lanes, how, given, results, root_node)
        else:
            sums = yield from _sum_shards(lanes, how, given, results)
            yield from _gather_shards(lanes, how, sums, results, root_node)
    if root_node is None:
        _collect(lanes, result, target)
    elif lanes.node == root_node:
        everything = lanes.node_gather(result, local_root)
        if target is not None and everything is not None:
            _put_in_order(lanes, everything.view(-1), target)


def _of_node(lanes: Lanes, how: Reduction, source: torch.Tensor) -> list[torch.Tensor]:
    """Reduce within the node; return the chunk of each of this rank's lanes."""
    numel = how.padded(-(-source.numel() // lanes.num_lanes))
    buffer = _spread(lanes, how, source, numel)
    mine = lanes.node_reduce_scatter(buffer, partial_op(how.op), how.numerics)
    return [mine[slot * numel :][:numel] for slot, _ in lanes.lanes()]


def _room(
    lanes: Lanes, chunks: list[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return room for the results of all slots, and of each of this rank's lanes."""
    numel = chunks[0].numel()
    result = chunks[0].new_empty(lanes.num_slots * numel, dtype=dtype)
    return result, [result[slot * numel :][:numel] for slot, _ in lanes.lanes()]


def _sends_whole(lanes: Lanes, given: list[torch.Tensor]) -> bool:
    given_bytes = given[0].nbytes * (lanes.num_nodes - 1)
    return lanes.num_nodes == 2 or given_bytes <= _SHORT_BYTES


def _spread(lanes: Lanes, how: Reduction, source: torch.Tensor, numel: int) -> torch.Tensor:
    """Return a lane buffer of partials: of each lane, `numel` elements of `source`."""
    size = lanes.num_local * lanes.num_slots * numel
    same = how.partial is how.dtype
    if same and lanes.in_order and source.numel() == size:
        return source
    buffer = torch.zeros(size, dtype=TORCH_DTYPES[how.partial], device=source.device)
    if lanes.in_order:
        how.widen(buffer[: source.numel()], source)
        return buffer
    for place, piece in zip(lanes.by_lane(buffer), split(source, max(numel, 1)), strict=False):
        how.widen(place[: piece.numel()], piece)
    return buffer


def _collect(lanes: Lanes, result: torch.Tensor, target: torch.Tensor | None) -> None:
    """Gather the lanes of all local ranks and put them where they belong."""
    assert target is not None, "every rank gets the result"
    size = result.numel() * lanes.num_local
    if lanes.in_order and size == target.numel():
        lanes.node_all_gather(result, target)
        return
    _put_in_order(lanes, lanes.node_all_gather(result), target)


def _put_in_order(lanes: Lanes, everything: torch.Tensor, target: torch.Tensor) -> None:
    if lanes.in_order:
        copy(target, everything[: target.numel()])
        return
    places = lanes.by_lane(everything)
    pieces = split(target, max(places[0].numel(), 1))
    for place, piece in zip(places, pieces, strict=False):
        copy(piece, place[: piece.numel()])


def _by_carrier(
    lanes: Lanes, how: Reduction, chunks: list[torch.Tensor], results: list[torch.Tensor]
) -> Segment:
    for chunk, result in zip(chunks, results, strict=True):
        copy(result, chunk)
    yield [lanes.carrier(slot).all_reduce(one, how.op) for slot, one in enumerate(results)]


def _give(
    lanes: Lanes, slot: int, tensor: torch.Tensor, only: int | None
) -> tuple[list[torch.Tensor], Started]:
    """Start to give a tensor to the lane's other nodes, or to one; each gives as much."""
    nodes, gets = range(lanes.num_nodes), only in (None, lanes.node)
    given = [tensor if node != lanes.node and only in (None, node) else None for node in nodes]
    expected = [tensor.nbytes if node != lanes.node and gets else 0 for node in nodes]
    return lanes.exchange(slot, given, expected)


def _whole_chunks(
    lanes: Lanes,
    how: Reduction,
    given: list[torch.Tensor],
    results: list[torch.Tensor],
    only: int | None,
) -> Segment:
    """Give chunks to all nodes, or to the one that wants the result."""
    exchanges = [_give(lanes, slot, one, only) for slot, one in enumerate(given)]
    yield [transfer for _, transfer in exchanges]
    if only not in (None, lanes.node):
        return
    for (rows, _), one, result in zip(exchanges, given, results, strict=True):
        rows[lanes.node] = one
        how.reduce(result, rows)


def _sum_shards(
    lanes: Lanes, how: Reduction, chunks: list[torch.Tensor], results: list[torch.Tensor]
) -> Generator[Sequence[Started], None, list[torch.Tensor]]:
    """Give each node a shard of every chunk; return the sums of this node's shards."""
    numel = how.padded(-(-results[0].numel() // lanes.num_nodes))
    size = how.given_bytes(numel) // chunks[0].element_size()
    shards = [
        [chunk[first * size :][:size] for first in range(lanes.num_nodes)] for chunk in chunks
    ]
    exchanges = []
    for slot, parts in enumerate(shards):
        mine = parts[lanes.node]
        given = [None if part is mine else part for part in parts]
        expected = [0 if part is mine else mine.nbytes for part in parts]
        exchanges.append(lanes.exchange(slot, given, expected))
    yield [transfer for _, transfer in exchanges]
    sums = []
    for (rows, _), parts, result in zip(exchanges, shards, results, strict=True):
        rows[lanes.node] = parts[lanes.node]
        sums.append(how.total(rows, numel, result))
    return sums


def _gather_shards(
    lanes: Lanes,
    how: Reduction,
    sums: list[torch.Tensor],
    results: list[torch.Tensor],
    only: int | None,
) -> Segment:
    """Give the sums of shards to all nodes, or to the one that wants the result."""
    if only is not None:
        yield from _gather_shards_on(lanes, only, sums, results)
        return
    gathered = [one.new_empty(one.numel() * lanes.num_nodes) for one in sums]
    yield [
        lanes.carrier(slot).all_gather(as_bytes(whole), as_bytes(one))
        for slot, (whole, one) in enumerate(zip(gathered, sums, strict=True))
    ]
    for whole, result in zip(gathered, results, strict=True):
        how.take(result, whole)


def _gather_shards_on(
    lanes: Lanes, node: int, sums: list[torch.Tensor], results: list[torch.Tensor]
) -> Segment:
    exchanges = [_give(lanes, slot, one, node) for slot, one in enumerate(sums)]
    yield [transfer for _, transfer in exchanges]
    if lanes.node != node:
        return
    for (rows, _), one, result in zip(exchanges, sums, results, strict=True):
        rows[node] = as_bytes(one)
        copy(result, torch.cat(rows).view(result.dtype)[: result.numel()])


def reduce_scatter(
    lanes: Lanes, how: Reduction, parts: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    """Reduce `parts`, one for each rank, over all ranks; rank r gets the r-th."""
    num_bytes = ITEMSIZE[how.partial] * lanes.num_lanes * lanes.num_nodes
    step = how.padded(max(64, lanes.segment_bytes // num_bytes))
    lanes.drive(
        _reduce_scatter(lanes, how, [part[first:last] for part in parts], target[first:last])
        for first, last in cuts(target.numel(), step)
    )


def _reduce_scatter(
    lanes: Lanes, how: Reduction, parts: Sequence[torch.Tensor], target: torch.Tensor
) -> Segment:
    num_nodes, numel = lanes.num_nodes, target.numel()
    num_rows = lanes.num_slots * num_nodes
    size = lanes.num_local * num_rows * how.padded(numel)
    buffer = torch.zeros(size, dtype=TORCH_DTYPES[how.partial], device=target.device)
    for rank, piece in lanes.by_rank(buffer):
        how.widen(piece[:numel], parts[rank])
    mine = how.give(lanes.node_reduce_scatter(buffer, partial_op(how.op), how.numerics))
    partials = mine.view(lanes.num_slots, num_nodes, mine.numel() // num_rows)
    own_bytes = partials[0, 0].nbytes
    exchanges = []
    for slot, lane in lanes.lanes():
        ends = lanes.node_map.owners_of(lane)
        ends[lanes.node] = None
        given = [
            None if end is None else row for end, row in zip(ends, partials[slot], strict=True)
        ]
        expected = [0 if slot or node == lanes.node else own_bytes for node in range(num_nodes)]
        exchanges.append(lanes.exchange(slot, given, expected))
    yield [transfer for _, transfer in exchanges]
    rows, _ = exchanges[0]
    rows[lanes.node] = partials[0, lanes.node]
    how.reduce_part(target, rows)
