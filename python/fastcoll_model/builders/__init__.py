# SPDX-License-Identifier: Apache-2.0
"""Builders of schedules: `build(verb, algorithm, world_size)`.

Every builder works for every number of ranks. `recipes` lists the phases of each algorithm; the
other modules of this package define the phases.
"""

from collections.abc import Sequence

from fastcoll_model.builders import sockets as chains
from fastcoll_model.builders.hierarchical import BETWEEN, Grid, local_size_of, phases
from fastcoll_model.builders.recipes import RECIPES, Recipe
from fastcoll_model.builders.team import Piece, Team
from fastcoll_model.errors import ModelError, did_you_mean
from fastcoll_model.schedule import VERBS, Copy, Program, Schedule, Span

__all__ = ["algorithms_of", "build", "chain_of_sockets", "check_algorithm"]


def algorithms_of(verb: str) -> list[str]:
    """Return the names of the algorithms that have a schedule for a verb."""
    flat = [name for of_verb, name in RECIPES if of_verb == verb]
    of_sockets = [chains.NAME] if verb == "all_reduce" else []
    over_nodes = (name for name, between in BETWEEN.items() if verb in between.verbs)
    return [*flat, *of_sockets, *over_nodes]


def check_algorithm(verb: str, algorithm: str) -> None:
    """Raise ModelError unless there is such a verb, and a schedule of it by this algorithm."""
    if verb not in VERBS:
        raise ModelError(
            f"no verb {verb!r}{did_you_mean(verb, VERBS)}; the verbs are {', '.join(VERBS)}"
        )
    if algorithm not in (known := algorithms_of(verb)):
        near = did_you_mean(algorithm, known)
        raise ModelError(f"{verb} has no schedule {algorithm!r}{near}; it has {', '.join(known)}")


def build(
    verb: str,
    algorithm: str,
    world_size: int,
    *,
    root: int = 0,
    num_segments: int = 1,
    local_size: int | None = None,
) -> Schedule:
    """Return the schedule of one verb by one algorithm.

    Args:
        verb: One of `schedule.VERBS`.
        algorithm: One of `algorithms_of(verb)`.
        world_size: Number of ranks, 1 or more.
        root: Rank that gives in broadcast and scatter, and gets in reduce and gather.
        num_segments: Pieces that move one after the other: pipelining for chain,
            double_binary_tree and multimem. They are pieces of a chunk, or of the whole message
            where ranks do not share it out.
        local_size: Of hierarchical ones: ranks per node; by default, the most even division.

    Raises:
        ModelError: The verb or algorithm is unknown, or the sizes don't fit.
    """
    check_algorithm(verb, algorithm)
    if world_size < 1 or num_segments < 1:
        raise ModelError(f"{world_size} ranks and {num_segments} segments: both must be 1 or more")
    if algorithm in BETWEEN:
        return _hierarchical(
            verb, algorithm, world_size, root, local_size_of(world_size, local_size)
        )
    if algorithm == chains.NAME:
        return chain_of_sockets(chains.halves(world_size), num_segments)
    return _flat(verb, algorithm, world_size, root, num_segments)


def _flat(verb: str, algorithm: str, world_size: int, root: int, num_segments: int) -> Schedule:
    recipe = RECIPES[verb, algorithm]
    # Pipelined channels move block by block, the others whole chunks.
    num_blocks = recipe.parts * num_segments * (world_size if recipe.chunked else 1)
    chunks = [_shares(recipe, part, world_size, num_blocks) for part in range(recipe.parts)]

    def program(rank: int, channel: int) -> Program:
        spec = recipe.channels[channel]
        team = Team(range(world_size), rank, chunks[spec.part], channel, root)
        if spec.stages:
            yield from stage(verb, team, num_blocks // world_size)
        for phase in spec.phases:
            yield from phase(team)
        if spec.delivers:
            yield from deliver(verb, team, num_blocks // world_size)

    return Schedule(verb, algorithm, world_size, num_blocks, program, len(recipe.channels), root)


def _shares(recipe: Recipe, part: int, world_size: int, num_blocks: int) -> list[tuple[Piece, ...]]:
    """Return the blocks that each rank answers for in one part of the message."""
    if not recipe.chunked:
        width = num_blocks // recipe.parts
        return [((part * width, width),), *([()] * (world_size - 1))]
    chunk = num_blocks // world_size
    width = chunk // recipe.parts
    return [((rank * chunk + part * width, width),) for rank in range(world_size)]


def _hierarchical(
    verb: str, algorithm: str, world_size: int, root: int, local_size: int
) -> Schedule:
    def program(rank: int, channel: int) -> Program:
        del channel
        by_place = verb in ("all_reduce", "reduce")
        grid = Grid(world_size // local_size, local_size, 1, rank, root, by_place)
        yield from stage(verb, grid.everyone(), 1)
        yield from phases(verb, grid, BETWEEN[algorithm])
        if verb != "all_to_all":
            yield from deliver(verb, grid.everyone(), 1)

    return Schedule(verb, algorithm, world_size, world_size, program, root=root)


def chain_of_sockets(sockets: Sequence[int], num_segments: int = 1) -> Schedule:
    """Return all_reduce by socket_chain; `sockets` has each rank's. `build` takes two halves."""
    runs, world_size = chains.runs_of(sockets), len(sockets)
    num_blocks = world_size * num_segments

    def program(rank: int, channel: int) -> Program:
        del channel
        everyone = Team(range(world_size), rank, [((0, num_blocks),), *[()] * (world_size - 1)])
        yield from stage("all_reduce", everyone, num_segments)
        yield from chains.Chain(runs, rank, num_blocks, num_segments).steps()
        yield from deliver("all_reduce", everyone, num_segments)

    return Schedule("all_reduce", chains.NAME, world_size, num_blocks, program)


def stage(verb: str, team: Team, chunk_blocks: int) -> Program:
    """Copy my input into my scratch, to its blocks of the message."""
    rank = team.ranks[team.me]
    if verb in ("broadcast", "scatter") and team.me != team.root:
        return
    own = verb in ("all_gather", "gather")
    for start, count in team.pieces([team.me] if own else team.everything()):
        first = start - rank * chunk_blocks if own else start
        yield Copy(Span(rank, "scratch", start, count), Span(rank, "input", first, count))


def deliver(verb: str, team: Team, chunk_blocks: int) -> Program:
    """Copy the result from my scratch into my output."""
    rank = team.ranks[team.me]
    if verb in ("reduce", "gather") and team.me != team.root:
        return
    own = verb in ("reduce_scatter", "scatter")
    for start, count in team.pieces([team.me] if own else team.everything()):
        first = start - rank * chunk_blocks if own else start
        yield Copy(Span(rank, "output", first, count), Span(rank, "scratch", start, count))
