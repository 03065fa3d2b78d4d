# SPDX-License-Identifier: Apache-2.0
"""The copy engines' sums by Triton's kernel: the CPU's bits; CUDA's where it can't be had.

The driver and its streams are those of test_gpu_copies.py, and Triton runs by its interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fastcoll.native import _C
from fastcoll.types import DType, Op
from tests.gpu_host import test_gpu_copies as copies
from tests.gpu_host.test_gpu_epilogues import Code
from tests.support import oracle
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank

pytestmark = [needs_gpu_part, pytest.mark.long]

KINDS = [
    (DType.float32, Op.SUM),
    (DType.bfloat16, Op.AVG),
    (DType.float16, Op.MIN),
    (DType.float64, Op.PRODUCT),
    (DType.int64, Op.MAX),
    (DType.uint8, Op.BXOR),
    (DType.float8_e4m3fn, Op.SUM),
]


def a_plan(dtype: DType, op: Op) -> Any:
    return _C.Plan(0, int(dtype), int(op), 9, 1000, 0, 0, False, False, 0, 16)


@contextmanager
def on_the_cpu(sums: Any, log: list[str], captured: bool = False) -> Iterator[None]:
    """Let CPU memory pass for a GPU's; log the sums that CUDA's kernel would make."""
    from tests.support.fake_gpu import _bytes_at

    def add(*args: Any) -> None:
        log.append("CUDA")

    cuda = SimpleNamespace(device=lambda index: nullcontext())
    names = {"torch": SimpleNamespace(cuda=cuda, device=lambda *_: "cpu", empty=torch.empty)}
    names |= {"bytes_at": _bytes_at, "add_parts": add, "say": log.append}
    with mock.patch.multiple(sums, **names):
        yield


def add_all(rank: Rank, num_parts: int) -> list[str]:
    """Return the kinds of sums that have wrong bits, or that Triton's kernel did not make."""
    from fastcoll.gpu import sums as module

    wrong, log = [], []
    draw = torch.Generator().manual_seed(rank.rank)
    with on_the_cpu(module, log):
        sums = module.Sums(0)
        for dtype, op in KINDS:
            plan = a_plan(dtype, op)
            sums.make_ready(plan, num_parts, captured=False)
            for numel in (1, 16, 333, 4096):
                kind, size = module.TORCH_DTYPES[dtype], (num_parts, 4096)
                rows = (torch.randn(size, generator=draw) * 9).to(kind)
                out = torch.zeros(numel, dtype=kind)
                sums.add(plan, [row.data_ptr() for row in rows], out.data_ptr(), numel, 0)
                words = [copies.raw(row[:numel]).view(oracle.word_of(dtype.name)) for row in rows]
                want = oracle.reduce(words, dtype.name, op.name, num_parts)
                if not (copies.raw(out) == want.view("uint8")).all():
                    wrong.append(f"{dtype.name} {op.name} {numel}")
    return wrong + log


def test_the_bits_of_the_cpu(triton_pools: Pools) -> None:
    assert triton_pools(2).run(add_all, 3) == [[], []]


def in_reverse(rank: Rank) -> list[str]:
    from fastcoll_kernels import reduce

    right = reduce.reduce
    with mock.patch.object(reduce, "reduce", lambda parts, *rest: right(parts[::-1], *rest)):
        return add_all(rank, 3)


def test_another_order_is_seen(triton_pools: Pools) -> None:
    for wrong in triton_pools(2).run(in_reverse):
        assert "float32 SUM 4096" in wrong
        assert "uint8 BXOR 4096" not in wrong, "which has no order"


# ---- who adds ------------------------------------------------------------------------------------


