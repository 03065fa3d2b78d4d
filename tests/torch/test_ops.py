# SPDX-License-Identifier: Apache-2.0
"""The operators of fastcoll: values, gradients, and that fastcoll's functions compile to them.

Gradients are compared with those of one process that does every rank's part, with the verb as a
plain function of all ranks' tensors.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.integrations import graph_names, ops
from tests.support.backends import no_caches, on_backend, same
from tests.support.harness import Attempt, Rank, attempt

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
ROWS, WIDTH, ROOT = 6, 3, 1


def splits(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Rows that come from each rank and go to each rank: ROWS go out."""
    table = [[ROWS // world + (1 if to == by else 0) for to in range(world)] for by in range(world)]
    table = [[*row[:-1], ROWS - sum(row[:-1])] for row in table]
    return [row[rank] for row in table], table[rank]


# Each verb as a function of one rank, and as one of all ranks' tensors, [world, ROWS, WIDTH].


def verbs(rank: int, world: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    gets, gives = splits(rank, world)
    return {
        "sum": lambda x: ops.all_reduce(x),
        "mean": lambda x: ops.all_reduce(x, AVG),
        "scattered sum": lambda x: ops.reduce_scatter(x),
        "scattered mean": lambda x: ops.reduce_scatter(x, AVG),
        "gathered": lambda x: ops.all_gather(x),
        "broadcast": lambda x: ops.broadcast(x, ROOT),
        "shuffled": lambda x: ops.all_to_all(x),
        "shuffled by counts": lambda x: ops.all_to_all(x, gets, gives),
    }


def alone(verb: str, given: torch.Tensor) -> list[torch.Tensor]:
    """Return what each rank gets."""
    world = len(given)
    cut = [splits(by, world)[1] for by in range(world)]
    return {
        "sum": lambda: [given.sum(0)] * world,
        "mean": lambda: [given.mean(0)] * world,
        "scattered sum": lambda: list(given.sum(0).chunk(world)),
        "scattered mean": lambda: list(given.mean(0).chunk(world)),
        "gathered": lambda: [given.flatten(0, 1)] * world,
        "broadcast": lambda: [given[ROOT]] * world,
        "shuffled": lambda: list(given.unflatten(1, (world, -1)).transpose(0, 1).flatten(1, 2)),
        "shuffled by counts": lambda: [
            torch.cat([given[by].split(cut[by])[to] for by in range(world)]) for to in range(world)
        ],
    }[verb]()


def tensor_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(rank: int, result: torch.Tensor) -> torch.Tensor:
    """A loss with a second derivative, different on every rank."""
    return (result**3 * (rank + 1)).sum()


def values_and_gradients(rank: Rank, verb: str, compiler: str = "") -> list[torch.Tensor]:
    """The verb's result, the gradient of all ranks' losses, and a gradient of the gradient."""
    run = verbs(rank.rank, rank.world_size)[verb]
    if compiler:
        run = torch.compile(run, backend=compiler, fullgraph=True)
    x = tensor_of(rank.rank).requires_grad_()
    y = run(x)
    again = not compiler  # compiled graphs have no second derivative, whatever is in them
    [first] = torch.autograd.grad(loss_of(rank.rank, y), x, create_graph=again)
    second = torch.autograd.grad(first.square().sum(), x) if again else []
    return [y.detach(), first.detach(), *second]


def expected(verb: str, world: int) -> list[list[torch.Tensor]]:
    given = torch.stack([tensor_of(rank) for rank in range(world)]).requires_grad_()
    results = alone(verb, given)
    total = sum(loss_of(rank, result) for rank, result in enumerate(results))
    [first] = torch.autograd.grad(total, given, create_graph=True)
    [second] = torch.autograd.grad(first.square().sum(), given)
    rows = zip(results, first, second, strict=True)
    return [[one.detach() for one in row] for row in rows]


VERBS = ["sum", "mean", "scattered sum", "scattered mean", "gathered", "broadcast", "shuffled"]
VERBS.append("shuffled by counts")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_values_and_gradients(backend_pools: Any, verb: str, world: int) -> None:
    rows = backend_pools(world).run(on_backend, "fastcoll", values_and_gradients, verb)
    torch.testing.assert_close(rows, expected(verb, world))


def test_a_gradient_of_this_ranks_loss_only_is_seen() -> None:
    """A verb whose gradient forgot to ask the others would have this one."""
    given = torch.stack([tensor_of(rank) for rank in range(2)]).requires_grad_()
    [own] = torch.autograd.grad(loss_of(0, alone("sum", given)[0]), given)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(own[0], expected("sum", 2)[0][1])


# ---- compiled ------------------------------------------------------------------------------------


def step(x: torch.Tensor) -> list[torch.Tensor]:
    """A program that calls the functions of the module, as it would without a compiler.

    Split sizes differ between the ranks, and so do graphs: generated code must keep the calls in
    order all the same. All arithmetic is exact, or compiled code had other bits of its own.
    """
    total = x * 2
    fastcoll.all_reduce(total)
    mean = torch.empty(WIDTH, ROWS, dtype=x.dtype)
    fastcoll.all_reduce(-x.t(), AVG, out=mean)
    whole = torch.empty(dist.get_world_size(), *x.shape, dtype=x.dtype)
    fastcoll.all_gather_into_tensor(whole, total + x)
    part = torch.empty(x.numel(), dtype=x.dtype)
    fastcoll.reduce_scatter_tensor(part, whole * x, MAX)
    fastcoll.broadcast(part, ROOT)
    shuffled = torch.empty_like(x)
    fastcoll.all_to_all_single(shuffled, x * 3)
    gets, gives = splits(dist.get_rank(), dist.get_world_size())
    by_counts = torch.empty(sum(gets), WIDTH, dtype=x.dtype)
    fastcoll.all_to_all_single(by_counts, x - 1, gets, gives)
    return [total, mean, whole, part, shuffled, by_counts]


def compiled(rank: Rank, compiler: str) -> bool:
    x = tensor_of(rank.rank)
    run = torch.compile(step, backend=compiler, fullgraph=True)
    with no_caches(compiler):
        return same(run(x), step(x)) and same(run(x + 1), step(x + 1))


def compiled_gradients(rank: Rank, compiler: str) -> list[torch.Tensor]:
    """A call in place, which has a gradient in a graph."""

    @torch.compile(backend=compiler, fullgraph=True)
    def summed(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        fastcoll.all_reduce(y)
        return loss_of(rank.rank, y)

    x = tensor_of(rank.rank).requires_grad_()
    with no_caches(compiler):
        summed(x).backward()
        assert x.grad is not None
        return [*values_and_gradients(rank, "sum", compiler), x.grad]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_the_functions_compile(bare_pools: Any, compiler: str) -> None:
    assert all(bare_pools(2).run(on_backend, "fastcoll", compiled, compiler, deadline_s=200))
    rows = bare_pools(2).run(on_backend, "fastcoll", compiled_gradients, compiler, deadline_s=200)
    wanted = [[value, first, first] for value, first, _ in expected("sum", 2)]
    torch.testing.assert_close(rows, wanted)


def graphs_and_groups(rank: Rank) -> list[Any]:
    """A graph is of one group and one operation; others get graphs of their own."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def reduced(x: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
        fastcoll.all_reduce(x, op, group)
        return x

    me = torch.tensor([rank.rank + 1.0])
    alone, pair = [dist.new_group([one]) for one in range(2)][rank.rank], dist.group.WORLD
    results = []
    with fastcoll.new_group() as ours:
        for op, group in ((SUM, pair), (SUM, pair), (MAX, pair), (SUM, alone), (SUM, ours)):
            results.append(reduced(me.clone(), op, group).item())

    @torch.compile(backend=counter)
    def in_the_background(x: torch.Tensor) -> torch.Tensor:
        work = fastcoll.all_reduce(x * 2, async_op=True)
        [y] = work.result()
        return y + 1

    return [results, in_the_background(me).item(), counter.frame_count]


@pytest.mark.slow
def test_graphs_and_groups(backend_pools: Any) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", graphs_and_groups)
    for rank, [results, last, _] in enumerate(rows):
        assert results == [3.0, 3.0, 2.0, rank + 1.0, 3.0]
        assert last == 7.0
    assert [count for *_, count in rows] == [5, 5]


def roots_that_vary(rank: Rank) -> list[Any]:
    """Whose tensor goes out is told by a number that the compiler takes for any from then on."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def received(x: torch.Tensor, src: int, group: Any) -> torch.Tensor:
        fastcoll.broadcast(x, src, group)
        return x + 1

    later = dist.new_group([1, 2])  # global ranks 1 and 2 are its ranks 0 and 1
    results = []
    for group, roots in ((None, (0, 1, 2, 1, 0)), (later, (1, 2, 2))):
        if group is None or rank.rank in (1, 2):
            for src in roots:
                results.append(received(torch.tensor([10 * rank.rank]), src, group).item())
    return [results, counter.frame_count]


@pytest.mark.slow
def test_roots_that_vary(bare_pools: Any) -> None:
    rows = bare_pools(3).run(on_backend, "fastcoll", roots_that_vary)
    everybodys, of_two = [1, 11, 21, 11, 1], [11, 21, 21]
    assert rows == [[everybodys, 3], [everybodys + of_two, 5], [everybodys + of_two, 5]]


def operators_kept_to_torchs_rules(rank: Rank) -> list[Any]:
    """torch's own check of schema, fake kernel, gradient and graph; and of a wrong fake kernel."""
    x, name = tensor_of(rank.rank), graph_names.name_of(None)
    gets, gives = splits(rank.rank, rank.world_size)
    sum_ = graph_names.code_of(SUM)
    known = torch.ops.fastcoll
    for operator, *args in (
        (known.all_reduce, x, sum_, name),
        (known.reduce_scatter, x, sum_, name),
        (known.all_gather, x, name),
        (known.broadcast, x, ROOT, name),
        (known.reduce, x, ROOT, name),
        (known.all_to_all, x, [], [], name),
        (known.all_to_all, x, gets, gives, name),
    ):
        for needs_grad in (False, True):
            args[0] = x.clone().requires_grad_(needs_grad)
            torch.library.opcheck(operator.default, tuple(args))

    planted = torch.library.Library("fastcoll_tests", "DEF")
    planted.define("all_gather(Tensor x, str group) -> Tensor")
    planted.impl("all_gather", known.all_gather, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "fastcoll_tests::all_gather", lambda x, group: x.new_empty(x.shape), lib=planted
    )
    wrong = attempt(torch.library.opcheck, torch.ops.fastcoll_tests.all_gather.default, (x, name))
    return [wrong.kind]


@pytest.mark.slow
def test_the_operators_keep_torchs_rules(backend_pools: Any) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", operators_kept_to_torchs_rules)
    assert rows == [["OpCheckError"]] * 2


WORKS_IN_THIS_ORDER = """
import sys
import torch
{imports}
store = torch.distributed.HashStore()
fastcoll.init(store=store, rank=0, world_size=1)
double = torch.compile(lambda x: fastcoll.all_reduce(x.mul_(2)), backend="eager", fullgraph=True)
x = torch.ones(3)
double(x)
assert x.tolist() == [2, 2, 2], x
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import torch._dynamo; import fastcoll",
        "import fastcoll; assert 'torch._dynamo' not in sys.modules",
    ],
)
def test_the_compiler_may_come_first_or_later(imports: str) -> None:
    program = WORKS_IN_THIS_ORDER.format(imports=imports)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


# ---- errors --------------------------------------------------------------------------------------


def mistakes(rank: Rank) -> list[Attempt]:
    x = tensor_of(rank.rank).requires_grad_()
    largest = ops.all_reduce(x, MAX).sum()
    results = [
        attempt(largest.backward),
        attempt(ops.reduce_scatter, x[1:2]),
        attempt(ops.all_gather, torch.tensor(1.0)),
        attempt(ops.all_to_all, x, [ROWS // 2, ROWS // 2]),
        attempt(ops.all_reduce, x, "total"),
        attempt(ops.broadcast, x, 2),
    ]
    with fastcoll.new_group() as group:
        name = graph_names.name_of(group)
    del group
    results.append(attempt(torch.ops.fastcoll.all_reduce, x, 0, name))
    ops.all_reduce(x)  # the group is in order
    return results


def test_mistakes_are_told(backend_pools: Any) -> None:
    words = ["MAX", "equal parts", "no rows", "both sides", "SUM, AVG", "src=2", "destroyed"]
    kinds = ["UnsupportedError", "UsageError", "UsageError", "UsageError", "UnsupportedError"]
    kinds += ["UsageError"] * 2
    for row in backend_pools(2).run(on_backend, "fastcoll", mistakes):
        assert [one.kind for one in row] == kinds
        for one, word in zip(row, words, strict=True):
            assert word in one.text


def odd_calls_compiled(rank: Rank) -> list[Any]:
    """Calls that can't stand in a graph, in a compiled function that may break; and the default."""
    mine = torch.full((4,), float(rank.rank))

    def compiled(call: Callable[[], None], *, whole: bool = False) -> Callable[[], None]:
        torch._dynamo.reset()
        return torch.compile(call, backend="eager", fullgraph=whole)

    array, summed = np.full(4, float(rank.rank)), mine.clone()
    compiled(lambda: fastcoll.all_reduce(array))()
    written_out = {"async_op": False, "algorithm": "auto", "numerics": None, "timeout_s": None}
    compiled(lambda: fastcoll.all_reduce(summed, **written_out), whole=True)()
    wrong: list[Callable[[], Any]] = [
        lambda: fastcoll.all_reduce(mine, out=torch.empty(4, dtype=torch.float64)),
        lambda: fastcoll.all_reduce(mine, out=torch.empty(2, 4)),
        lambda: fastcoll.all_gather_into_tensor(torch.empty(8, dtype=torch.float64), mine),
        lambda: fastcoll.reduce_scatter_tensor(torch.empty(2, dtype=torch.float64), mine),
        lambda: fastcoll.all_to_all_single(torch.empty(4, dtype=torch.float64), mine),
    ]
    kinds = [attempt(compiled(call)).kind for call in wrong]
    return [array.tolist(), summed.tolist(), kinds]


@pytest.mark.slow
def test_compiled_calls_refuse_what_others_do(bare_pools: Any) -> None:
    for row in bare_pools(2).run(on_backend, "fastcoll", odd_calls_compiled, deadline_s=200):
        assert row == [[1.0] * 4, [1.0] * 4, ["UsageError"] * 5]
