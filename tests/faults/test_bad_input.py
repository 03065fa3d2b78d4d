# SPDX-License-Identifier: Apache-2.0
"""Arguments that make no sense: an error of the right kind, nothing sent, the next call works.

Each mistake is made before and after good calls of the same shape, because a call that the library
knows takes a shorter way through it, and on one rank alone, because the others must not notice.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.types import DType
from tests.support.harness import Attempt, Pools, Rank, attempt

POISON = -7.0
FOREIGN_DTYPES = {"float8_e8m0fnu", "complex32"} - {dtype.name for dtype in DType}
Mistake = tuple[Callable[[Any], Any], str, tuple[str, ...]]  # the call, the error, words of it


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 1, dtype=dtype)


def all_reduce(tensor: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda comm: comm.all_reduce(tensor, *args, **options)


def mistakes(world: int) -> dict[str, Mistake]:
    """By name; every tensor is made here, so that it can be looked at afterwards."""
    usage, unsupported = "UsageError", "UnsupportedError"
    line, six = torch.arange(12.0), filled(6)
    scatter = lambda output, given, **options: (  # noqa: E731
        lambda comm: comm.reduce_scatter_tensor(output, given, **options)
    )
    gather = lambda output, given: (  # noqa: E731
        lambda comm: comm.all_gather_into_tensor(output, given)
    )
    fixed = np.ones(6, np.float32)
    fixed.setflags(write=False)
    op = dist.ReduceOp
    return {
        "unknown algorithm": (
            all_reduce(six, algorithm="fast"),
            usage,
            ("fast", "one_shot", "two_shot", "ring", "chain"),
        ),
        "algorithm of moves": (all_reduce(six, algorithm="direct"), unsupported, ("direct",)),
        "algorithm is no text": (all_reduce(six, algorithm=3), usage, ("algorithm", "3")),
        "algorithm cannot be hashed": (all_reduce(six, algorithm=["ring"]), usage, ("algorithm",)),
        "algorithm is None": (all_reduce(six, algorithm=None), usage, ("algorithm", "None")),
        "unknown numerics": (all_reduce(six, numerics="exact"), usage, ("numerics", "exact")),
        "numerics auto": (all_reduce(six, numerics="auto"), usage, ("numerics", "auto")),
        "limit 0": (all_reduce(six, timeout_s=0), usage, ("timeout_s", "0")),
        "limit -1": (all_reduce(six, timeout_s=-1), usage, ("timeout_s", "-1")),
        "limit nan": (all_reduce(six, timeout_s=float("nan")), usage, ("timeout_s", "nan")),
        "limit auto": (all_reduce(six, timeout_s="auto"), usage, ("timeout_s", "auto")),
        "limit in text": (all_reduce(six, timeout_s="3"), usage, ("timeout_s", "'3'")),
        "limit True": (all_reduce(six, timeout_s=True), usage, ("timeout_s", "True")),
        "limit in text, as torch's": (
            lambda comm: fastcoll.barrier(comm, timeout="3"),  # type: ignore[arg-type]
            usage,
            ("number of seconds", "'3'"),
        ),
        "limit of a monitored barrier": (
            lambda comm: comm.monitored_barrier(timedelta(0)),
            usage,
            ("number of seconds", "timedelta(0)"),
        ),
        "two limits": (
            lambda comm: fastcoll.barrier(comm, timeout=timedelta(1), timeout_s=1),
            usage,
            ("timeout or timeout_s",),
        ),
        "AVG of integers": (
            all_reduce(filled(6, dtype=torch.int32), op.AVG),
            unsupported,
            ("AVG", "int32", "SUM"),
        ),
        "BAND of floats": (all_reduce(six, op.BAND), unsupported, ("BAND", "float32", "SUM")),
        "MAX of complex": (
            all_reduce(filled(6, dtype=torch.complex64), op.MAX),
            unsupported,
            ("MAX", "complex64", "SUM"),
        ),
        "PREMUL_SUM": (
            all_reduce(six, dist._make_nccl_premul_sum(2.0)),
            unsupported,
            ("PREMUL_SUM", "SUM"),
        ),
        "op is a text": (all_reduce(six, "sum"), usage, ("op", "sum")),
        "op is a number": (all_reduce(six, 0), usage, ("op", "0")),
        "op is None": (all_reduce(six, None), usage, ("op", "None")),
        "op cannot be hashed": (all_reduce(six, []), usage, ("op",)),
        "out of another shape": (all_reduce(six, out=filled(5)), usage, ("out", "shape")),
        "out of as many elements": (all_reduce(six, out=filled(2, 3)), usage, ("out", "shape")),
        "out of another dtype": (
            all_reduce(six, out=filled(6, dtype=torch.int32)),
            usage,
            ("float32", "int32"),
        ),
        "out overlaps in part": (all_reduce(line[:6], out=line[1:7]), usage, ("overlap", "part")),
        "out overlaps every second": (
            all_reduce(line[:6], out=line[::2]),
            usage,
            ("overlap", "part"),
        ),
        "out overlaps backwards": (
            all_reduce(line[:6].view(2, 3), out=line[:6].view(3, 2).t()),
            usage,
            ("overlap", "part"),
        ),
        "in place, elements shared": (
            all_reduce(filled(1).expand(6)),
            usage,
            ("tensor is expanded", "clone"),
        ),
        "rows that overlap": (
            lambda comm: comm.all_reduce(torch.ones(8).as_strided((2, 3), (2, 1))),
            usage,
            ("elements share memory", "clone"),
        ),
        "columns that overlap": (
            lambda comm: comm.all_reduce(torch.ones(13).as_strided((3, 4), (3, 2))),
            usage,
            ("elements share memory", "clone"),
        ),
        "out, elements shared": (
            all_reduce(six, out=filled(1).expand(6)),
            usage,
            ("expanded", "clone"),
        ),
        "read-only": (all_reduce(fixed), usage, ("tensor is read-only",)),
        "a list": (all_reduce([1.0]), usage, ("tensor", "list")),
        "elements shared in an array": (
            all_reduce(np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (4, 3), (4, 4))),
            usage,
            ("elements share memory", "clone"),
        ),
        "meta": (
            all_reduce(torch.empty(6, device="meta")),
            unsupported,
            ("meta", "torch.empty_like"),
        ),
        "quantised": (
            all_reduce(torch._empty_affine_quantized([6], scale=0.1, dtype=torch.qint8)),
            unsupported,
            ("quantized", "int_repr()", "dequantize()"),
        ),
        "masked": (
            all_reduce(np.ma.masked_array(np.ones(6, np.float32), mask=[True] + 5 * [False])),
            unsupported,
            ("masked", "filled(value)"),
        ),
        "sparse": (all_reduce(torch.eye(3).to_sparse()), unsupported, ("sparse", "to_dense")),
        "nested": (
            all_reduce(torch.nested.nested_tensor([six, filled(2)])),
            unsupported,
            ("nested", "unbind"),
        ),
        "freed": (all_reduce(with_storage(filled(6), 0)), usage, ("24 bytes", "has 0", "freed")),
        "freed, strided": (all_reduce(with_storage(filled(2, 3).t(), 0)), usage, ("24", "freed")),
        "storage cut short": (
            all_reduce(with_storage(filled(2, 4).t(), 28)),
            usage,
            ("32 bytes", "has 28"),
        ),
        "out freed": (all_reduce(six, out=with_storage(filled(6), 0)), usage, ("out", "freed")),
        "inside vmap": (
            lambda comm: torch.vmap(_reduced(comm))(filled(2, 3)),
            unsupported,
            ("memory", "torch.func"),
        ),
        "inside functionalize": (
            lambda comm: torch.func.functionalize(_reduced(comm))(six),
            unsupported,
            ("memory", "torch.func"),
        ),
        "other byte order": (
            all_reduce(np.ones(6, ">f4")),
            unsupported,
            ("byte order", "astype('float32')"),
        ),
        **{
            name: (
                all_reduce(torch.empty(6, dtype=getattr(torch, name))),
                unsupported,
                (name, "float32", "float8_e5m2"),
            )
            for name in FOREIGN_DTYPES
        },
        "input too small": (scatter(six, filled(6 * world + 1)), usage, ("input", f"{6 * world}")),
        "output too large": (scatter(filled(7), filled(6)), usage, ("input", f"{7 * world}")),
        "scatter, dtypes differ": (
            scatter(six, filled(6 * world, dtype=torch.float64)),
            usage,
            ("float32", "float64"),
        ),
        "scatter, overlap": (
            lambda comm: comm.reduce_scatter_tensor(line[1:3], line[: 2 * world]),
            usage,
            ("overlap", "part"),
        ),
        "gathered too small": (
            gather(filled(6 * world - 1), six),
            usage,
            ("output_tensor", f"{6 * world}"),
        ),
        "gather, dtypes differ": (
            gather(filled(6 * world, dtype=torch.int8), six),
            usage,
            ("float32", "int8"),
        ),
        "root too large": (lambda comm: comm.broadcast(six, world), usage, (f"src={world}",)),
        "root negative": (lambda comm: comm.broadcast(six, -1), usage, ("src=-1",)),
        "root is no number": (lambda comm: comm.broadcast(six, "0"), usage, ("src", "0")),
        "root is a float": (lambda comm: comm.broadcast(six, 0.0), usage, ("src", "0.0")),
        "group of another kind": (_with_group("world"), usage, ("group", "Communicator", "str")),
        "fraction of an element": (lambda comm: comm.empty([2.7]), usage, ("integers", "2.7")),
        "shape is a fraction": (lambda comm: comm.empty(2.5), usage, ("integers", "2.5")),
        "dtype is a text": (
            lambda comm: comm.empty(3, dtype="float32"),
            usage,
            ("torch.dtype", "float32"),
        ),
        "fraction of a rank": (lambda comm: comm.new_group([0.5]), usage, ("ranks", "0.5")),
        "rank as a text": (lambda comm: comm.new_group("0"), usage, ("ranks", "integers")),
        "ranks is a number": (lambda comm: comm.new_group(0), usage, ("ranks", "sequence")),
        "no list to scatter": (
            lambda comm: comm.reduce_scatter(six, None),
            usage,
            ("input_list", "NoneType"),
        ),
        "no list of objects": (
            lambda comm: comm.broadcast_object_list(None, 0),
            usage,
            ("object_list", "NoneType"),
        ),
        "no batch": (lambda comm: comm.batch_isend_irecv(None), usage, ("list", "NoneType")),
        "batch of something": (
            lambda comm: comm.batch_isend_irecv([six]),
            usage,
            ("fastcoll.P2POp",),
        ),
        "symmetric copy of a list": (_copied([1.0]), usage, ("tensor", "list")),
        "symmetric copy of a sparse one": (
            _copied(torch.eye(2).to_sparse()),
            unsupported,
            ("sparse",),
        ),
        "no such option": (all_reduce(six, colour="red"), "TypeError", ("colour",)),
        "no tensor": (lambda comm: comm.all_reduce(), "TypeError", ("tensor",)),
    }


def with_storage(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """As FSDP frees memory: the tensor keeps its shape."""
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def _copied(tensor: Any) -> Callable[[Any], Any]:
    import fastcoll

    return lambda comm: fastcoll.from_tensor(tensor, group=comm)


def _reduced(comm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(tensor)
        return tensor

    return reduced


def _with_group(group: object) -> Callable[[Any], Any]:
    import fastcoll

    return lambda comm: fastcoll.all_reduce(torch.ones(6), group=group)


def good_calls(comm: Any) -> bool:
    """The shapes of the mistakes, as they should be; after them the library knows these calls."""
    world, right = comm.world_size, True
    for dtype in (torch.float32, torch.int32, torch.complex64):
        tensor = filled(6, dtype=dtype)
        out = torch.zeros_like(tensor)
        comm.all_reduce(tensor, out=out)
        comm.all_reduce(tensor)
        right &= bool((tensor == world).all()) and torch.equal(out, tensor)
    part, whole = filled(6), filled(6 * world)
    comm.reduce_scatter_tensor(part, whole)
    comm.all_gather_into_tensor(whole, part)
    comm.broadcast(whole, world - 1)
    return right and bool((whole == world).all())


def err(rank: Rank, only: int | None) -> tuple[dict[str, Attempt], list[str]]:
    """Make all mistakes, on one rank or on all, with good calls in between."""
    attempts, harmed = {}, []
    for turn in ("first", "second", "third"):
        for name, (call, _, _) in mistakes(rank.world_size).items():
            if only in (None, rank.rank):
                attempts[f"{name}, {turn}"] = attempt(call, rank.comm)
        if not good_calls(rank.comm):
            harmed.append(turn)
    return attempts, harmed


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("world", "only"), [(1, None), (2, None), (3, 1)])
def test_every_mistake(pools: Pools, world: int, only: int | None) -> None:
    wrong = []
    for rank, (attempts, harmed) in enumerate(pools(world).run(err, only)):
        assert harmed == []
        assert len(attempts) == (3 * len(mistakes(world)) if only in (None, rank) else 0)
        for name, one in attempts.items():
            _, kind, words = mistakes(world)[name.rsplit(", ", 1)[0]]
            if one.kind != kind or any(word not in one.text for word in words):
                wrong.append(f"{name} on rank {rank}: {one.kind or 'accepted'} {one.text}")
    assert not wrong, "\n".join(wrong)


def look_at_buffers(rank: Rank) -> list[list[float]]:
    """What mistakes about outputs left in the tensors they were given."""
    world = rank.world_size
    tensors = [filled(6), filled(5), filled(7), filled(6 * world)]
    for tensor in tensors:
        tensor.fill_(POISON)
    six, five, seven, many = tensors
    attempts = [
        attempt(rank.comm.all_reduce, six, out=five),
        attempt(rank.comm.all_reduce, six, algorithm="none"),
        attempt(rank.comm.all_reduce, six, dist.ReduceOp.BXOR),
        attempt(rank.comm.all_reduce, many[1:7], out=many[:6]),
        attempt(rank.comm.reduce_scatter_tensor, seven, many),
        attempt(rank.comm.all_gather_into_tensor, many, seven),
        attempt(rank.comm.broadcast, six, 99),
        attempt(rank.comm.all_reduce, six, async_op=True, timeout_s=-1),
    ]
    assert all(one.kind for one in attempts), attempts
    return [torch.unique(tensor).tolist() for tensor in tensors]


def test_buffers_stay_untouched(pools: Pools) -> None:
    assert pools(2).run(look_at_buffers) == [[[POISON]] * 4] * 2


def wait_for_what_is_no_time(rank: Rank) -> list[Attempt]:
    """Of calls and sends that C++ carries out, and of a call of Python's; all go on."""
    peer, attempts = rank.rank ^ 1, []
    works = [
        rank.comm.all_reduce(filled(6), async_op=True),
        rank.comm.all_reduce(np.ones(6), async_op=True, timeout_s=np.float32(20)),
        rank.comm.isend(filled(6), peer),
        rank.comm.irecv(filled(6), peer),
    ]
    for work in works:
        attempts += [attempt(work.wait, odd) for odd in ("x", [1], True, float("nan"))]
    for work in works:
        assert work.wait(np.float32(20))
    return attempts


