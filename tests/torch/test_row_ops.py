# SPDX-License-Identifier: Apache-2.0
"""The operator all_reduce_rms_norm: its values, its gradient, and where it stands in a graph."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.integrations import graph_names, ops
from tests.support.backends import no_caches, on_backend
from tests.support.harness import Attempt, Rank, attempt

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
ROWS, COLUMNS, EPS = 5, 24, 1e-4


def given(rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return a rank's input, residual and weight."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def loss_of(rank: int, normed: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
    """A loss with a second derivative, different on every rank."""
    return ((normed**3).sum() + (summed**2).sum() / 3) * (rank + 1)


def alone(world: int, average: bool) -> list[tuple[torch.Tensor, ...]]:
    """Return each rank's results and gradients, of one process that does every rank's part."""
    tensors = [tuple(one.double().requires_grad_() for one in given(rank)) for rank in range(world)]
    total = sum(x for x, _, _ in tensors) / (world if average else 1)
    losses, results = [], []
    for rank, (_, residual, weight) in enumerate(tensors):
        summed = total + residual
        normed = torch.nn.functional.rms_norm(summed, (COLUMNS,), weight + 1.0, EPS)
        losses.append(loss_of(rank, normed, summed))
        results.append((normed, summed))
    flat = [one for row in tensors for one in row]
    first = torch.autograd.grad(sum(losses), flat, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), flat)
    rows = zip(
        results, *(zip(*[iter(one)] * 3, strict=True) for one in (first, second)), strict=True
    )
    return [tuple(one.detach().float() for part in row for one in part) for row in rows]


def values_and_gradients(rank: Rank, average: bool, compiler: str = "") -> list[torch.Tensor]:
    def run(x: Any, residual: Any, weight: Any) -> Any:
        op = AVG if average else SUM
        return ops.all_reduce_rms_norm(x, residual, weight, EPS, offset=1.0, op=op)

    if compiler:
        run = torch.compile(run, backend=compiler, fullgraph=True)
    tensors = [one.requires_grad_() for one in given(rank.rank)]
    with no_caches(compiler):
        normed, summed = run(*tensors)
        again = not compiler
        first = torch.autograd.grad(loss_of(rank.rank, normed, summed), tensors, create_graph=again)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), tensors) if again else ()
    return [normed.detach(), summed.detach(), *(one.detach() for one in (*first, *second))]


@pytest.mark.parametrize("average", [False, True])
def test_values_and_gradients(backend_pools: Any, average: bool) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", values_and_gradients, average)
    for found, want in zip(rows, alone(2, average), strict=True):
        torch.testing.assert_close(found, [*want], rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_it_compiles(bare_pools: Any, compiler: str) -> None:
    program = values_and_gradients
    rows = bare_pools(2).run(on_backend, "fastcoll", program, False, compiler, deadline_s=200)
    for found, want in zip(rows, alone(2, average=False), strict=True):
        torch.testing.assert_close(found, [*want][: len(found)], rtol=2e-3, atol=2e-4)


def as_separate_steps(rank: Rank) -> list[bool]:
    """The sums have the bits of the separate steps; examples of a batch are further rows."""
    x, residual, weight = given(rank.rank, torch.bfloat16)
    called, added = x.clone(), residual.clone()
    then = fastcoll.RMSNorm(weight, EPS, residual=added)
    fastcoll.all_reduce(called, group=dist.group.WORLD, then=then)
    normed, summed = ops.all_reduce_rms_norm(x, residual, weight, EPS)
    _, plain = ops.all_reduce_rms_norm(x, None, weight, EPS)
    total = ops.all_reduce(x)
    theirs = torch.nn.functional.rms_norm(total + residual, (COLUMNS,), weight, EPS)
    batched = torch.func.vmap(lambda a, b: ops.all_reduce_rms_norm(a, b, weight, EPS))(x, residual)
    return [
        torch.equal(summed, total + residual),
        torch.equal(plain, total),
        bool(((normed - theirs).abs() <= 0.01 * theirs.abs()).all()),
        torch.equal(batched[0], normed) and torch.equal(batched[1], summed),
        torch.equal(called, normed) and torch.equal(added, summed),
    ]


def test_the_sums_are_those_of_separate_steps(backend_pools: Any) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", as_separate_steps) == [[True] * 5] * 2


def mistakes(rank: Rank) -> list[Attempt]:
    x, residual, weight = given(rank.rank)

    def forwards() -> None:
        torch.func.jvp(lambda a: ops.all_reduce_rms_norm(a, residual, weight)[0], (x,), (x,))

    return [
        attempt(forwards),
        attempt(ops.all_reduce_rms_norm, x, residual, weight, op="max"),
        attempt(ops.all_reduce_rms_norm, x, residual[:1], weight),
        attempt(torch.func.vmap(lambda w: ops.all_reduce_rms_norm(x, None, w)), weight[None]),
    ]


def test_what_has_no_meaning_is_refused(backend_pools: Any) -> None:
    for found in backend_pools(2).run(on_backend, "fastcoll", mistakes):
        kinds = ["UnsupportedError", "UnsupportedError", "UsageError", "UnsupportedError"]
        assert [one.kind for one in found] == kinds
        assert "no forward derivative" in found[0].text


def operator_kept_to_torchs_rules(rank: Rank) -> None:
    name = graph_names.name_of(None)
    for needs_grad in (False, True):
        tensors = [one.requires_grad_(needs_grad) for one in given(rank.rank)]
        terms = (EPS, 0.0, False, False, graph_names.code_of(SUM), name)
        torch.library.opcheck(torch.ops.fastcoll.all_reduce_rms_norm.default, (*tensors, *terms))


@pytest.mark.slow
def test_the_operator_keeps_torchs_rules(backend_pools: Any) -> None:
    backend_pools(2).run(on_backend, "fastcoll", operator_kept_to_torchs_rules)
