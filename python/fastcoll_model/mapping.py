# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline, data and expert groups on one cluster: which of them get the neighbours.

Decides how a strategy of several axes is dealt out to ranks, and the cost of each way. Ranks count
through the axes, the first axis of an order fastest. In the order (tensor, data) a tensor group is
ranks 0 1 2 3, a data group 0 4 8 12. Every order is tried; groups of a kind are at work at the same
time, groups of different kinds are not. Volumes and their sources are those of `strategies`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import prod

from fastcoll_model.errors import ModelError
from fastcoll_model.groups import Groups, groups_us, side_by_side
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.schedule import Copy, Program, Schedule, Signal, Span, Wait
from fastcoll_model.simulator import simulate
from fastcoll_model.strategies import MAX_RANKS, Workload

AXES = ("tensor", "expert", "data", "pipeline")
_MICRO_BATCHES = 4  # per stage, as `strategies` has it


@dataclass(frozen=True)
class Axis:
    """One kind of group.

    Attributes:
        name: One of `AXES`.
        size: Ranks of a group.
        verb: A collective, or "send", from each rank to the next.
        size_bytes: The larger of a rank's input and output, each time.
        times: How often per step.
    """

    name: str
    size: int
    verb: str
    size_bytes: float
    times: int


@dataclass(frozen=True)
class Mapped:
    """One way to deal out the ranks.

    Attributes:
        order: Names of the axes, the one whose groups are neighbours first.
        axis_us: Time of each axis per step, nothing hidden behind computation.
    """

    order: tuple[str, ...]
    axis_us: dict[str, float]

    @property
    def time_us(self) -> float:
        """All axes, one after the other."""
        return sum(self.axis_us.values())


def axes_of(workload: Workload, sizes: Mapping[str, int]) -> list[Axis]:
    """Return the calls of the groups of each kind in a step.

    Args:
        workload: The model.
        sizes: Ranks of a group, by the name of the axis.

    Raises:
        ModelError: There is no such axis, or a group without ranks.
    """
    for name, size in sizes.items():
        if name not in AXES:
            raise ModelError(f"no axis {name!r}; the axes are {', '.join(AXES)}")
        if size < 1:
            raise ModelError(f"{name}={size}: a group has a rank at least")
    tensor, stages = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    num_micro = _MICRO_BATCHES * stages if stages > 1 else 1
    layers = -(-workload.num_layers // stages)
    weights = workload.num_params * workload.dtype_bytes
    # Of a rank's part of a micro-batch. The ranks of a pipeline share their tokens: a stage takes
    # all of them, one micro-batch after the other.
    activations = workload.tokens * workload.hidden * workload.dtype_bytes * stages / num_micro
    known = {
        "tensor": ("all_reduce", activations * tensor, 4 * layers * num_micro),
        "expert": ("all_to_all", activations, 4 * layers * num_micro),
        "data": ("all_reduce", weights / (tensor * stages * sizes.get("expert", 1)), 1),
        "pipeline": ("send", activations, 2 * num_micro),
    }
    return [Axis(name, size, *known[name]) for name, size in sizes.items()]


def groups_along(sizes: Sequence[int], at: int) -> Groups:
    """Return the groups along one axis, if ranks count through axes of these sizes."""
    stride, size = prod(sizes[:at]), sizes[at]
    span = stride * size
    starts = (base + i for base in range(0, prod(sizes), span) for i in range(stride))
    return [range(start, start + span, stride) for start in starts]


def mappings(axes: Sequence[Axis], cluster: Cluster) -> list[Mapped]:
    """Return every order of the axes with its price, the cheapest first.

    Raises:
        ModelError: The groups are not as many ranks as the cluster has, or too many to simulate.
    """
    num_ranks = prod(axis.size for axis in axes)
    if num_ranks != cluster.num_ranks:
        said = " x ".join(f"{axis.size} {axis.name}" for axis in axes)
        raise ModelError(f"{said} are {num_ranks} ranks, and there are {cluster.num_ranks}")
    if num_ranks > MAX_RANKS:
        raise ModelError(f"{num_ranks} ranks are more than a mapping simulates ({MAX_RANKS})")

    @cache
    def axis_us(axis: Axis, stride: int) -> float:
        sizes = (stride, axis.size, num_ranks // (stride * axis.size))
        return axis.times * _once_us(axis, cluster, groups_along(sizes, 1))

    found = []
    for order in permutations(axes):
        strides = [prod(axis.size for axis in order[:i]) for i in range(len(order))]
        times = {a.name: axis_us(a, stride) for a, stride in zip(order, strides, strict=True)}
        found.append(Mapped(tuple(axis.name for axis in order), times))
    return sorted(found, key=lambda one: one.time_us)


def _once_us(axis: Axis, cluster: Cluster, groups: Groups) -> float:
    if axis.verb != "send":
        return groups_us(axis.verb, cluster, groups, axis.size_bytes)
    if axis.size == 1:
        return 0.0
    return simulate(side_by_side(_sends(axis.size), groups), cluster, axis.size_bytes).time_us


def _sends(num_ranks: int) -> Schedule:
    """Return a send from each rank to the next, for the simulator: no verb means that."""

    def program(rank: int, channel: int) -> Program:
        del channel
        if rank < num_ranks - 1:
            yield Signal(rank + 1)
        if rank > 0:
            yield Wait(rank - 1)
            yield Copy(Span(rank, "output", 0, 1), Span(rank - 1, "input", 0, 1))

    return Schedule("broadcast", "send", num_ranks, 1, program)
