# SPDX-License-Identifier: Apache-2.0
"""`then=TritonEpilogue(...)` on a GPU made of the CPU: the plain call, then Triton's interpreter.

The kernel of the step is the one that Triton compiles (tests/triton/test_compile.py). Expected is
the plain call of the same group and then the step in NumPy, bit for bit. A GPU alone shows a
capture of the two kernels (tests/gpu/test_epilogues.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fastcoll
from fastcoll import ReduceOp
from tests.gpu_host.test_gpu_arrays import THEIRS, CuPy
from tests.support import oracle
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank, attempt
from tests.support.sites import NCCL_CARRIES, group_on_fake_gpu, group_on_fake_node_gpus
from tests.triton.ranks import bits_of

pytestmark = [needs_gpu_part, pytest.mark.long]

SHAPE = (6, 40)
COLUMNS = SHAPE[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """One reduction and its step: "square", of elements, or "below", of rows.

    Attributes:
        out: The dtype of the output.
        kind: Where the output lies: "place", in the input; "private"; "strided".
    """

    verb: str = "all_reduce"
    dtype: str = "float32"
    out: str = "float32"
    step: str = "square"
    kind: str = "private"
    op: Any = ReduceOp.SUM
    options: Any = dataclasses.field(default_factory=dict)
    is_async: bool = False


def input_of(case: Case, rank: int, world: int) -> torch.Tensor:
    rows = SHAPE[0] * (world if case.verb == "reduce_scatter" else 1)
    random = np.random.default_rng([7, rank])
    numbers = (
        random.standard_normal((rows, COLUMNS)) * np.exp2(random.integers(-6, 3, rows))[:, None]
    )
    return torch.from_numpy(numbers).to(getattr(torch, case.dtype))


def output_of(case: Case, source: torch.Tensor) -> torch.Tensor:
    if case.kind == "place":
        return source
    dtype = getattr(torch, case.out)
    if case.kind == "strided":
        return torch.zeros(SHAPE[::-1], dtype=dtype).t()
    return torch.zeros(SHAPE, dtype=dtype)


def step_of(case: Case, rank: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return an epilogue and what it makes of numbers; ranks have different ones."""
    from tests.triton import users_epilogue

    if case.step == "below":
        factor = 1.0 + rank
        then = fastcoll.TritonEpilogue(users_epilogue.below_largest, (factor,), by_rows=True)
        return then, lambda v: (v.max(1, keepdims=True) - v) * np.float32(factor)
    addend = torch.from_numpy(np.random.default_rng(rank).standard_normal(SHAPE, np.float32))
    rows = torch.full(SHAPE, -1)
    then = fastcoll.TritonEpilogue(users_epilogue.square_plus, (addend, rows), by_rows=True)
    return then, lambda v: v * v + addend.numpy()


def call(comm: Any, case: Case, source: Any, out: Any, then: Any = None) -> None:
    options = {**case.options, "async_op": case.is_async, "then": then}
    if case.verb == "reduce_scatter":
        work = comm.reduce_scatter_tensor(out, source, case.op, **options)
    else:
        out = None if out is source else out
        work = comm.all_reduce(source, case.op, out=out, **options)
    if case.is_async:
        work.wait()


def problems(comm: Any, cases: list[Case]) -> list[str]:
    """Make each call plainly and with its step; return what is wrong."""
    wrong = []
    for case in cases:
        source = input_of(case, comm.rank, comm.world_size)
        plain = torch.zeros(SHAPE, dtype=source.dtype)
        call(comm, case, source.clone(), plain)
        out = output_of(case, source)
        then, numbers = step_of(case, comm.rank)
        call(comm, case, source, out, then)
        values = numbers(oracle.decode(bits_of(plain), case.dtype).reshape(SHAPE))
        want = oracle.encode(np.asarray(values, np.float32).reshape(-1), case.out)
        if not np.array_equal(bits_of(out.contiguous()), want):
            wrong.append(str(case))
        if (
            case.step == "square"
            and not (then.args[1].numpy() == np.arange(SHAPE[0])[:, None]).all()
        ):
            wrong.append(f"rows of {case}")
    return wrong


FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")]
FORMATS += [("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"), ("float64", "float32")]
CASES = [
    Case(verb, dtype, out, step)
    for verb in ("all_reduce", "reduce_scatter")
    for dtype, out in FORMATS
    for step in ("square", "below")
]
CASES += [
    Case(kind=kind, dtype=one, out=one)
    for kind in ("place", "strided")
    for one in ("float32", "bfloat16")
]
CASES += [
    Case(op=op, is_async=True, step="below") for op in (ReduceOp.AVG, ReduceOp.MAX, "product")
]
CASES += [Case(options={"algorithm": name}) for name in ("one_shot", "two_shot")]


def by_kernels(rank: Rank, options: dict[str, Any]) -> tuple[list[str], int]:
    with group_on_fake_gpu(rank, **options) as (comm, core):
        cases = [one for one in CASES if not (one.options and options)]
        return problems(comm, cases), len(core.log)


@pytest.mark.parametrize("options", [{}, NCCL_CARRIES], ids=["kernels", "nccl"])
def test_the_bits_of_the_plain_call_and_then_the_function(
    triton_pools: Pools, options: dict[str, Any]
) -> None:
    for wrong, launches in triton_pools(2).run(by_kernels, options):
        assert wrong == []
        assert launches > 10


def over_nodes(rank: Rank) -> list[str]:
    with group_on_fake_node_gpus(rank) as (comm, _):
        return problems(comm, [one for one in CASES if not one.options])


def test_the_bits_over_nodes(triton_pools: Pools) -> None:
    assert triton_pools("aab").run(over_nodes) == [[]] * 3


def a_wrong_step(rank: Rank) -> list[str]:
    """Let the step of rank 1 get a result of which one element is off."""
    from fastcoll_kernels import apply

    real = apply.apply

    def off_by_one(tensor: Any, *rest: Any) -> Any:
        if rank.rank == 1:
            tensor.view(torch.int32)[2, 3] ^= 1 << 12
        return real(tensor, *rest)

    with group_on_fake_gpu(rank) as (comm, _), mock.patch.object(apply, "apply", off_by_one):
        return problems(comm, [Case(kind="place")])


def test_a_wrong_bit_is_seen(triton_pools: Pools) -> None:
    right, wrong = triton_pools(2).run(a_wrong_step)
    assert right == []
    assert len(wrong) == 1


def integers(rank: Rank) -> list[list[int]]:
    from tests.triton.users_epilogue import times

    with group_on_fake_gpu(rank) as (comm, _):
        found = []
        for dtype in (torch.int32, torch.int64, torch.uint8):
            tensor = torch.arange(5, dtype=dtype)
            comm.all_reduce(tensor, then=fastcoll.TritonEpilogue(times, (3,)))
            empty = torch.zeros(0, dtype=dtype)
            comm.all_reduce(empty, then=fastcoll.TritonEpilogue(times, (3,)))
            found.append(tensor.tolist())
        return found


def test_integers_stay_integers(triton_pools: Pools) -> None:
    assert triton_pools(2).run(integers) == [[[0, 6, 12, 18, 24]] * 3] * 2


# ---- streams -------------------------------------------------------------------------------------


def streams(rank: Rank) -> list[bool]:
    """The step runs in the stream of its call, and the call uses the step's tensors there."""
    from tests.triton.users_epilogue import plus_first

    with group_on_fake_gpu(rank) as (comm, core):
        side, used = comm._gpus.group, []
        side._streams.use = lambda ptr, stream: used.append((ptr, stream))
        addend, right = torch.ones(1), []
        for stream, tensor, is_async in (
            (core.streams.made[0], torch.ones(5), False),
            (side.side_stream, torch.ones(5), True),
            (core.streams.ExternalStream(THEIRS, 0), CuPy(torch.ones(5)), False),
        ):
            then = fastcoll.TritonEpilogue(plus_first, (addend,))
            work = comm.all_reduce(tensor, then=then, async_op=is_async)
            if work is not None:
                work.wait()
            right.append(core.streams.entered[-1] is stream)
            right.append((addend.data_ptr(), stream) in used)
            right.append(bool((getattr(tensor, "tensor", tensor) == comm.world_size + 1).all()))
        return right


