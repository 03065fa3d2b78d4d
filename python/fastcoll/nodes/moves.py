# SPDX-License-Identifier: Apache-2.0
"""The verbs that only move data, over nodes, for messages of more than a packet.

Decides the way of every part: through the lane of the rank that it comes from or goes to. So it
crosses once to each node that needs it, and all ranks of a node use the network at once. All data
is bytes here.
"""

from collections.abc import Sequence

import torch

from fastcoll.nodes.arrays import split
from fastcoll.nodes.lanes import Lanes, Segment, cuts


def _columns(lanes: Lanes) -> int:
    """Return how many bytes of each rank's part a segment takes."""
    return max(64, lanes.segment_bytes // (lanes.num_lanes * lanes.num_nodes))


def broadcast(lanes: Lanes, root: int, data: torch.Tensor) -> None:
    """Copy the root's bytes to all others."""
    lanes.drive(
        _broadcast(lanes, root, data[first:last])
        for first, last in cuts(data.numel(), lanes.segment_bytes)
    )


def _broadcast(lanes: Lanes, root: int, data: torch.Tensor) -> Segment:
    node, local_root = lanes.node_map.places[root]
    size = -(-data.numel() // lanes.num_lanes)
    if node == lanes.node:
        lanes.node_broadcast(data, local_root)
        pieces = split(data, max(size, 1))
        mine = [pieces[lane].clone() for _, lane in lanes.lanes() if lane < len(pieces)]
        yield [lanes.carrier(slot).broadcast(one, node) for slot, one in enumerate(mine)]
        return
    result = data.new_empty(lanes.num_slots, size)
    lengths = [max(0, min(size, data.numel() - lane * size)) for _, lane in lanes.lanes()]
    yield [
        lanes.carrier(slot).broadcast(result[slot, :length], node)
        for slot, length in enumerate(lengths)
        if length > 0
    ]
    everything = lanes.node_all_gather(result.view(-1))
    pieces = split(data, max(size, 1))
    for place, piece in zip(lanes.by_lane(everything), pieces, strict=False):
        piece.copy_(place[: piece.numel()])


def _from_owners(lanes: Lanes, lane: int, sizes: Sequence[int]) -> list[int]:
    """Return the bytes from each other node in a lane, if rank r gives `sizes[r]`."""
    return [
        0 if rank is None or node == lanes.node else sizes[rank]
        for node, rank in enumerate(lanes.node_map.owners_of(lane))
    ]


def _sliced(
    parts: Sequence[torch.Tensor] | None, first: int, last: int
) -> list[torch.Tensor] | None:
    return None if parts is None else [part[first:last] for part in parts]


def gather(
    lanes: Lanes, data: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int | None = None
) -> None:
    """Put the bytes of all ranks into the root's `parts`, without a root into every rank's.

    Without a root the parts may differ in size.
    """
    longest = data.numel() if parts is None else max(part.numel() for part in parts)
    lanes.drive(
        _gather(lanes, data[first:last], _sliced(parts, first, last), root)
        for first, last in cuts(longest, _columns(lanes))
    )


def _gather(
    lanes: Lanes, data: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int | None
) -> Segment:
    root_node, local_root = (lanes.node, 0) if root is None else lanes.node_map.places[root]
    sizes = [data.numel()] * len(lanes.node_map.places)
    if parts is not None:
        sizes = [part.numel() for part in parts]
    gets = lanes.node == root_node
    takers = [
        node != lanes.node and (root is None or node == root_node)
        for node in range(lanes.num_nodes)
    ]
    exchanges = []
    for slot, lane in lanes.lanes():
        given = [data if slot == 0 and takes else None for takes in takers]
        expected = _from_owners(lanes, lane, sizes) if gets else [0] * lanes.num_nodes
        exchanges.append(lanes.exchange(slot, given, expected))
    yield [transfer for _, transfer in exchanges]
    if not gets:
        return
    # In the node all places are as long as the longest part.
    mine = data.new_zeros(lanes.num_slots, lanes.num_nodes, max(sizes))
    mine[0, lanes.node, : data.numel()] = data
    for slot, (rows, _) in enumerate(exchanges):
        for place, row in zip(mine[slot], rows, strict=True):
            if row.numel() > 0:
                place[: row.numel()].copy_(row)
    everything: torch.Tensor | None
    if root is None:
        everything = lanes.node_all_gather(mine.view(-1))
    else:
        everything = lanes.node_gather(mine.view(-1), local_root)
    if parts is not None and everything is not None:
        for rank, piece in lanes.by_rank(everything.view(-1)):
            parts[rank].copy_(piece[: parts[rank].numel()])


def scatter(
    lanes: Lanes, root: int, parts: Sequence[torch.Tensor] | None, data: torch.Tensor
) -> None:
    """Give each rank its part of the root's bytes."""
    lanes.drive(
        _scatter(lanes, root, _sliced(parts, first, last), data[first:last])
        for first, last in cuts(data.numel(), _columns(lanes))
    )


def _scatter(
    lanes: Lanes, root: int, parts: Sequence[torch.Tensor] | None, data: torch.Tensor
) -> Segment:
    root_node, local_root = lanes.node_map.places[root]
    nodes, size, here = range(lanes.num_nodes), data.numel(), lanes.node == root_node
    mine = data.new_zeros(lanes.num_slots, lanes.num_nodes, size)
    if here:
        buffer = None
        if parts is not None:
            buffer = data.new_zeros(lanes.num_local * mine.numel())
            for rank, piece in lanes.by_rank(buffer):
                piece.copy_(parts[rank])
        lanes.node_scatter(buffer, mine.view(-1), local_root)
    exchanges = []
    for slot, lane in lanes.lanes():
        owners = lanes.node_map.owners_of(lane)
        given = [
            mine[slot, node] if here and node != root_node and owners[node] is not None else None
            for node in nodes
        ]
        gets = slot == 0 and not here
        expected = [size if gets and node == root_node else 0 for node in nodes]
        exchanges.append(lanes.exchange(slot, given, expected))
    yield [transfer for _, transfer in exchanges]
    data.copy_(mine[0, root_node] if here else exchanges[0][0][root_node])


def all_to_all(
    lanes: Lanes,
    given: Sequence[torch.Tensor],
    got: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> None:
    """Give each rank its bytes; `counts[i][j]` of them go from rank i to rank j.

    The bytes from one rank to a node come in one piece, in the lane of that rank.
    """
    largest = max(max(row) for row in counts)
    step = max(64, lanes.segment_bytes // len(counts))
    lanes.drive(
        _all_to_all(
            lanes,
            [part[first:last] for part in given],
            [part[first:last] for part in got],
            [[max(0, min(count, last) - first) for count in row] for row in counts],
        )
        for first, last in cuts(largest, step)
    )


def _all_to_all(
    lanes: Lanes,
    given: Sequence[torch.Tensor],
    got: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> Segment:
    node_map, here = lanes.node_map, lanes.node_map.nodes[lanes.node]
    nodes = range(lanes.num_nodes)
    sources, exchanges = [], []  # of each slot, the rank on each node whose lane it is
    for slot, lane in lanes.lanes():
        owners = node_map.owners_of(lane)
        outgoing: list[torch.Tensor | None] = [None] * lanes.num_nodes
        for node in nodes:
            if slot == 0 and node != lanes.node:
                outgoing[node] = torch.cat([given[rank] for rank in node_map.nodes[node]])
        expected = [
            0 if owner is None or node == lanes.node else sum(counts[owner][rank] for rank in here)
            for node, owner in enumerate(owners)
        ]
        sources.append(owners)
        exchanges.append(lanes.exchange(slot, outgoing, expected))
    yield [transfer for _, transfer in exchanges]
    # For each local rank, one after another: the pieces that came for it, by slot and node.
    pieces: list[list[torch.Tensor]] = [[] for _ in here]
    for slot, (rows, _) in enumerate(exchanges):
        for node, owner in enumerate(sources[slot]):
            if owner is None or (node == lanes.node and slot > 0):
                continue
            if node == lanes.node:
                bundle: Sequence[torch.Tensor] = [given[rank] for rank in here]
            else:
                bundle = split(rows[node], [counts[owner][rank] for rank in here])
            for local, piece in enumerate(bundle):
                pieces[local].append(piece)
    _distribute(lanes, pieces, got, counts)


def _distribute(
    lanes: Lanes,
    pieces: Sequence[Sequence[torch.Tensor]],
    got: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
) -> None:
    """Pass on the pieces for the other ranks of the node; take the others' pieces for this one."""
    node_map = lanes.node_map
    sent = [sum(piece.numel() for piece in some) for some in pieces]
    origins = [
        rank
        for local in range(lanes.num_local)
        for slot, lane in enumerate(node_map.lanes_of(lanes.node, local))
        for node, rank in enumerate(node_map.owners_of(lane))
        if rank is not None and not (node == lanes.node and slot > 0)
    ]
    sizes = [counts[rank][lanes.rank] for rank in origins]
    holder = {
        rank: lane % lanes.num_local
        for lane in range(lanes.num_lanes)
        for rank in node_map.owners_of(lane)
        if rank is not None
    }
    expected = [0] * lanes.num_local
    for rank, size in zip(origins, sizes, strict=True):
        expected[holder[rank]] += size
    source = torch.cat([piece for some in pieces for piece in some])
    target = lanes.node_all_to_all(source, sent, expected)
    for rank, piece in zip(origins, split(target, sizes), strict=True):
        got[rank].copy_(piece)
