# SPDX-License-Identifier: Apache-2.0
"""Forward derivatives of fastcoll's operators, batches of them, and both in graphs.

As in test_ops.py they are compared with those of one process that does every rank's part.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap

import fastcoll
from fastcoll.integrations import ops
from tests.support.backends import on_backend
from tests.support.harness import Attempt, Rank, attempt
from tests.torch import test_ops as operators
from tests.torch.test_ops import MAX, ROWS, VERBS, WIDTH

BATCH = 4


def tangent_of(rank: int) -> Tensor:
    return operators.tensor_of(rank + 10)


def examples_of(rank: int) -> Tensor:
    return torch.stack([operators.tensor_of(rank + 20 * (1 + one)) for one in range(BATCH)])


# Each transform of a verb f on one rank, and of F, which does all ranks' parts. A basis vector of
# a Jacobian is every rank's at once.


def on_rank(f: Callable[[Tensor], Tensor], rank: int) -> dict[str, Callable[[], Tensor]]:
    x, tangent = operators.tensor_of(rank), tangent_of(rank)
    examples, inner = examples_of(rank), examples_of(rank).permute(1, 2, 0)

    def squares(v: Tensor) -> Tensor:
        return operators.loss_of(rank, f(v))

    def pushed(v: Tensor) -> Tensor:
        return jvp(lambda w: f(w * w), (v,), (tangent,))[1]

    def dual() -> Tensor:
        with forward_ad.dual_level():
            result: Tensor = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent
            return result

    return {
        "jvp": lambda: jvp(f, (x,), (tangent,))[1],
        "dual numbers": dual,
        "jvp of jvp": lambda: jvp(pushed, (x,), (tangent,))[1],
        "jacfwd": lambda: jacfwd(f)(x),
        "grad": lambda: grad(squares)(x),
        "grad of grad": lambda: grad(lambda v: grad(squares)(v).square().sum())(x),
        "grad of jvp": lambda: grad(lambda v: pushed(v).square().sum())(x),
        "hessian": lambda: hessian(squares)(x),
        "vmap": lambda: vmap(f)(examples),
        "vmap of the last": lambda: vmap(f, 2, 1)(inner),
        "vmap of grad": lambda: vmap(grad(squares))(examples),
        "jvp of vmap": lambda: jvp(vmap(f), (examples,), (examples.sin(),))[1],
        "functionalize": lambda: functionalize(f)(x),
        "vmap of vmap": lambda: vmap(vmap(f))(torch.stack([examples, examples.cos()])),
    }


def of_all(verb: str, world: int) -> dict[str, Callable[[], Any]]:
    def f(given: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.alone(verb, given))

    def total(given: Tensor) -> Tensor:
        return torch.stack([operators.loss_of(by, one) for by, one in enumerate(f(given))]).sum()

    ranks = range(world)
    x = torch.stack([operators.tensor_of(rank) for rank in ranks])
    tangents = torch.stack([tangent_of(rank) for rank in ranks])
    examples = torch.stack([examples_of(rank) for rank in ranks], 1)  # [BATCH, world, ...]
    nowhere = torch.zeros_like(x[0])

    def each(run: Callable[[Tensor], Any], rows: Tensor) -> list[Tensor]:
        """Stack what comes of each row, rank by rank."""
        return [torch.stack(of_rank) for of_rank in zip(*map(run, rows), strict=True)]

    def pushed(v: Tensor) -> Any:
        return jvp(lambda w: f(w * w), (v,), (tangents,))[1]

    batched = each(f, examples)
    return {
        "jvp": lambda: jvp(f, (x,), (tangents,))[1],
        "dual numbers": lambda: jvp(f, (x,), (tangents,))[1],
        "jvp of jvp": lambda: jvp(pushed, (x,), (tangents,))[1],
        "jacfwd": lambda: jacfwd(lambda moved: f(x + moved))(nowhere),
        "grad": lambda: grad(total)(x),
        "grad of grad": lambda: grad(lambda v: grad(total)(v).square().sum())(x),
        "grad of jvp": lambda: grad(lambda v: torch.cat(pushed(v)).square().sum())(x),
        "hessian": lambda: jacfwd(lambda moved: grad(total)(x + moved))(nowhere),
        "vmap": lambda: batched,
        "vmap of the last": lambda: [one.movedim(0, 1) for one in batched],
        "vmap of grad": lambda: each(grad(total), examples),
        "jvp of vmap": lambda: each(f, examples.sin()),
        "functionalize": lambda: f(x),
        "vmap of vmap": lambda: [
            torch.stack(both) for both in zip(batched, each(f, examples.cos()), strict=True)
        ],
    }


def transformed(rank: Rank, verb: str) -> dict[str, Tensor]:
    verbs = operators.verbs(rank.rank, rank.world_size)
    return {name: run().detach() for name, run in on_rank(verbs[verb], rank.rank).items()}


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_transforms_of_torch_func(bare_pools: Any, verb: str, world: int) -> None:
    rows = bare_pools(world).run(on_backend, "fastcoll", transformed, verb)
    for name, run in of_all(verb, world).items():
        found, wanted = [row[name] for row in rows], [one.detach() for one in run()]
        torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")
        assert any(one.any() for one in wanted), name  # no zeros are compared


def jacobians(rank: Rank) -> list[Tensor]:
    """Of a linear verb, forward and backward, where every rank gives the same."""
    f = operators.verbs(rank.rank, rank.world_size)["sum"]
    x = torch.ones(3)
    return [jacfwd(f)(x), jacrev(f)(x)]


@pytest.mark.long
def test_forward_and_backward_agree(bare_pools: Any) -> None:
    wanted = [torch.eye(3) * 3] * 2
    torch.testing.assert_close(bare_pools(3).run(on_backend, "fastcoll", jacobians), [wanted] * 3)


# ---- compiled ------------------------------------------------------------------------------------


def compiled(rank: Rank, compiler: str) -> bool:
    verbs = operators.verbs(rank.rank, rank.world_size)
    examples, tangent = examples_of(rank.rank), tangent_of(rank.rank)

    def step(x: Tensor) -> list[Tensor]:
        tangents = [jvp(f, (x,), (tangent,))[1] for f in verbs.values()]
        return tangents + [vmap(f)(examples * x) for f in verbs.values()]

    x = operators.tensor_of(rank.rank)
    found = torch.compile(step, backend=compiler, fullgraph=True)(x)
    torch.testing.assert_close(found, step(x))
    return all(one.any() for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_they_compile(bare_pools: Any, compiler: str) -> None:
    rows = bare_pools(2).run(on_backend, "fastcoll", compiled, compiler, deadline_s=200)
    assert rows == [True, True]


# ---- what has no derivative ----------------------------------------------------------------------


def mistakes(rank: Rank) -> list[Attempt]:
    x, six = operators.tensor_of(rank.rank), torch.ones(6)

    def dual() -> None:
        with forward_ad.dual_level():
            ops.all_reduce(forward_ad.make_dual(x, x), MAX)

    def plain(v: Tensor) -> Tensor:
        fastcoll.all_reduce(v)
        return v

    found = [
        attempt(jvp, lambda v: ops.all_reduce(v, MAX), (x,), (x,)),
        attempt(jvp, lambda v: ops.reduce_scatter(v, MAX), (x,), (x,)),
        attempt(jacfwd(lambda v: ops.all_reduce(v, MAX)), x),
        attempt(grad(lambda v: ops.all_reduce(v, MAX).sum()), x),
        attempt(dual),
        *[attempt(vmap(f), six) for f in (ops.all_gather, ops.reduce_scatter, ops.all_to_all)],
        attempt(vmap(plain), x),
        attempt(grad(lambda v: plain(v).sum()), x),
        attempt(functionalize(plain), x),
        attempt(jvp, plain, (x,), (x,)),
    ]
    assert vmap(lambda v: ops.all_reduce(v, MAX))(x).shape == (ROWS, WIDTH)
    return found


def test_no_derivative_is_zero_by_mistake(bare_pools: Any) -> None:
    for row in bare_pools(2).run(on_backend, "fastcoll", mistakes):
        assert [one.kind for one in row] == (
            ["UnsupportedError"] * 5 + ["UsageError"] * 3 + ["UnsupportedError"] * 4
        )
        assert all("MAX" in one.text for one in row[:5])
        assert all("rows" in one.text for one in row[5:8])
        assert all("fastcoll.integrations.ops" in one.text for one in row[8:])
