# SPDX-License-Identifier: Apache-2.0
"""The same collective in many groups at once: data-parallel groups that share a network, say.

Decides how ranks are dealt out to groups, and the cost of a careless mapping against a good one.
"""

from collections.abc import Sequence

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import on_one_switch
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.regular import simulate_on_switch
from fastcoll_model.schedule import EVERY, Copy, Program, Reduce, Schedule, Signal, Span, Step, Wait
from fastcoll_model.simulator import simulate

Groups = Sequence[Sequence[int]]


def consecutive(num_ranks: int, group_size: int) -> Groups:
    """Return groups of neighbouring ranks: 0 1 2 3, 4 5 6 7.

    Raises:
        ModelError: The size does not divide the ranks.
    """
    _divides(num_ranks, group_size)
    return [range(i, i + group_size) for i in range(0, num_ranks, group_size)]


def strided(num_ranks: int, group_size: int) -> Groups:
    """Return groups of ranks as far apart as can be: 0 2 4 6, 1 3 5 7.

    Raises:
        ModelError: The size does not divide the ranks.
    """
    _divides(num_ranks, group_size)
    stride = num_ranks // group_size
    return [range(i, num_ranks, stride) for i in range(stride)]


def _divides(num_ranks: int, group_size: int) -> None:
    if group_size < 1 or num_ranks % group_size:
        raise ModelError(f"{num_ranks} ranks can't be dealt out to groups of {group_size}")


def side_by_side(schedule: Schedule, groups: Groups) -> Schedule:
    """Return a schedule in which every group runs the given one, all at the same time.

    It is for the simulator: its verb has no meaning for all ranks together.
    """
    place = {rank: (group, i) for group in groups for i, rank in enumerate(group)}

    def program(rank: int, channel: int) -> Program:
        group, i = place[rank]
        return (_renamed(step, group) for step in schedule.program(i, channel))

    return Schedule(
        schedule.verb,
        schedule.algorithm,
        sum(map(len, groups)),
        schedule.num_blocks,
        program,
        schedule.num_channels,
    )


def _renamed(step: Step, group: Sequence[int]) -> Step:
    def span(old: Span) -> Span:
        if old.rank == EVERY:
            raise ModelError("multimem reaches all ranks, not those of a group")
        return old._replace(rank=group[old.rank])

    if isinstance(step, Copy):
        return Copy(span(step.dst), span(step.src))
    if isinstance(step, Reduce):
        return Reduce(span(step.dst), tuple(map(span, step.srcs)))
    if isinstance(step, Signal):
        return Signal(group[step.rank], step.channel)
    return Wait(group[step.rank], step.channel)


_ON_A_NODE = ("ring", "two_shot", "one_shot", "direct", "pairwise", "scatter_all_gather")


def groups_us(verb: str, cluster: Cluster, groups: Groups, size_bytes: float) -> float:
    """Return the time of a collective of `size_bytes` in every group at once.

    By the best of the algorithms that move the least; hierarchical where groups span nodes and have
    several ranks on each.
    """
    world_size = len(groups[0])
    if world_size == 1 or size_bytes == 0:
        return 0.0
    first = cluster.node_of(groups[0][0])
    local_size = sum(cluster.node_of(rank) == first for rank in groups[0])
    names: Sequence[str] = [name for name in algorithms_of(verb) if name in _ON_A_NODE]
    if 1 < local_size < world_size and world_size % local_size == 0:
        names = ["hierarchical"]
    built = [build(verb, name, world_size, local_size=local_size) for name in names]
    switch = on_one_switch(cluster, sum(map(len, groups)))
    if switch:  # where no group is in another one's way
        return min(simulate_on_switch(one, switch, size_bytes).time_us for one in built)
    together = [side_by_side(one, groups) for one in built]
    return min(simulate(one, cluster, size_bytes).time_us for one in together)
