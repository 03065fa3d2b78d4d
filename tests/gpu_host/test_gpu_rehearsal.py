# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' own code on the CPU: their cases are well formed, and a wrong result is seen."""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fastcoll.choose import algorithms, select
from fastcoll.group.communicator import Communicator
from fastcoll.measure import gpu_ranks
from fastcoll.measure.gpu_ranks import GpuRanks
from fastcoll.types import DType, Op, Verb
from tests.contract.test_gpu_parts import gathers, messages, shuffles
from tests.gpu import test_exact, test_multimem, test_shapes, test_smoke, work
from tests.gpu_host.gpu_rows import request
from tests.support import perform, sites
from tests.support.calls import REDUCTIONS
from tests.support.draw import VERBS
from tests.support.gpu import ThreadPool, needs_gpu_part
from tests.support.sites import GPU, SITES

CpuThreads = Callable[[int], GpuRanks]


@pytest.fixture
def cpu_threads() -> Iterator[CpuThreads]:
    """`cpu_threads(n)` are n rank threads with their tensors on the CPU."""
    made: list[GpuRanks] = []

    def start(world_size: int) -> GpuRanks:
        made.append(GpuRanks(["cpu"] * world_size))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("verb", VERBS)
def test_every_case_of_the_gpu_tests_runs_where_there_is_none(
    cpu_threads: CpuThreads, verb: str
) -> None:
    site = replace(GPU, world=3, most=40).on(ThreadPool(cpu_threads(3)))
    assert site.check(site.small_calls(verb)) > 10


def test_every_part_of_the_gpu_tests_arrives_where_there_is_none(cpu_threads: CpuThreads) -> None:
    ranks, kinds = cpu_threads(3), [(7, "bfloat16"), (1000, "bool")]
    for steps in (shuffles, gathers, messages):
        assert ranks.run(work.exchange, kinds, steps) == [[]] * 3


@needs_gpu_part
@pytest.mark.parametrize("on_one_gpu", [True, False])
def test_every_exact_case_of_the_gpu_tests_can_be_planned(on_one_gpu: bool) -> None:
    """By the algorithm that it names, on ranks that share one GPU, without NCCL, or have their own.

    One that is refused fails its whole test where there is a GPU.
    """
    gpu_sites = [one.values[0] for one in SITES if one.values[0].perform is sites.perform_on_gpu]
    cases = [
        (site.world, call)
        for site in gpu_sites
        for verb in VERBS
        for call in (*site.small_calls(verb), *site.large_calls(verb))
    ]
    cases += [(4, call) for call in (*test_exact.mixed_calls(), *test_exact.large_calls())]
    requests = {
        request(
            verb=Verb[call.verb],
            dtype=DType[call.dtype],
            op=Op[call.op],
            numel=call.numel,
            root=call.root,
            world_size=world,
            algorithm=call.algorithm,
            ranks_per_gpu=world if on_one_gpu else 1,
            no_nccl="ranks share a GPU" if on_one_gpu else "",
        )
        for world, call in cases
    }
    assert {one.verb.name for one in requests} == set(VERBS)
    assert {one.dtype for one in requests if one.verb.name in REDUCTIONS} == set(DType)
    for asked in requests:
        chosen = select(asked, algorithms.ALL).plan.algorithm
        assert asked.algorithm in ("auto", chosen.name), asked


def test_a_group_that_was_waited_for_in_vain_is_not_used_again(cpu_threads: CpuThreads) -> None:
    ranks = cpu_threads(2)
    ranks.run(lambda me: me.comm.barrier())
    assert not ranks.failed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_ranks, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        ranks.run(lambda me: None)
    assert ranks.failed


