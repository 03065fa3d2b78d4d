# SPDX-License-Identifier: Apache-2.0
"""Where a promise is kept: every kind of group, and the functions by which a program calls it.

A contract test takes the fixture `site` and runs once for each of SITES. Decides which calls a
site is given, and how ranks make them. A new kind of group, carrier or frontend is a line of SITES.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.backends import IS_COMPILED, on_torch
from tests.support.calls import Call
from tests.support.draw import (
    EVERYTHING,
    IN_RANK_ORDER,
    KINDS_OF_DTYPE,
    VERBS,
    Limits,
    calls_of,
    small_sizes,
    some,
)
from tests.support.harness import Pool, Rank
from tests.support.perform import Result, Started, check, make, perform_all

SLOW, LONG = pytest.mark.slow, pytest.mark.long


def in_its_group(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program in the rank's own group."""
    return program(rank, *args)


def in_new_group(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program with a group of its own."""
    with rank.comm.new_group(timeout_s=15) as group:
        return program(group, *args)


@dataclasses.dataclass(frozen=True)
class Site:
    """Ranks of one kind of group, and how programs run there.

    Attributes:
        world: The number of ranks.
        nodes: The node of each rank, a letter each; "" if all share one.
        pools: The fixture that has the ranks.
        in_group: Runs a program on a rank, whose `comm` is then a group of this kind.
        limits: Which calls can be made.
        in_new_group: The function that runs a program in a group that it may break.
        has_gpus: The tensors lie on GPUs, real ones or made of the CPU.
        perform: Makes calls, if `perform_all` can't.
        most: The most small calls of a verb that are made, at random; 0: all.
        small, large: Sizes in elements; small ones meet every dtype, operation and algorithm.
        pool: The ranks; the fixture `site` fills it in.
    """

    world: int
    nodes: str = ""
    pools: str = "pools"
    in_group: Callable[..., Any] = in_its_group
    limits: Limits = EVERYTHING
    in_new_group: Callable[..., Any] = in_new_group
    has_gpus: bool = False
    perform: Callable[..., list[Result]] = perform_all
    most: int = 0
    small: tuple[int, ...] = ()
    large: tuple[int, ...] = (16_385, 32_771, 65_537, 131_071, 262_147)
    pool: Pool | None = None

    def on(self, pool: Pool) -> "Site":
        """Return this site with its ranks."""
        return dataclasses.replace(self, pool=pool)

    def small_calls(self, verb: str, rounds: int = 1) -> Iterator[Call]:
        """Return calls of every dtype, operation and algorithm at small sizes, a size a round."""
        sizes = self.small or small_sizes(self.world)
        calls = calls_of(verb, self.world, sizes, rounds, self.limits)
        return iter(some(calls, self.most, VERBS.index(verb))) if self.most else calls

    def large_calls(self, verb: str) -> Iterator[Call]:
        """Return calls of a few dtypes at a large size.

        A reduce_scatter of many ranks has smaller parts, of about as many bytes together.
        """
        share = max(self.world // 2, 1) if verb == "reduce_scatter" else 1
        sizes = [numel // share | 1 for numel in self.large]
        return calls_of(verb, self.world, sizes, 1, self.limits, KINDS_OF_DTYPE[:2])

    def check(self, calls: Iterable[Call], batch: int = 200) -> int:
        """Make calls on every rank and compare with the oracle; return how many."""
        assert self.pool is not None
        nodes = ranks_by_node(self.nodes)
        return check(self.pool, calls, batch, nodes, self.in_group, self.perform)

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a program on every rank, in this kind of group; return the results by rank."""
        assert self.pool is not None
        found: list[Any] = self.pool.run(self.in_group, program, *args)
        return found


def ranks_by_node(nodes: str) -> list[list[int]] | None:
    """Return the ranks of each node; None if there is one node."""
    names = dict.fromkeys(nodes)
    return [[rank for rank, name in enumerate(nodes) if name == node] for node in names] or None


# ---- torch.distributed ---------------------------------------------------------------------------


def in_new_group_of_torch(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run as `in_new_group` does, with torch's group."""
    return on_torch(rank, _in_world, program, *args)


def _in_world(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    return program(rank.comm, *args)


# ---- GPUs made of the CPU ------------------------------------------------------------------------


@contextlib.contextmanager
def group_on_fake_gpu(rank: Rank, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Put a new group on a GPU whose kernels are the CPU's; give the group, and its kernels."""
    from tests.support.fake_gpu import fake_gpu  # only now: builds without a GPU part can't

    with rank.comm.new_group(timeout_s=15) as group, fake_gpu(group, **options) as core:
        yield group, core
        rank.comm.barrier()  # a rank that leaves earlier is lost to the others


def on_fake_gpu(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program on such a GPU."""
    with group_on_fake_gpu(rank) as (group, _):
        return program(dataclasses.replace(rank, comm=group), *args)


def perform_by_kernels(rank: Rank, calls: Sequence[Call]) -> list[Result]:
    """Make calls; each must be launched."""
    results = perform_all(rank, calls)
    assert len(rank.comm.device_group._core.log) == len(calls)
    return results


NCCL_CARRIES = {"reaches_peers": False, "no_nccl": ""}


def by_fake_nccl(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program where NCCL carries, for which Gloo stands; kernels add what it brought."""
    with group_on_fake_gpu(rank, **NCCL_CARRIES) as (group, core):
        result = program(dataclasses.replace(rank, comm=group), *args)
        assert set(core.log) <= {"add"}, "another kernel ran"
    return result


@contextlib.contextmanager
def group_on_fake_node_gpus(rank: Rank, *about: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Put a new group on GPUs of several nodes; give the group, and what `fake_node_gpus` does."""
    from tests.support.fake_nodes import fake_node_gpus

    with rank.comm.new_group() as group, fake_node_gpus(group, *about, **options) as fake:
        yield group, fake


def on_fake_node_gpus(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program on GPUs of several nodes."""
    with group_on_fake_node_gpus(rank) as (group, _):
        return program(dataclasses.replace(rank, comm=group), *args)


# ---- GPUs ----------------------------------------------------------------------------------------


def on_gpu(me: Any, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program of a rank thread; the tensors that it makes lie on its GPU."""
    with torch.device(me.device):
        return program(me, *args)


def perform_on_gpu(me: Any, calls: Sequence[Call]) -> list[Result]:
    """Make calls on the GPU of a rank thread, one behind the other.

    All memory is laid out before the first call, and all results are read after the last one. A
    request for memory may wait for a kernel, and that kernel for this rank.
    """
    todo: list[tuple[Any, ...]] = []
    started = [
        Started(me.comm, call, start=lambda *args: todo.append(args), device=me.device)
        for call in calls
    ]
    finish(me)
    for args in todo:
        make(*args)
    finish(me)
    return [one.result() for one in started]


def finish(rank: Any) -> None:
    """Wait until all ranks have carried out what they started."""
    if hasattr(rank, "synchronize"):  # a rank with a stream of its own
        rank.synchronize()
    rank.comm.check()
    rank.comm.barrier()


def placements() -> list[str]:
    """Return the fixtures of rank threads: on one GPU; on all, where there are several."""
    return ["one_gpu", "all_gpus"] if torch.cuda.device_count() > 1 else ["one_gpu"]


# ---- the sites -----------------------------------------------------------------------------------


def across(nodes: str) -> Site:
    """Return ranks on several nodes, the node of each given by a letter."""
    seed = zlib.crc32(nodes.encode())
    limits = Limits(algorithms=("auto",), numerics="same_bits", repeats=1, seed=seed)
    # Beyond a header for every type and verb; the largest has several segments.
    small, large = (0, 1, 3, 17, 1001, 4099, 70_001), (65_537, 70_001, 81_919)
    return Site(len(nodes), nodes, "clusters", limits=limits, small=small, large=large)


TORCH_LIMITS = Limits(
    ("private",),
    ("auto",),
    in_place_only=("all_reduce", "reduce"),
    meaningless=(("complex64", "PRODUCT"), ("complex128", "PRODUCT")),
)
TORCH = Site(
    3,
    pools="bare_pools",
    in_group=on_torch,
    limits=TORCH_LIMITS,
    in_new_group=in_new_group_of_torch,
)
FAKE_GPU = Site(
    3,
    pools="own_pools",
    in_group=on_fake_gpu,
    limits=Limits(("private", "private", "strided"), ("auto",)),
    has_gpus=True,
    perform=perform_by_kernels,
)
FAKE_NCCL = dataclasses.replace(FAKE_GPU, in_group=by_fake_nccl, perform=perform_all, most=60)


def across_gpus(nodes: str) -> Site:
    """Return the same with GPUs made of the CPU."""
    site = across(nodes)
    return dataclasses.replace(
        site,
        in_group=on_fake_node_gpus,
        limits=dataclasses.replace(site.limits, kinds=FAKE_GPU.limits.kinds),
        has_gpus=True,
        most=40,
    )


GPU = Site(
    2,
    pools="one_gpu",
    in_group=on_gpu,
    limits=Limits(("device",), IN_RANK_ORDER, lacks=(("reduce", "two_shot"),), repeats=1),
    has_gpus=True,
    perform=perform_on_gpu,
    small=(0, 1, 7, 1023, 4096, 20_001),
    large=(65_537, 131_071),
)
SITES = [
    pytest.param(Site(2), id="one-node-2"),
    pytest.param(Site(3), id="one-node-3", marks=LONG),
    *(pytest.param(Site(n), id=f"one-node-{n}", marks=SLOW) for n in (1, 4, 5, 8)),
    pytest.param(across("aabb"), id="nodes-aabb"),
    pytest.param(across("aaab"), id="nodes-aaab", marks=LONG),
    *(
        pytest.param(across(x), id=f"nodes-{x}", marks=SLOW)
        for x in ("aab", "abab", "abc", "aaabbc")
    ),
    pytest.param(TORCH, id="torch-python"),
    pytest.param(
        dataclasses.replace(TORCH, pools="compiled_pools"), id="torch-compiled", marks=IS_COMPILED
    ),
    pytest.param(FAKE_GPU, id="fake-gpu"),
    pytest.param(FAKE_NCCL, id="fake-nccl"),
    pytest.param(across_gpus("aabb"), id="fake-gpus-aabb"),
    pytest.param(across_gpus("aaab"), id="fake-gpus-aaab", marks=LONG),
    pytest.param(across_gpus("abc"), id="fake-gpus-abc", marks=SLOW),
    *(
        pytest.param(
            dataclasses.replace(GPU, world=n, pools=pools), id=f"{pools}-{n}", marks=pytest.mark.gpu
        )
        for pools in placements()
        for n in (1, 2, 3, 4, 8)
    ),
]


def at(sites: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test that takes `site` at some of SITES only."""
    return pytest.mark.parametrize("kind_of_group", sites, indirect=True)


WITHOUT_GPU = [param for param in SITES if not param.values[0].has_gpus]
WITH_GPU = [param for param in SITES if param.values[0].has_gpus]


def in_torch(site: Site) -> bool:
    """Return whether a site's calls are those of torch.distributed."""
    return site.in_group is on_torch


# One site of each kind where programs run, for promises that don't depend on the ranks' number.
EACH_KIND = [
    param
    for param in SITES
    if param.id in ("one-node-2", "nodes-aabb", "torch-python", "torch-compiled")
]


without_gpu, with_gpu, each_kind = at(WITHOUT_GPU), at(WITH_GPU), at(EACH_KIND)
# Those whose calls, handles and operations are fastcoll's own.
of_fastcoll = at([param for param in EACH_KIND if not in_torch(param.values[0])])
