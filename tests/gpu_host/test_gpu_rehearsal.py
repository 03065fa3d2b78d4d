# SPDX-License-Identifier: Apache-2.0
"""The GPU tests' own code on the CPU: their cases are well formed, and a wrong result is seen."""

import contextlib
import functools
import importlib
import inspect
import itertools
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fastcoll.choose import algorithms, select
from fastcoll.group.communicator import Communicator
from fastcoll.machine import gpu
from fastcoll.measure import gpu_ranks
from fastcoll.measure.gpu_ranks import GpuRanks
from fastcoll.types import DType, Op, Request, Verb
from tests.gpu import test_exact, test_multimem, test_shapes, test_smoke, work
from tests.gpu.work import Case

VERBS = ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "gather", "scatter")
VERBS += ("all_to_all", *work.UNEVEN)


def test_every_case_of_the_gpu_tests_runs_where_there_is_none() -> None:
    cases = [
        Case(verb, dtype, numel, in_place=in_place, offset=seed % 2, seed=seed, root=seed % 3)
        for verb in VERBS
        for dtype in (DType.float32, DType.complex64)
        for numel in (0, 1, 1001)
        for seed, in_place in enumerate((False, True))
        if not in_place or verb not in ("all_to_all", *work.UNEVEN)
    ]
    ranks = GpuRanks(["cpu"] * 3)
    try:
        assert ranks.run(work.perform, cases) == [[]] * 3
    finally:
        ranks.close()


class Recorded:
    """What stands for `threads` of tests/gpu: notes the cases, and finds nothing wrong."""

    def __init__(self) -> None:
        self.cases: list[tuple[int, Case]] = []

    def __call__(self, world_size: int) -> SimpleNamespace:
        def run(_: Any, cases: list[Case]) -> list[list[str]]:
            self.cases += [(world_size, case) for case in cases]
            return [[]] * world_size

        return SimpleNamespace(run=run)


def exact_cases() -> list[tuple[int, Case]]:
    """Every case of tests/gpu/test_exact.py, with the size of its group."""
    recorded = Recorded()
    for name, function in vars(test_exact).items():
        if not name.startswith("test_") or "monkeypatch" in inspect.signature(function).parameters:
            continue
        marks = [mark.args for mark in getattr(function, "pytestmark", [])]
        names = [argument for argument, _ in marks]
        for values in itertools.product(*(values for _, values in marks)):
            function(recorded, **dict(zip(names, values, strict=True)))
    return recorded.cases


@pytest.mark.skipif(
    "built without" in gpu.problem(), reason="not run: this build has no GPU part (no nvcc)"
)
@pytest.mark.parametrize("on_one_gpu", [True, False])
def test_every_exact_case_of_the_gpu_tests_can_be_planned(on_one_gpu: bool) -> None:
    """By the algorithm that it names, on ranks that share one GPU, without NCCL, or have their own.

    One that is refused fails its whole test where there is a GPU.
    """
    requests = {
        Request(
            Verb[case.verb], case.dtype, Op[case.op], case.numel, case.root, world, case.algorithm,
            "same_bits", world, num_channels=16, ranks_per_gpu=world if on_one_gpu else 1,
            no_nccl="ranks share a GPU" if on_one_gpu else "",
        )
        for world, case in exact_cases()
        if case.verb in Verb.__members__
    }  # fmt: skip
    assert {one.verb.name for one in requests} >= set(VERBS) - set(work.UNEVEN)
    for request in requests:
        chosen = select(request, algorithms.ALL).plan.algorithm
        assert request.algorithm in ("auto", chosen.name), request


def test_a_group_that_was_waited_for_in_vain_is_not_used_again() -> None:
    ranks = GpuRanks(["cpu"] * 2)
    try:
        ranks.run(lambda me: me.comm.barrier())
        assert not ranks.failed
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(gpu_ranks, "wait", mock.Mock(side_effect=KeyboardInterrupt))
            ranks.run(lambda me: None)
        assert ranks.failed
    finally:
        ranks.close()


