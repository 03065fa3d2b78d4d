# SPDX-License-Identifier: Apache-2.0
"""Which phases make up which algorithm of which verb, for a flat team of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastcoll_model.builders import direct, doubling, exchange, rings, trees
from fastcoll_model.builders.team import Team
from fastcoll_model.schedule import Program

Phase = Callable[[Team], Program]


@dataclass(frozen=True)
class Channel:
    """The phases that one channel of every rank runs.

    Attributes:
        part: Which of the recipe's parts of the message the channel moves.
        stages: It first brings the input into scratch.
        delivers: It brings the result from scratch into the output at the end.
    """

    phases: tuple[Phase, ...]
    part: int = 0
    stages: bool = True
    delivers: bool = True


@dataclass(frozen=True)
class Recipe:
    """The channels of an algorithm.

    Attributes:
        parts: The message is cut into so many parts that travel on their own ways.
        chunked: Every rank answers for a chunk; else the message is moved as a whole, in segments.
    """

    channels: tuple[Channel, ...]
    parts: int = 1
    chunked: bool = True


def _chunked(*phases: Phase, delivers: bool = True) -> Recipe:
    return Recipe((Channel(phases, delivers=delivers),))


def _whole(*phases: Phase, delivers: bool = True) -> Recipe:
    return Recipe((Channel(phases, delivers=delivers),), chunked=False)


def _both_ways(*phases: Callable[..., Program]) -> Recipe:
    channels = (
        Channel(tuple(partial(phase, direction=direction) for phase in phases), part)
        for part, direction in enumerate((1, -1))
    )
    return Recipe(tuple(channels), parts=2)


def _handed_over(first: Phase, second: Phase, part: int = 0) -> tuple[Channel, Channel]:
    """Return two channels: the first hands every block to the second as soon as it is whole."""
    return Channel((first,), part, delivers=False), Channel((second,), part, stages=False)


def _two_trees(phase: Callable[..., Program]) -> Recipe:
    channels = (Channel((partial(phase, tree=tree),), tree) for tree in (0, 1))
    return Recipe(tuple(channels), parts=2, chunked=False)


_double_tree_all_reduce = Recipe(
    tuple(
        channel
        for tree in (0, 1)
        for channel in _handed_over(
            partial(trees.pipelined_reduce, tree=tree, then_broadcast=True),
            partial(trees.pipelined_broadcast, tree=tree, after_reduce=True),
            tree,
        )
    ),
    parts=2,
    chunked=False,
)
_multimem_all_reduce = _handed_over(
    partial(direct.multimem_reduce, then_gather=True),
    partial(direct.multimem_gather, after_reduce=True),
)

RECIPES: dict[tuple[str, str], Recipe] = {
    ("all_reduce", "one_shot"): _whole(direct.one_shot_all_reduce, delivers=False),
    ("all_reduce", "two_shot"): _chunked(direct.reduce_scatter, direct.all_gather),
    ("all_reduce", "ring"): _chunked(rings.reduce_scatter, rings.all_gather),
    ("all_reduce", "bidirectional_ring"): _both_ways(rings.reduce_scatter, rings.all_gather),
    ("all_reduce", "chain"): Recipe(
        _handed_over(rings.chain_forward, rings.chain_back), chunked=False
    ),
    ("all_reduce", "tree"): _whole(trees.reduce, trees.broadcast),
    ("all_reduce", "double_binary_tree"): _double_tree_all_reduce,
    ("all_reduce", "recursive_doubling"): _whole(doubling.doubling_all_reduce, delivers=False),
    ("all_reduce", "rabenseifner"): _chunked(
        partial(doubling.halving_reduce_scatter, serve_guests=False),
        partial(doubling.doubling_all_gather, collect_guests=False),
    ),
    ("all_reduce", "multimem"): Recipe(_multimem_all_reduce),
    ("reduce_scatter", "one_shot"): _chunked(direct.reduce_scatter),
    ("reduce_scatter", "ring"): _chunked(rings.reduce_scatter),
    ("reduce_scatter", "bidirectional_ring"): _both_ways(rings.reduce_scatter),
    ("reduce_scatter", "pairwise"): _chunked(exchange.pairwise_reduce_scatter),
    ("reduce_scatter", "recursive_halving"): _chunked(doubling.halving_reduce_scatter),
    ("reduce_scatter", "multimem"): _chunked(direct.multimem_reduce),
    ("all_gather", "direct"): _chunked(direct.all_gather),
    ("all_gather", "ring"): _chunked(rings.all_gather),
    ("all_gather", "bidirectional_ring"): _both_ways(rings.all_gather),
    ("all_gather", "recursive_doubling"): _chunked(doubling.doubling_all_gather),
    ("all_gather", "bruck"): _chunked(doubling.bruck_all_gather),
    ("all_gather", "multimem"): _chunked(direct.multimem_gather),
    ("broadcast", "direct"): _whole(direct.broadcast),
    ("broadcast", "chain"): _whole(rings.chain_broadcast),
    ("broadcast", "tree"): _whole(trees.broadcast),
    ("broadcast", "double_binary_tree"): _two_trees(trees.pipelined_broadcast),
    ("broadcast", "scatter_all_gather"): _chunked(trees.scatter, doubling.doubling_all_gather),
    ("broadcast", "multimem"): _whole(direct.multimem_broadcast),
    ("reduce", "one_shot"): _whole(direct.reduce),
    ("reduce", "chain"): _whole(rings.chain_reduce),
    ("reduce", "tree"): _whole(trees.reduce),
    ("reduce", "double_binary_tree"): _two_trees(trees.pipelined_reduce),
    ("reduce", "rabenseifner"): _chunked(doubling.halving_reduce_scatter, trees.gather),
    ("reduce", "multimem"): _whole(direct.multimem_to_root),
    ("gather", "direct"): _chunked(direct.gather),
    ("gather", "tree"): _chunked(trees.gather),
    ("scatter", "direct"): _chunked(direct.scatter),
    ("scatter", "tree"): _chunked(trees.scatter),
    ("all_to_all", "direct"): _chunked(exchange.direct_all_to_all, delivers=False),
    ("all_to_all", "pairwise"): _chunked(exchange.pairwise_all_to_all, delivers=False),
    ("all_to_all", "bruck"): _chunked(exchange.bruck_all_to_all, delivers=False),
}
