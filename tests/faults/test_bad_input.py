# SPDX-License-Identifier: Apache-2.0
"""Arguments that make no sense: an error of the right kind, nothing sent, the next call works.

Each mistake is made before and after good calls of the same shape: a call that the library knows
takes a shorter way through it. One rank alone makes it, because the others must not notice.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.faults import bad_arguments, bad_lists, bad_norms
from tests.faults.bad_arguments import Mistake, filled, is_told
from tests.support.harness import Attempt, Pools, Rank, attempt

POISON = -7.0
OF_TENSORS = (
    bad_arguments.mistakes_of_options,
    bad_arguments.mistakes_of_wires,
    bad_arguments.mistakes_of_operations,
    bad_arguments.mistakes_of_outputs,
    bad_arguments.mistakes_of_tensors,
    bad_arguments.mistakes_of_arrays,
    bad_arguments.mistakes_of_memory,
    bad_arguments.mistakes_of_parts,
    bad_arguments.mistakes_of_other_calls,
    bad_norms.mistakes_of_norms,
)
# One rank has no other root, and no peer whose part has another size.
OF_SEVERAL_RANKS = (
    bad_lists.mistakes_of_lists,
    bad_lists.mistakes_of_roots,
    bad_lists.mistakes_of_splits,
    bad_lists.mistakes_without_an_output,
    bad_lists.mistakes_of_coalesced_calls,
    bad_lists.mistakes_of_transfers,
    bad_lists.mistakes_of_objects,
)
# Over several nodes any known algorithm but "auto" is refused in the same words.
OF_ALGORITHMS = ("mistakes_of_roots, reduce, ring", "mistakes_of_coalesced_calls, algorithm")


def mistakes(world: int) -> dict[str, Mistake]:
    """All of them; a name says the subject, too."""
    return {
        f"{subject.__name__}, {name}": one
        for subject in (*OF_TENSORS, *(OF_SEVERAL_RANKS if world > 1 else ()))
        for name, one in subject(world).items()
    }


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
    four, rows = filled(4), list(torch.zeros(world, 4))
    comm.all_gather(rows, four)
    comm.gather(four, rows if comm.rank == 0 else None, 0)
    comm.scatter(four, rows if comm.rank == 0 else None, 0)
    comm.all_to_all(rows, [row.clone() for row in rows])
    comm.all_reduce_coalesced([four, filled(5)])
    right &= all(bool((row == 1).all()) for row in rows) and bool((four == world).all())
    message, room = filled(6), torch.zeros(6)
    works = [
        comm.isend(message, (comm.rank + 1) % world),
        comm.irecv(room, (comm.rank - 1) % world),
    ]
    right &= all(work.wait() for work in works) and torch.equal(room, message)
    summed = torch.full((4, 64), 2.0)
    comm.all_reduce(summed, then=fastcoll.RMSNorm(residual=torch.zeros(4, 64)))
    right &= torch.allclose(summed, torch.ones(4, 64))
    return right and bool((whole == world).all())


def err(rank: Rank, only: int | None) -> tuple[dict[tuple[str, str], Attempt], list[str]]:
    """Make all mistakes, on one rank or on all, with good calls in between."""
    attempts, harmed = {}, []
    for turn in ("first", "second", "third"):
        for name, (call, _) in mistakes(rank.world_size).items():
            if only in (None, rank.rank):
                attempts[name, turn] = attempt(call, rank.comm)
        if not good_calls(rank.comm):
            harmed.append(turn)
    return attempts, harmed


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(
    ("nodes", "only"),
    [
        ("a", None),
        ("aa", None),
        pytest.param("aaa", 1, marks=pytest.mark.long),
        ("aab", 1),
    ],
)
def test_every_mistake(pools: Pools, clusters: Pools, nodes: str, only: int | None) -> None:
    world, wrong, has_nodes = len(nodes), [], len(set(nodes)) > 1
    texts = {name: text for name, (_, text) in mistakes(world).items()}
    if has_nodes:
        texts |= dict.fromkeys(OF_ALGORITHMS, "UnsupportedError: chooses by itself")
    pool = clusters(nodes) if has_nodes else pools(world)
    for rank, (attempts, harmed) in enumerate(pool.run(err, only)):
        assert harmed == []
        assert len(attempts) == (3 * len(texts) if only in (None, rank) else 0)
        for (name, turn), one in attempts.items():
            if not is_told(one.kind, one.text, texts[name]):
                told = f"{one.kind or 'accepted'} {one.text}"
                wrong.append(f"{name}, {turn}, on rank {rank}: {told}")
    assert not wrong, "\n".join(wrong)


def look_at_buffers(rank: Rank) -> list[list[float]]:
    """Return what mistakes about outputs left in the tensors they were given."""
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