@pytest.mark.parametrize("verb", ["gather", "all_to_all_splits", "exchange"])
def test_a_wrong_part_is_seen(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Negative control: rank 1 gives something else than what it says."""
    real = work.call

    def wrong(comm, case, source, target, **more):
        if comm.rank == 1 and not getattr(comm, "spoilt", False):
            comm.spoilt = True
            source = source + 1
        return real(comm, case, source, target, **more)

    monkeypatch.setattr(work, "call", wrong)
    ranks = GpuRanks(["cpu"] * 3)
    try:
        found = ranks.run(work.perform, [Case(verb, DType.float32, 500)])
    finally:
        ranks.close()
    assert any("bytes differ" in text for texts in found for text in texts)


def test_what_the_smoke_tests_call_runs_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_smoke, "NUMELS", (5, 1000))
    ranks = GpuRanks(["cpu"] * 3)
    try:
        for algorithm in test_smoke.ALGORITHMS:
            assert ranks.run(test_smoke.all_reduce, algorithm) == [[]] * 3
        assert ranks.run(test_smoke.burst) == [True] * 3
        # Negative control: rank 2 gives something else than what the others expect of it.
        right = torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: right(self, *args) * 1.001)
        found = ranks.run(test_smoke.all_reduce, "one_shot")
    finally:
        ranks.close()
    assert all("sums are wrong" in text for texts in found for text in texts)
    assert found[0]


def test_what_is_called_with_cupys_arrays_runs_with_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", np)
    module = importlib.import_module("tests.gpu.test_arrays")
    monkeypatch.setattr(module, "cupy", np)
    monkeypatch.setattr(module, "own_stream", lambda me: contextlib.nullcontext(stream))
    monkeypatch.setattr(module, "NUMEL", 50)
    ranks = GpuRanks(["cpu"] * 3)
    try:
        assert ranks.run(module.verbs) == [[]] * 3
        assert ranks.run(module.types) == [[]] * 3
        # Negative control: rank 1 gives something else in every call.
        right = np.full

        def wrong(*args, **more):
            return right(*args, **more) + 0.5 * (threading.current_thread().name[:5] == "rank1")

        monkeypatch.setattr(np, "full", wrong)
        found = ranks.run(module.verbs)
        assert {"all_reduce", "out", "recv", "all_to_all, 1"} <= set(found[2])
    finally:
        ranks.close()


def test_the_switchs_cases_run_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tests/gpu/test_multimem.py: what it expects is what the CPU's algorithms give."""
    monkeypatch.setattr(test_multimem, "BY_SWITCH", {})
    monkeypatch.setattr(test_multimem, "NUMELS", (0, 7, 1023))
    ranks = GpuRanks(["cpu"] * 3)
    try:
        for dtype in test_multimem.DTYPES:
            assert ranks.run(test_multimem.check_all, dtype) == [[]] * 3
        assert ranks.run(test_multimem.beside_others) == [True] * 3
        # Negative control: what is expected of rank 2 is another rank's.
        right = test_multimem.numbers

        def wrong(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
            return right(numel, 1 if rank == 2 and dtype is torch.float32 else rank, dtype)

        monkeypatch.setattr(test_multimem, "numbers", wrong)
        assert any(ranks.run(test_multimem.check_all, DType.bfloat16))
    finally:
        ranks.close()


def test_what_measurements_start_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ranks = GpuRanks(["cpu"] * 2)
    try:
        assert ranks.run(test_shapes.sums) == [[], []]
        assert ranks.run(test_shapes.copied, "put") == [False, True]
        assert ranks.run(test_shapes.copied, "get") == [True, False]
        # Negative controls: nothing is copied, and what is launched has no result.
        monkeypatch.setattr(test_shapes, "copying", lambda *args: lambda: None)
        assert ranks.run(test_shapes.copied, "put") == [False, False]
        monkeypatch.setattr(AllReduce, "launched", lambda self, shape: lambda: None)
        assert all("two_shot, 3" in " ".join(texts) for texts in ranks.run(test_shapes.sums))
    finally:
        ranks.close()