def test_the_step_runs_in_the_stream_of_its_call(triton_pools: Pools) -> None:
    assert triton_pools(2).run(streams) == [[True] * 9] * 2


# ---- compiling -----------------------------------------------------------------------------------


class Code:
    """Compiled code as Triton has it: on the device once its launcher was asked for."""

    def __init__(self) -> None:
        self.module: Any = None

    @property
    def run(self) -> str:
        self.module = "loaded"
        return "launcher"


@contextlib.contextmanager
def compiler(code_of: Callable[..., Any]) -> Iterator[None]:
    from fastcoll_kernels import apply

    with mock.patch.object(apply, "code_of", code_of):
        yield


def in_a_capture(rank: Rank) -> list[Any]:
    """A step that is not loaded is refused in a capture; `prepare` loads it."""
    from tests.triton.users_epilogue import times

    made: list[Code] = []

    def code_of(*args: Any) -> Code:
        made.append(Code())
        return made[-1]

    tensor, then = torch.ones(3, 16), fastcoll.TritonEpilogue(times, (2.0,))
    with group_on_fake_gpu(rank) as (comm, core), compiler(code_of):
        core.streams.captured = True
        early = attempt(comm.all_reduce, tensor, then=then)
        before = len(core.log), made[0].module, tensor.sum().item()
        core.streams.captured = False
        fastcoll.prepare(tensor, then=then, group=comm)
        loaded = made[-1].module
        core.streams.captured = True
        comm.all_reduce(tensor, then=then)
        comm.all_reduce(tensor, then=then)
        other = attempt(comm.all_reduce, torch.ones(7), then=then)
        return [early, before, loaded, tensor.sum().item(), len(core.log), len(made), other]


def test_what_a_capture_needs_is_prepared(triton_pools: Pools) -> None:
    for early, before, loaded, total, launches, made, other in triton_pools(2).run(in_a_capture):
        assert early.kind == other.kind == "UsageError"
        assert "fastcoll.prepare" in early.text
        assert before == (0, None, 48.0), "something was launched, or loaded"
        assert loaded == "loaded"
        assert total == 48.0 * 4 * 4
        assert launches == 2
        assert made == 3, "one for each try that found none loaded"


def failing(rank: Rank) -> list[Any]:
    """Rank 1 can't compile: `prepare` raises on all ranks, a call on that rank, unsent."""
    from tests.triton.users_epilogue import times

    def code_of(*args: Any) -> Code:
        if rank.rank == 1:
            raise RuntimeError("no such intrinsic")
        return Code()

    tensor, then = torch.ones(4), fastcoll.TritonEpilogue(times, (2.0,))
    with group_on_fake_gpu(rank) as (comm, core), compiler(code_of):
        prepared = attempt(fastcoll.prepare, tensor, then=then, group=comm)
        alone = attempt(comm.all_reduce, tensor, then=then) if rank.rank == 1 else None
        launches = len(core.log)
        comm.all_reduce(tensor)
        return [prepared, alone, launches, tensor.tolist()]


def test_a_rank_that_cannot_compile_tells_all(triton_pools: Pools) -> None:
    rows = triton_pools(2).run(failing)
    for prepared, _, launches, values in rows:
        assert prepared.kind == "UsageError"
        assert (
            "rank 1: the function of then can't be compiled for float32: no such" in prepared.text
        )
        assert launches == 0
        assert values == [2.0] * 4
    assert rows[1][1].kind == "UsageError"
