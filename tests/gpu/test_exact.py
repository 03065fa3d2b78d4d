# SPDX-License-Identifier: Apache-2.0
"""Every result on GPUs equals the CPU's, bit for bit: ranks as threads."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fastcoll.choose import algorithms
from fastcoll.machine import gpu
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from fastcoll.types import ITEMSIZE, Algorithm, DType, Verb
from tests.gpu import work
from tests.gpu.work import Case, ops_of, perform

Threads = Callable[[int], GpuRanks]

# Elements: none, one, odd, a pack more or less, LL's end, several segments.
SIZES = (0, 1, 7, 1023, 4096, 65_537)
MOVES = ("all_gather", "broadcast", "gather", "scatter", "all_to_all", *work.UNEVEN)


# Those that change the order, and those that don't take such sizes or ranks of one GPU.
LEFT_OUT = ("ring", "multimem", "direct", "nccl", "copy_engine")


def kernels_of(verb: str, dtype: DType) -> list[str]:
    """The algorithms that have a kernel for this and take every case of these tests."""
    if verb in MOVES:
        return ["auto"]
    return [
        one.name
        for one in algorithms.ALL
        if one.name not in LEFT_OUT and gpu.has_kernel(Algorithm[one.name], Verb[verb], dtype)
    ]


def check(ranks: GpuRanks, cases: list[Case]) -> None:
    assert cases, "there is no kernel for this"
    problems = [text for texts in ranks.run(perform, cases) for text in texts]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:8])


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("verb", work.REDUCTIONS)
def test_every_operation_and_algorithm(threads: Threads, verb: str, dtype: DType) -> None:
    ranks = threads(2)
    cases = [
        Case(verb, dtype, numel, op, algorithm, seed=seed)
        for algorithm in kernels_of(verb, dtype)
        for op in ops_of(dtype)
        for numel in (1, 1023, 20_001)
        for seed in (0, 1)
    ]
    check(ranks, cases)


@pytest.mark.parametrize("verb", [*work.REDUCTIONS, *MOVES])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])  # the outer loop: a group for each is made once
def test_every_size_and_world(threads: Threads, verb: str, world: int) -> None:
    cases = []
    for dtype in (DType.float32, DType.bfloat16, DType.uint8):
        for name in kernels_of(verb, dtype):
            for numel in SIZES:
                root = numel % world if verb in work.ROOTED else 0
                case = Case(verb, dtype, numel, algorithm=name, seed=numel % 7, root=root)
                cases.append(case)
                cases.append(replace(case, offset=1))
                if verb not in ("all_to_all", "broadcast", *work.UNEVEN):
                    cases.append(replace(case, in_place=True, seed=numel % 5 + 1))
    check(threads(world), cases)


@pytest.mark.parametrize("verb", MOVES)
def test_every_type_is_moved(threads: Threads, verb: str) -> None:
    check(threads(3), [Case(verb, dtype, 1001, seed=1) for dtype in DType])


@pytest.mark.parametrize("root", range(4))
def test_every_root(threads: Threads, root: int) -> None:
    cases = [
        Case(verb, DType.float32, numel, root=root, seed=root)
        for verb in work.ROOTED
        for numel in (3, 30_000)
    ]
    check(threads(4), cases)


def test_a_long_sequence_of_mixed_calls(threads: Threads) -> None:
    cases = [
        Case(verb, dtype, numel, in_place=seed % 3 == 0 and verb in work.REDUCTIONS, seed=seed)
        for seed in range(12)
        for verb in (*work.REDUCTIONS, *MOVES)
        for dtype in (DType.float16, DType.int64)
        for numel in (5, 9000)
    ]
    check(threads(4), cases)


def test_a_large_message(threads: Threads) -> None:
    numel = (32 << 20) // ITEMSIZE[DType.float32] + 3
    names = kernels_of("all_reduce", DType.float32)
    cases = [Case("all_reduce", DType.float32, numel, algorithm=name) for name in names]
    moved = [Case(verb, DType.float32, numel // 4) for verb in ("all_gather", "all_to_all")]
    check(threads(4), [*cases, *moved, Case("exchange", DType.float32, numel // 4)])


def test_the_comparison_sees_a_wrong_bit(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one bit of what rank 1 expects is wrong."""
    right = work.expected

    def wrong(me: GpuRank, case: Case, given: torch.Tensor) -> torch.Tensor:
        result = right(me, case, given)
        if me.rank == 1:
            result.view(torch.uint8)[3] ^= 1
        return result

    monkeypatch.setattr(work, "expected", wrong)
    found = threads(2).run(perform, [Case("all_reduce", DType.int32, 1000)])
    assert found[0] == []
    assert "1 bytes differ, first byte 3" in found[1][0]