def who_adds(rank: Rank) -> dict[str, list[str]]:
    """The kernels that add: in a capture, behind a compiler that fails, without Triton."""
    from fastcoll.gpu import sums as module
    from fastcoll_kernels import reduce

    plan, room = a_plan(*KINDS[0]), torch.zeros(16)
    found = {}

    def fails(*args: Any) -> Any:
        raise RuntimeError("no such machine")

    def run(name: str, code_of: Callable[..., Any], captured: bool) -> None:
        log: list[str] = []
        by_triton = mock.patch.object(reduce, "reduce", lambda *args: log.append("Triton"))
        with on_the_cpu(module, log), mock.patch.object(reduce, "code_of", code_of), by_triton:
            sums = module.Sums(0)
            for is_captured in (captured, False, True):
                sums.make_ready(plan, 2, captured=is_captured)
                sums.add(plan, [room.data_ptr()] * 2, room.data_ptr(), 16, 0)
        found[name] = log

    run("eager", lambda *args: Code(), False)
    run("captured", lambda *args: Code(), True)
    run("fails", fails, False)
    with mock.patch.object(module, "find_spec", lambda name: None):
        run("without", fails, False)
    log: list[str] = []
    by_triton = mock.patch.object(reduce, "reduce", lambda *args: log.append("Triton"))
    with on_the_cpu(module, log), mock.patch.object(reduce, "code_of", of_packs), by_triton:
        sums, room = module.Sums(0), torch.zeros(64)
        sums.make_ready(plan, 2, captured=False)
        for numel in (1, 7, 16, 33, 48):
            sums.add(plan, [room.data_ptr()] * 2, room.data_ptr(), numel, 0)
    found["of packs"] = [one for one in log if "adds in place" not in one]
    return found


def of_packs(parts: Any, out: torch.Tensor, op: str) -> Code:
    """Triton's compiler makes code of its own for a multiple of 16; here it fails for others."""
    if out.numel() % 16:
        raise RuntimeError("no such machine")
    return Code()


def test_cudas_kernel_adds_where_tritons_is_not_loaded(triton_pools: Pools) -> None:
    for found in triton_pools(2).run(who_adds):
        assert found["eager"] == ["Triton"] * 3
        assert found["captured"] == ["CUDA", "Triton", "Triton"]
        assert found["without"] == ["CUDA"] * 3
        assert found["of packs"] == ["CUDA", "CUDA", "Triton", "CUDA", "Triton"]
        said = "CUDA's kernel adds in place of Triton's, which can't be had: no such machine"
        assert found["fails"] == [said, *3 * ["CUDA"]]


# ---- in the algorithm ----------------------------------------------------------------------------


def by_copy_engines(rank: Rank) -> tuple[bool, int, list[int]]:
    """Calls of the algorithm whose streams run in a drawn order, with sums by Triton.

    Also what each rank had started when it got Triton's code ready.
    """
    from fastcoll.gpu import sums as module
    from fastcoll_kernels import reduce

    right, by_triton = reduce.reduce, []

    def queued(self: Any, plan: Any, parts: Any, target: int, numel: int, stream: int) -> None:
        driver = copies.device_copies.torch.cuda.now.driver

        def run() -> bool:
            add(self, plan, parts, target, numel, stream)
            return True

        driver.streams[stream].ops.append(run)

    def counted(*args: Any) -> Any:
        by_triton.append(args)
        return right(*args)

    def get_ready(self: Any, plan: Any, *parts: Any, captured: bool) -> None:
        log_of_rank = copies.device_copies.torch.cuda.now.driver.log[self._device]
        started.append(len(log_of_rank))
        make_ready(self, plan, *parts, captured=captured)

    add, make_ready, started, log = module.Sums.add, module.Sums.make_ready, [], []
    with pytest.MonkeyPatch.context() as patch, on_the_cpu(module, log):
        patch.setattr(module.Sums, "add", queued)
        patch.setattr(module.Sums, "make_ready", get_ready)
        patch.setattr(reduce, "reduce", counted)
        copies.put_cuda(patch)
        found = copies.calls(3, rank.rank, numels=(2501,))
    return all(found) and log == [], len(by_triton), started


def test_the_algorithm_adds_by_triton(triton_pools: Pools) -> None:
    for is_right, number, started in triton_pools(2).run(by_copy_engines):
        assert is_right
        assert number > 10
        assert started == [0, 0, 0], "a rank compiled while others waited for it"