def test_waits_for_what_is_no_time(pools: Pools) -> None:
    for row in pools(2).run(wait_for_what_is_no_time):
        assert [one.kind for one in row] == ["UsageError"] * 16
        assert all("number of seconds" in one.text for one in row)


class Subclass(torch.Tensor):
    pass


def what_torch_takes(rank: Rank) -> list[float]:
    """Forms of arguments that torch.distributed accepts too."""
    comm, values = rank.comm, []
    for op in (dist.ReduceOp(dist.ReduceOp.SUM), dist.reduce_op.SUM):
        for kind in (torch.Tensor, Subclass):
            tensor = torch.ones(3)
            comm.all_reduce(tensor.as_subclass(kind), op)
            comm.all_reduce(tensor.as_subclass(kind), op=op)
            values.append(tensor[2].item())
    return values


def test_what_torch_takes(pools: Pools) -> None:
    assert pools(2).run(what_torch_takes) == [[4.0] * 4] * 2


def gradients(rank: Rank) -> list[float]:
    """Parameters and tensors in a graph are memory like any other."""
    parameter = torch.nn.Parameter(torch.ones(3))
    rank.comm.all_reduce(parameter)
    parameter.sum().backward()
    rank.comm.all_reduce(parameter.grad)
    inner = parameter * 2
    rank.comm.all_reduce(inner)
    return [parameter[0].item(), parameter.grad[0].item(), inner[0].item()]


def test_tensors_that_require_a_gradient(pools: Pools) -> None:
    assert pools(2).run(gradients) == [[2.0, 2.0, 8.0]] * 2
