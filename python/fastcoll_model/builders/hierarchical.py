# SPDX-License-Identifier: Apache-2.0
"""Two levels: phases between the ranks of a node, and between the ranks of one place in all nodes.

Ranks are numbered node by node. Between nodes every rank carries its own share, so all network
cards work, and each byte crosses the network as rarely as possible.
"""

from collections.abc import Callable
from typing import NamedTuple

from fastcoll_model.builders import direct, doubling, exchange, rings, trees
from fastcoll_model.builders.team import Team
from fastcoll_model.errors import ModelError
from fastcoll_model.schedule import VERBS, Program

Phase = Callable[[Team], Program]
_SHARED_OUT = ("all_reduce", "reduce_scatter", "all_gather")


class Between(NamedTuple):
    """How the nodes' ranks of one place reduce and gather among themselves, in which verbs.

    With `gather`, a reduce is shared out too, and the root gathers; else whole messages climb a
    tree.
    """

    reduce_scatter: Phase
    all_gather: Phase
    verbs: tuple[str, ...]
    gather: Phase | None = None


BETWEEN = {
    "hierarchical": Between(doubling.halving_reduce_scatter, doubling.doubling_all_gather, VERBS),
    "hierarchical_ring": Between(rings.reduce_scatter, rings.all_gather, _SHARED_OUT),
    # Adds the nodes' sums in the order of the nodes, as same_bits requires over nodes.
    "hierarchical_direct": Between(
        direct.reduce_scatter, direct.all_gather, (*_SHARED_OUT, "reduce"), direct.gather
    ),
}


class Grid(NamedTuple):
    """`num_nodes` x `local_size` ranks whose chunks are `width` blocks; `rank` is me.

    `by_place` puts the chunks of one place in all nodes side by side, so that they move as one. It
    serves verbs that leave free which rank answers for which chunk.
    """

    num_nodes: int
    local_size: int
    width: int
    rank: int
    root: int
    by_place: bool = False

    def chunk(self, node: int, local: int) -> tuple[int, int]:
        """Return the blocks of a rank's chunk."""
        if self.by_place:
            return ((local * self.num_nodes + node) * self.width, self.width)
        return ((node * self.local_size + local) * self.width, self.width)

    def mates(self, *, whole: bool = False, of_node: bool = False) -> Team:
        """Return the ranks of my node.

        A member answers for the chunks of all ranks of its place. With `of_node` it answers for its
        own chunk only. With `whole` the message is not shared out.
        """
        node, local = divmod(self.rank, self.local_size)
        ranks = range(node * self.local_size, (node + 1) * self.local_size)
        nodes = [node] if of_node else range(self.num_nodes)
        chunks = [tuple(self.chunk(j, i) for j in nodes) for i in range(self.local_size)]
        return Team(ranks, local, self._whole(chunks, whole), root=self.root % self.local_size)

    def twins(self, *, whole: bool = False, of_node: bool = False) -> Team:
        """Return the ranks of my place in all nodes.

        A member answers for its own chunk; with `of_node` for all chunks of its node; with `whole`
        the message is not shared out.
        """
        node, local = divmod(self.rank, self.local_size)
        ranks = range(local, self.num_nodes * self.local_size, self.local_size)
        locals_ = range(self.local_size) if of_node else [local]
        chunks = [tuple(self.chunk(j, i) for i in locals_) for j in range(self.num_nodes)]
        return Team(ranks, node, self._whole(chunks, whole), root=self.root // self.local_size)

    def everyone(self) -> Team:
        """Return all ranks, each with its own chunk."""
        num_ranks = self.num_nodes * self.local_size
        chunks = [((rank * self.width, self.width),) for rank in range(num_ranks)]
        return Team(range(num_ranks), self.rank, chunks, root=self.root)

    def _whole(
        self, chunks: list[tuple[tuple[int, int], ...]], whole: bool
    ) -> list[tuple[tuple[int, int], ...]]:
        if not whole:
            return chunks
        num_blocks = self.num_nodes * self.local_size * self.width
        return [((0, num_blocks),), *([()] * (len(chunks) - 1))]

    @property
    def at_roots_place(self) -> bool:
        """Whether I stand in my node where the root stands in its own."""
        return self.rank % self.local_size == self.root % self.local_size


def phases(verb: str, grid: Grid, between: Between) -> Program:
    """Yield the steps of `grid.rank` between staging and delivery."""
    mates, twins = grid.mates(), grid.twins()
    if verb == "reduce":
        yield from _reduce(grid, between)
    if verb in ("all_reduce", "reduce_scatter"):
        yield from direct.reduce_scatter(mates)
        yield from between.reduce_scatter(twins)
    if verb in ("all_reduce", "all_gather"):
        yield from between.all_gather(twins)
        yield from direct.all_gather(mates)
    if verb == "broadcast":
        if grid.at_roots_place:
            yield from trees.broadcast(grid.twins(whole=True))
        yield from direct.broadcast(grid.mates(whole=True))
    if verb == "gather":
        yield from direct.gather(grid.mates(of_node=True))
        if grid.at_roots_place:
            yield from trees.gather(grid.twins(of_node=True))
    if verb == "scatter":
        if grid.at_roots_place:
            yield from trees.scatter(grid.twins(of_node=True))
        yield from direct.scatter(grid.mates(of_node=True))
    if verb == "all_to_all":
        sizes = (grid.num_nodes, grid.local_size, grid.width)
        yield from exchange.hierarchical_all_to_all(grid.rank, *sizes)


def _reduce(grid: Grid, between: Between) -> Program:
    mates, twins = grid.mates(), grid.twins()
    if between.gather:
        yield from direct.reduce_scatter(mates)
        yield from between.reduce_scatter(twins)
        yield from between.gather(twins)
        if twins.me == twins.root:
            yield from direct.gather(mates)
        return
    yield from direct.reduce(grid.mates(whole=True))
    if grid.at_roots_place:
        yield from trees.reduce(grid.twins(whole=True))


def local_size_of(world_size: int, local_size: int | None) -> int:
    """Return the ranks per node: as asked for, or the divisor nearest to the square root.

    Raises:
        ModelError: The nodes would not be equally full.
    """
    if local_size is None:
        return max(
            d for d in range(1, world_size + 1) if world_size % d == 0 and d * d <= world_size
        )
    if local_size < 1 or world_size % local_size:
        raise ModelError(
            f"{world_size} ranks can't be {local_size} on every node: "
            "local_size must divide the number of ranks"
        )
    return local_size
