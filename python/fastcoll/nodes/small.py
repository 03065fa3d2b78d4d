# SPDX-License-Identifier: Apache-2.0
"""Calls whose message fits into the packets that begin them: one trip, and nothing else crosses.

Decides the content of a node's packet: the reduced values of its ranks in a reduction, else the
input of each rank. Every rank picks its result.
"""

from collections.abc import Sequence

import torch

from fastcoll.nodes.arrays import as_bytes, copy, partial_op, split
from fastcoll.nodes.lanes import Lanes
from fastcoll.nodes.packets import Header, exchange_packets
from fastcoll.nodes.reductions import Reduction
from fastcoll.types import TORCH_DTYPES, Verb


def reduce(
    lanes: Lanes,
    header: Header,
    how: Reduction,
    given: Sequence[torch.Tensor],
    got: Sequence[torch.Tensor],
) -> None:
    """Reduce within the node, then over the nodes on each leader, which tells the node."""
    size = how.padded(header.numel)
    numel = len(given) * size
    partials = torch.zeros(numel, dtype=TORCH_DTYPES[how.partial], device="cpu")
    for place, part in zip(split(partials, max(size, 1)), given, strict=False):
        how.widen(place[: header.numel], part)
    partials = lanes.node_reduce(partials, partial_op(how.op), how.numerics)
    # A byte more: no rank goes on before the leader has seen that all nodes make this call.
    told_bytes = numel * TORCH_DTYPES[how.dtype].itemsize + 1
    told = torch.zeros(told_bytes, dtype=torch.uint8, device="cpu")
    result = told[:-1].view(TORCH_DTYPES[how.dtype])
    if lanes.is_leader:
        mine = as_bytes(how.give(partials))
        packets = [packet[: mine.numel()] for packet in exchange_packets(lanes, header, mine)]
        if header.verb is Verb.reduce_scatter:
            how.reduce_part(result, packets)
        else:
            how.reduce(result, packets)
    lanes.node_broadcast(told, 0)
    if got:
        first = lanes.rank * size if header.verb is Verb.reduce_scatter else 0
        copy(got[0], result[first:][: header.numel])


def move(
    lanes: Lanes, header: Header, given: Sequence[torch.Tensor], got: Sequence[torch.Tensor]
) -> None:
    """Bring every rank's input to every rank, which takes its part."""
    world_size = len(lanes.node_map.places)
    size = header.given_bytes(world_size)
    mine = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if given:
        torch.cat([as_bytes(part) for part in given], out=mine)
    rows = lanes.node_all_gather(mine) if size else mine
    shape = (lanes.num_nodes, lanes.num_lanes * size + 1)
    everything = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    if lanes.is_leader:
        nodes = lanes.node_map.nodes
        packets = exchange_packets(lanes, header, rows[: len(nodes[lanes.node]) * size])
        for row, packet, ranks in zip(everything, packets, nodes, strict=True):
            row[: len(ranks) * size] = packet[: len(ranks) * size]
    lanes.node_broadcast(everything.view(-1), 0)
    places = lanes.node_map.places
    by_rank = [
        everything[node][local * size :][:size] for _, (node, local) in sorted(places.items())
    ]
    for output, result in zip(got, _results(lanes.rank, header, by_rank), strict=bool(got)):
        as_bytes(output).copy_(result)


def _results(rank: int, header: Header, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a rank's results, given every rank's bytes."""
    if header.verb is Verb.broadcast:
        return [given[header.root]]
    if header.verb is Verb.scatter:
        return [given[header.root].view(len(given), -1)[rank]]
    if header.verb is Verb.all_to_all:
        return [one.view(len(given), -1)[rank] for one in given]
    return given
