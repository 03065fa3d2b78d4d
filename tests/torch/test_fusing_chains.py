# SPDX-License-Identifier: Apache-2.0
"""Which chains of a program the compiler's pass replaces, and which it leaves.

Each program says how many it has. All of them give what they give without a compiler.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll.integrations import ops
from tests.support.backends import on_backend
from tests.support.fused import (
    KEEPS_ROUNDINGS,
    compile_fused,
    start_by_torch,
    sum_by_fastcoll,
    sum_by_operator,
    sum_by_torch,
    sum_in_place,
)
from tests.support.harness import Rank

COLUMNS, NUM_ROWS = 64, 6
NARROW = torch.linspace(0.5, 1.5, COLUMNS).bfloat16()
PROGRAMS: dict[Callable[..., Any], int] = {}
_groups: dict[str, Any] = {}  # of the running test, by backend


def has(num_chains: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program to the list."""

    def add(program: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[program] = num_chains
        return program

    return add


def norm_of(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (COLUMNS,), None, 1e-6)


def by_hand(x: Tensor, square: Tensor) -> Tensor:
    return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)


# ---- chains --------------------------------------------------------------------------------------


@has(1)
def alone(x: Tensor, residual: Tensor) -> Any:
    """A norm right behind the sum; the sum has another reader."""
    total = sum_by_operator(x)
    return norm_of(total), total, total - residual


@has(1)
def mean_of_ranks(x: Tensor, residual: Tensor) -> Any:
    return norm_of(ops.all_reduce(x, dist.ReduceOp.AVG) + residual)


@has(1)
def mean_by_torch(x: Tensor, residual: Tensor) -> Any:
    return norm_of(residual + start_by_torch(x, op="avg"))


@has(1)
def square_by_product(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x) + residual
    return by_hand(total, total * total)


@has(2)
def sum_of_a_norm(x: Tensor, residual: Tensor) -> Any:
    """The first chain's result goes into the second sum as it is."""
    normed = norm_of(sum_by_operator(x) + residual)
    return norm_of(sum_by_operator(normed) + residual), normed


@has(1)
def narrow_weight(x: Tensor, residual: Tensor) -> Any:
    """A weight that is stored in bfloat16, and an offset that is not 1."""
    total = sum_by_operator(x) + residual
    return by_hand(total, total.pow(2)) * (NARROW.float() + 0.3)


@has(1)
def in_place(x: Tensor, residual: Tensor) -> Any:
    return norm_of(sum_in_place(x * 2) + residual)


@has(1)
def other_group(x: Tensor, residual: Tensor) -> Any:
    return norm_of(start_by_torch(x, _groups["fastcoll"]) + residual)


@has(1)
def late_residual(x: Tensor, residual: Tensor) -> Any:
    """The first sum's residual is there only behind it; the second sum's is there before."""
    total = sum_by_operator(x)
    return norm_of(total + sum_by_operator(residual * 2))


@has(1)
def computed_behind(x: Tensor, residual: Tensor) -> Any:
    """The residual and the weight are computed behind the sum, and do not depend on it."""
    total = sum_by_operator(x)
    total = total + (residual * 3 - x).cos()
    return by_hand(total, total.pow(2)) * (NARROW.float() + residual[0].sin())


