# SPDX-License-Identifier: Apache-2.0
"""What every folder of tests shares: pools of ranks, and no GPU tests where there is no GPU."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import harness

# Tests that compile the backend of torch.distributed ask for it; their ranks inherit it from here.
os.environ.setdefault("FASTCOLL_TORCH_BACKEND", "python")

# torch asks the name server who 127.0.0.1 is whenever it connects to a store. One that does not
# answer costs 5 s otherwise, more than some limits here.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

NOT_RUN = pytest.StashKey[int]()

# What takes longest comes first: left for the end, one worker would run it while the other waits.
LONGEST = (
    "collectives/test_matrix.py",
    "native/test_native.py",
    "reliability/test_fault_points.py",
    "native/test_call_queue.py",
    "unit/test_gpu_check.py",
    "unit/test_gpu_measuring.py",
    "integrations/test_torch_suite.py",
    "sim/test_sim.py",
    "reliability/test_soak.py",
    "unit/test_cli.py",
    "models/test_models.py",
    "sim/test_nvcc.py",
    "triton_kernels/test_collectives.py",
    "unit/test_install.py",
    "collectives/test_tuned_groups.py",
    "model/test_simulator.py",
    "native/test_fuzz_bytes.py",
    "integrations/test_ops.py",
    "collectives/test_sequences.py",
    "integrations/test_compiled_backend.py",
    "hierarchical/test_hosts.py",
    "hierarchical/test_verbs_on_hosts.py",
    "native/test_bench_programs.py",
    "integrations/test_training.py",
    "hierarchical/test_mpi.py",
    "hierarchical/test_mpi_on_hosts.py",
    "reliability/test_death.py",
    "reliability/test_timeout.py",
    "reliability/test_cleanup.py",
    "model/test_builders.py",
    "model/test_checker.py",
    "triton_kernels/test_compile.py",
)


def why_no_gpu() -> str:
    """Return why the tests marked `gpu` can't run here, "" if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from fastcoll.machine import gpu

    return gpu.problem()


@pytest.hookimpl(trylast=True)  # after the folders have set their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if mine and why_no_gpu():
        config.stash[NOT_RUN] = len(mine)
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]
    order = {str(Path(__file__).parent / name): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


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
    result = harness.Pools()
    yield result
    result.close()


@pytest.fixture(scope="module")
def own_pools() -> Iterator[harness.Pools]:
    """`own_pools(n)` are ranks of this file alone: for GPU calls on the CPU (fake_gpu), since what
    others called would run on the fast path.
    """
    result = harness.Pools()
    yield result
    result.close()


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
