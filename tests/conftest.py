# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every folder of tests: pools of ranks. Leaves out GPU tests where there is no GPU."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from fastcoll import env
from fastcoll.machine import gpu
from tests import proofs
from tests.durations import Durations
from tests.support import harness
from tests.support.backends import COMPILE_S, in_cpp, on_backend
from tests.support.gpu import ThreadGroups, ThreadPool, needs_gpu_part
from tests.support.sites import SITES, Site

# Before CUDA is first used: ranks that are threads share a GPU.
env.prepare_gpu_threads()

# Tests that compile the backend of torch.distributed ask for it; their ranks inherit it from here.
os.environ.setdefault("FASTCOLL_TORCH_BACKEND", "python")

# torch asks the name server who 127.0.0.1 is whenever it connects to a store. One that does not
# answer costs 5 s otherwise, more than some limits here.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Else each rank that compiles starts an interpreter that imports torch, and compiles there.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

NOT_RUN = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(proofs.OPTION, action="store_true", help="leave out proofs of unchanged files")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    config.pluginmanager.register(proofs.Proofs(config))


def why_no_gpu() -> str:
    """Return why the tests marked `gpu` can't run here, "" if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return gpu.problem()


@pytest.hookimpl(trylast=True)  # after the folders have set their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if mine and why_no_gpu():
        config.stash[NOT_RUN] = len(mine)
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection looks through all modules


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(NOT_RUN, 0):
        terminalreporter.write_line(f"{count} GPU tests not run: {why_no_gpu()}", yellow=True)


@pytest.fixture(scope="session")
def pools() -> Iterator[harness.Pools]:
    """`pools(n)` is the session's pool of n ranks; tests must leave its group in order."""
    with closing(harness.Pools()) as result:
        yield result


@pytest.fixture(scope="module")
def own_pools() -> Iterator[harness.Pools]:
    """`own_pools(n)` are ranks of this file alone: for GPU calls on the CPU (fake_gpu), since what
    others called would run on the fast path.
    """
    with closing(harness.Pools()) as result:
        yield result


def start_nodes(nodes: str) -> harness.Pool:
    return harness.Pool(len(nodes), harness.Setup(nodes=nodes))


@pytest.fixture(scope="session")
def clusters() -> Iterator[harness.Pools]:
    """`clusters("aab")` is the session's pool of ranks 0 and 1 on node a and rank 2 on node b."""
    with closing(harness.Pools(start_nodes)) as result:
        yield result


@pytest.fixture(scope="module")
def own_clusters() -> Iterator[harness.Pools]:
    """The same for one file alone, as groups that broke are left behind in them."""
    with closing(harness.Pools(start_nodes)) as result:
        yield result


@pytest.fixture(scope="session")
def bare_pools() -> Iterator[harness.Pools]:
    """`bare_pools(n)` is the session's pool of n ranks that have made no group."""
    with closing(harness.Pools(lambda n: harness.Pool(n, harness.Setup(init=False)))) as result:
        yield result


@pytest.fixture(scope="session")
def compiled_pools() -> Iterator[harness.Pools]:
    """As `bare_pools`, of ranks whose groups of torch use the compiled backend."""
    setup = harness.Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": "compiled"})

    def start(world_size: int) -> harness.Pool:
        pool = harness.Pool(world_size, setup)
        rows = pool.run(on_backend, "fastcoll", in_cpp, deadline_s=COMPILE_S)
        if rows != [("FastcollBackend", "")] * world_size:
            pool.close()  # else pytest waits for its ranks at the end
            raise AssertionError(rows)
        return pool

    with closing(harness.Pools(start)) as result:
        yield result


@pytest.fixture(scope="session")
def thread_groups() -> Iterator[ThreadGroups]:
    """The rank threads on GPUs that tests share; tests must leave their group in order."""
    with closing(ThreadGroups()) as result:
        yield result


@pytest.fixture
def one_gpu(thread_groups: ThreadGroups) -> Callable[[int], ThreadPool]:
    """`one_gpu(n)` is a pool of n rank threads on one GPU."""
    return lambda world_size: ThreadPool(thread_groups("one_gpu", world_size))


@pytest.fixture
def all_gpus(thread_groups: ThreadGroups) -> Callable[[int], ThreadPool]:
    """The same on all GPUs."""
    return lambda world_size: ThreadPool(thread_groups("all_gpus", world_size))


@pytest.fixture(scope="module", params=SITES)  # of a file's tests, those of a site run together
def kind_of_group(request: pytest.FixtureRequest) -> Site:
    kind: Site = request.param
    return kind


@pytest.fixture
def site(kind_of_group: Site, request: pytest.FixtureRequest) -> Site:
    """Each kind of group in turn, with its ranks; `at` in support/sites.py chooses among them."""
    kind = kind_of_group
    if kind.has_gpus and needs_gpu_part.args[0]:
        pytest.skip(needs_gpu_part.kwargs["reason"])
    return kind.on(request.getfixturevalue(kind.pools)(kind.nodes or kind.world))


@pytest.fixture
def fresh_pool() -> Iterator[Callable[..., harness.Pool]]:
    """`fresh_pool(n, setup)` starts ranks for this test alone: it may break them."""
    opened: list[harness.Pool] = []

    def start(world_size: int, setup: harness.Setup | None = None) -> harness.Pool:
        opened.append(harness.Pool(world_size, setup))
        return opened[-1]

    yield start
    for pool in opened:
        pool.close()