@has(1)
def strided_inputs(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_torch(x.t()) + residual.t()
    return torch.nn.functional.rms_norm(total, (NUM_ROWS,), None, 1e-6), total


def wide_sum(x: Tensor, residual: Tensor) -> Tensor:
    """The sum with the residual before its rounding, which vLLM's norm reads."""
    return sum_by_operator(x.bfloat16()).float() + residual.bfloat16().float()


@has(1 if KEEPS_ROUNDINGS else 0)
def unrounded(x: Tensor, residual: Tensor) -> Any:
    """Nobody reads the sum, as behind a model's last layer."""
    total = wide_sum(x, residual)
    return by_hand(total, total.pow(2)).bfloat16()


@has(2 if KEEPS_ROUNDINGS else 0)
def unrounded_twice(x: Tensor, residual: Tensor) -> Any:
    """The second residual is the first sum, rounded where it is read. The weight is Gemma's."""
    total = wide_sum(x, residual)
    normed = (by_hand(total, total.pow(2)) * (NARROW.float() + 1.0)).bfloat16()
    again = sum_by_operator(normed).float() + total.bfloat16().float()
    return by_hand(again, again.pow(2)).bfloat16() * NARROW, again.bfloat16()


# ---- no chains -----------------------------------------------------------------------------------


@has(0)
def depends_on_the_sum(x: Tensor, residual: Tensor) -> Any:
    """So does the weight."""
    total = sum_by_operator(x) + residual
    return by_hand(total, total.pow(2)) * total[0]


@has(0)
def drawn_behind(x: Tensor, residual: Tensor) -> Any:
    """Moved, the numbers would be others where the compiler draws them as torch does."""
    return norm_of(sum_by_operator(x) + torch.bernoulli(residual.sigmoid()))


@has(0)
def input_in_place(x: Tensor, residual: Tensor) -> Any:
    """The program's caller reads the plain sum."""
    sum_by_fastcoll(x)
    return norm_of(x + residual), x


@has(0)
def read_twice(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x)
    return norm_of(total + residual), total * 2


@has(0)
def largest(x: Tensor, residual: Tensor) -> Any:
    return norm_of(ops.all_reduce(x, dist.ReduceOp.MAX) + residual)


@has(0)
def largest_by_torch(x: Tensor, residual: Tensor) -> Any:
    return norm_of(start_by_torch(x, op="max") + residual)


@has(0)
def group_of_gloo(x: Tensor, residual: Tensor) -> Any:
    return norm_of(start_by_torch(x, _groups["gloo"]) + residual)


@has(0)
def call_before_the_end(x: Tensor, residual: Tensor) -> Any:
    """Another call comes between the beginning of torch's and its end."""
    total = start_by_torch(x)
    other = sum_by_operator(residual * 2)
    return norm_of(total + residual), other


@has(0)
def two_at_once(x: Tensor, residual: Tensor) -> Any:
    first, second = start_by_torch(x), start_by_torch(residual * 2)
    return norm_of(first + residual), norm_of(second + residual)


@has(0)
def other_axis(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x) + residual
    return total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-6)


@has(0)
def other_mean(x: Tensor, residual: Tensor) -> Any:
    """The mean has another reader."""
    total = sum_by_operator(x) + residual
    mean = total.pow(2).mean(-1, keepdim=True)
    return total * torch.rsqrt(mean + 1e-6), mean


@has(0)
def mean_in_doubles(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x) + residual
    mean = total.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return total * torch.rsqrt(mean + 1e-6)


@has(0)
def other_power(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x) + residual
    return by_hand(total, total.pow(4))


@has(0)
def negative_eps(x: Tensor, residual: Tensor) -> Any:
    total = sum_by_operator(x) + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + -1e-9)


@has(0)
def divided(x: Tensor, residual: Tensor) -> Any:
    """Rounds otherwise than a product with the inverse."""
    total = sum_by_operator(x) + residual
    return total / torch.sqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)


@has(0)
def wider(x: Tensor, residual: Tensor) -> Any:
    return norm_of(sum_by_operator(x) + residual.repeat(2, 1, 1))


@has(0)
def one_row(x: Tensor, residual: Tensor) -> Any:
    return norm_of(sum_by_operator(x) + residual[:1])


@has(0)
def in_doubles(x: Tensor, residual: Tensor) -> Any:
    return norm_of(sum_by_operator(x.double()) + residual.double())


@has(0)
def wide_residual(x: Tensor, residual: Tensor) -> Any:
    return norm_of(sum_by_operator(x.bfloat16()) + residual)


@has(0)
def read_unrounded(x: Tensor, residual: Tensor) -> Any:
    total = wide_sum(x, residual)
    return by_hand(total, total.pow(2)).bfloat16(), (total * 2).bfloat16()