@pytest.mark.parametrize("verb", ["gather", "all_to_all", "reduce_scatter"])
def test_a_wrong_part_is_seen(
    cpu_threads: CpuThreads, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Negative control: rank 1 gives something else than what it says."""
    right = perform.make

    def wrong(comm: Any, call: Any, ins: Any, *args: Any) -> Any:
        return right(comm, call, ins + 1 if comm.rank == 1 else ins, *args)

    monkeypatch.setattr(sites, "make", wrong)
    with pytest.raises(AssertionError, match="words differ"):
        work.check(cpu_threads(3), [work.on_device(verb, "float32", 500)])


def test_what_the_smoke_tests_call_runs_where_there_is_no_gpu(
    cpu_threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_smoke, "NUMELS", (5, 1000))
    ranks = cpu_threads(3)
    for algorithm in test_smoke.ALGORITHMS:
        assert ranks.run(test_smoke.all_reduce, algorithm) == [[]] * 3
    assert ranks.run(test_smoke.burst) == [True] * 3
    # Negative control: rank 2 gives something else than what the others expect of it.
    right = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: right(self, *args) * 1.001)
    found = ranks.run(test_smoke.all_reduce, "one_shot")
    assert all("sums are wrong" in text for texts in found for text in texts)
    assert found[0]


def test_what_is_called_with_cupys_arrays_runs_with_numpys(
    cpu_threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", np)
    module = importlib.import_module("tests.gpu.test_arrays")
    monkeypatch.setattr(module, "cupy", np)
    monkeypatch.setattr(module, "own_stream", lambda me: contextlib.nullcontext(stream))
    monkeypatch.setattr(module, "NUMEL", 50)
    ranks = cpu_threads(3)
    assert ranks.run(module.verbs) == [[]] * 3
    assert ranks.run(module.types) == [[]] * 3
    # Negative control: rank 1 gives something else in every call.
    right = np.full

    def wrong(*args: Any, **more: Any) -> Any:
        return right(*args, **more) + 0.5 * (threading.current_thread().name[:5] == "rank1")

    monkeypatch.setattr(np, "full", wrong)
    found = ranks.run(module.verbs)
    assert {"all_reduce", "out", "recv", "all_to_all, 1"} <= set(found[2])


def test_the_switchs_cases_run_where_there_is_none(
    cpu_threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tests/gpu/test_multimem.py: what it expects is what the CPU's algorithms give."""
    monkeypatch.setattr(test_multimem, "BY_SWITCH", {})
    monkeypatch.setattr(test_multimem, "NUMELS", (0, 7, 1023))
    ranks = cpu_threads(3)
    for dtype in test_multimem.DTYPES:
        assert ranks.run(test_multimem.check_all, dtype) == [[]] * 3
    assert ranks.run(test_multimem.beside_others) == [True] * 3
    # Negative control: what is expected of rank 2 is another rank's.
    right = test_multimem.numbers

    def wrong(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return right(numel, 1 if rank == 2 and dtype is torch.float32 else rank, dtype)

    monkeypatch.setattr(test_multimem, "numbers", wrong)
    assert any(ranks.run(test_multimem.check_all, DType.bfloat16))


def test_what_measurements_start_is_looked_at(
    cpu_threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/gpu/test_shapes.py, with the CPU's all_reduce and copies in the kernels' place."""
    theirs: dict[int, torch.Tensor] = {}

    class AllReduce:
        def __init__(self, me: Any, source: Any, out: Any, algorithm: str = "auto") -> None:
            self.call = functools.partial(me.comm.all_reduce, source, out=out, algorithm=algorithm)
            self.floor = lambda: me.comm.barrier

        def launched(self, shape: Any) -> Any:
            return self.call

    def copying(me: Any, step: str, local: Any, symmetric: Any, blocks: int) -> Any:
        return lambda: theirs[1].copy_(local) if step == "put" else local.copy_(theirs[1])

    def empty(self: Any, *args: Any, **more: Any) -> torch.Tensor:
        return theirs.setdefault(self.rank, torch.empty(*args, **more))

    monkeypatch.setattr(test_shapes, "AllReduce", AllReduce)
    monkeypatch.setattr(test_shapes, "copying", copying)
    monkeypatch.setattr(test_shapes, "capture", lambda me, body: SimpleNamespace(replay=body))
    monkeypatch.setattr(Communicator, "empty", empty)
    ranks = cpu_threads(2)
    assert ranks.run(test_shapes.sums) == [[], []]
    assert ranks.run(test_shapes.copied, "put") == [False, True]
    assert ranks.run(test_shapes.copied, "get") == [True, False]
    # Negative controls: nothing is copied, and what is launched has no result.
    monkeypatch.setattr(test_shapes, "copying", lambda *args: lambda: None)
    assert ranks.run(test_shapes.copied, "put") == [False, False]
    monkeypatch.setattr(AllReduce, "launched", lambda self, shape: lambda: None)
    assert all("two_shot, 3" in " ".join(texts) for texts in ranks.run(test_shapes.sums))
