# SPDX-License-Identifier: Apache-2.0
"""Where a promise is kept: every kind of group, and the functions by which a program calls it.

A contract test takes the fixture `site` and runs once for each of SITES. Decides which calls a
site is given, and how ranks make them. A new kind of group, carrier or frontend is a line of SITES.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.backends import IS_COMPILED, on_torch
from tests.support.calls import Call
from tests.support.draw import EVERYTHING, KINDS_OF_DTYPE, Limits, calls_of, small_sizes
from tests.support.harness import Pool, Rank
from tests.support.perform import check, make

SLOW = pytest.mark.slow


def in_its_group(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program in the rank's own group."""
    return program(rank, *args)


def in_new_group(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program with a group of its own, the function that makes a call, and a barrier."""
    with rank.comm.new_group(timeout_s=15) as group:
        return program(group, make, group.barrier, *args)


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
        small, large: Sizes in elements; small ones meet every dtype, operation and algorithm.
        pool: The ranks; the fixture `site` fills it in.
    """

    world: int
    nodes: str = ""
    pools: str = "pools"
    in_group: Callable[..., Any] = in_its_group
    limits: Limits = EVERYTHING
    in_new_group: Callable[..., Any] = in_new_group
    small: tuple[int, ...] = ()
    large: tuple[int, ...] = (16_385, 32_771, 65_537, 131_071, 262_147)
    pool: Pool | None = None

    def on(self, pool: Pool) -> "Site":
        """Return this site with its ranks."""
        return dataclasses.replace(self, pool=pool)

    def small_calls(self, verb: str, rounds: int = 1) -> Iterator[Call]:
        """Return calls of every dtype, operation and algorithm at small sizes, a size a round."""
        return calls_of(
            verb, self.world, self.small or small_sizes(self.world), rounds, self.limits
        )

    def large_calls(self, verb: str) -> Iterator[Call]:
        """Return calls of a few dtypes at a large size."""
        return calls_of(verb, self.world, self.large, 1, self.limits, KINDS_OF_DTYPE[:2])

    def check(self, calls: Iterable[Call], batch: int = 200) -> int:
        """Make calls on every rank and compare with the oracle; return how many."""
        assert self.pool is not None
        return check(self.pool, calls, batch, ranks_by_node(self.nodes), self.in_group)

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a program on every rank, in this kind of group; return the results by rank."""
        assert self.pool is not None
        found: list[Any] = self.pool.run(self.in_group, program, *args)
        return found


def ranks_by_node(nodes: str) -> list[list[int]] | None:
    """Return the ranks of each node; None if there is one node."""
    names = dict.fromkeys(nodes)
    return [[rank for rank, name in enumerate(nodes) if name == node] for node in names] or None


# ---- torch.distributed, and a GPU made of the CPU ------------------------------------------------


def in_new_group_of_torch(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    """Run as `in_new_group` does, with torch's group and barrier."""
    return on_torch(rank, _in_world, program, *args)


def _in_world(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    return program(rank.comm, make, dist.barrier, *args)


def on_fake_gpu(rank: Rank, program: Callable[..., Any], calls: Sequence[Any]) -> Any:
    """Make calls on a GPU whose kernels are the CPU's; each must be launched."""
    from tests.support.fake_gpu import fake_gpu

    with fake_gpu(rank.comm) as core:
        results = program(rank, calls)
        assert len(core.log) == len(calls)
    return results


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
    3, "", "own_pools", on_fake_gpu, Limits(("private", "private", "strided"), ("auto",))
)
SITES = [
    *(pytest.param(Site(n), id=f"one-node-{n}") for n in (2, 3)),
    *(pytest.param(Site(n), id=f"one-node-{n}", marks=SLOW) for n in (1, 4, 5, 8)),
    *(pytest.param(across(nodes), id=f"nodes-{nodes}") for nodes in ("aabb", "aaab")),
    *(
        pytest.param(across(x), id=f"nodes-{x}", marks=SLOW)
        for x in ("aab", "abab", "abc", "aaabbc")
    ),
    pytest.param(TORCH, id="torch-python"),
    pytest.param(
        dataclasses.replace(TORCH, pools="compiled_pools"), id="torch-compiled", marks=IS_COMPILED
    ),
    pytest.param(FAKE_GPU, id="fake-gpu"),
]


def at(sites: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test that takes `site` at some of SITES only."""
    return pytest.mark.parametrize("kind_of_group", sites, indirect=True)


WITHOUT_GPU = [param for param in SITES if param.values[0].in_group is not on_fake_gpu]
# One site of each kind where programs run, for promises that don't depend on the ranks' number.
EACH_KIND = [
    param
    for param in SITES
    if param.id in ("one-node-2", "nodes-aabb", "torch-python", "torch-compiled")
]


without_gpu, each_kind = at(WITHOUT_GPU), at(EACH_KIND)


def in_torch(site: Site) -> bool:
    """Return whether a site's calls are those of torch.distributed."""
    return site.in_group is on_torch