@has(0)
def rounded_otherwise(x: Tensor, residual: Tensor) -> Any:
    total = wide_sum(x, residual)
    return by_hand(total, total.pow(2)).bfloat16(), total.half()


@has(0)
def residual_in_floats(x: Tensor, residual: Tensor) -> Any:
    """The residual has digits that its dtype in a fused call has not."""
    total = sum_by_operator(x.bfloat16()).float() + residual
    return by_hand(total, total.pow(2)).bfloat16()


@has(0)
def scaled(x: Tensor, residual: Tensor) -> Any:
    return norm_of(torch.add(sum_by_operator(x), residual, alpha=2))


@has(0)
def columns_first(x: Tensor, residual: Tensor) -> Any:
    """The sum with the residual has the residual's strides."""
    total = residual.t() + sum_by_torch(x.t())
    return torch.nn.functional.rms_norm(total, (NUM_ROWS,), None, 1e-6), total


@has(0)
def no_norm(x: Tensor, residual: Tensor) -> Any:
    return sum_by_operator(x) + residual


# ---- tests ---------------------------------------------------------------------------------------


def count_chains(rank: Rank, has_some: bool) -> list[str]:
    """Compile the programs; return the wrong matches and the wrong values.

    Those with chains get kernels, as the code generator decides where a chain's call stands. Rank 1
    runs each program twice instead: its calls are all that rank 0 needs.
    """
    wrong = []
    _groups.update({name: dist.new_group(backend=name) for name in ("fastcoll", "gloo")})
    generator = torch.Generator().manual_seed(rank.rank)
    x, residual = (torch.randn(NUM_ROWS, COLUMNS, generator=generator) for _ in range(2))
    for program, expected in PROGRAMS.items():
        if bool(expected) is not has_some:
            continue
        with torch.no_grad():
            torch.manual_seed(5)
            wanted = program(x.clone(), residual.clone())
            torch.manual_seed(5)
            if rank.rank:
                program(x.clone(), residual.clone())
                continue
            made = compile_fused(program, x.clone(), residual.clone(), kernels=has_some)
        sides = (one if isinstance(one, tuple) else (one,) for one in (made.results, wanted))
        if (made.num_fused, made.calls("all_reduce_rms_norm")) != (expected, expected):
            wrong.append(f"{program.__name__}: {made.num_fused} matches, not {expected}")
        for one, want in zip(*sides, strict=True):
            tolerance = 2e-2 if want.element_size() == 2 else 2e-5
            if one.dtype is not want.dtype or one.stride() != want.stride():
                wrong.append(f"{program.__name__}: {one.dtype} with strides {one.stride()}")
            if not torch.allclose(one, want, rtol=tolerance, atol=tolerance):
                wrong.append(f"{program.__name__}: wrong values")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_some", [True, False])
def test_only_whole_chains_are_replaced(bare_pools: Any, has_some: bool) -> None:
    num_ranks = 2 if has_some else 1
    found = bare_pools(num_ranks).run(
        on_backend, "fastcoll", count_chains, has_some, deadline_s=800
    )
    assert found == [[]] * num_ranks


def any_number_of_rows(rank: Rank) -> list[Any]:
    """Compile once for all numbers of rows; return the matches, and which results were right."""
    found: list[Any] = []

    def program(x: Tensor, residual: Tensor) -> Any:
        return norm_of(sum_by_operator(x) + residual)

    for rows in (3, 5, 8):
        x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rank.rank))
        with torch.no_grad():
            if not found:
                made = compile_fused(program, x, x + 1, dynamic=True)
                again = torch.compile(program, fullgraph=True, dynamic=True)
                found = [made.num_fused, "s" in made.code]
                result = made.results
            else:
                with torch.compiler.set_stance("fail_on_recompile"):
                    result = again(x, x + 1)
            found.append(torch.allclose(result, program(x, x + 1), rtol=2e-5, atol=2e-5))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_number_of_rows_may_vary(bare_pools: Any) -> None:
    rows = bare_pools(2).run(on_backend, "fastcoll", any_number_of_rows, deadline_s=250)
    assert rows == [[1, True, True, True, True]] * 2
