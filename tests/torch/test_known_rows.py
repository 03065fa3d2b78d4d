# SPDX-License-Identifier: Apache-2.0
"""The operator all_reduce_rms_norm where a call is known: in C++ on the compiled backend.

On both backends it has the bits of `then=RMSNorm(...)`, and the errors and the derivatives of a
call that is not known.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import fastcoll
from fastcoll.integrations import graph_names, ops  # noqa: F401 - makes torch.ops.fastcoll
from tests.support.backends import on_backend, same
from tests.support.harness import Rank, attempt
from tests.torch.test_known_operators import entering
from tests.torch.test_row_ops import COLUMNS, EPS, ROWS, given, loss_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Terms = tuple[Any, ...]  # of a call of the operator, but for the group


def call(terms: Terms, name: str) -> list[Tensor]:
    pair: list[Tensor] = torch.ops.fastcoll.all_reduce_rms_norm(*terms, name)
    return pair


def by_the_verb(terms: Terms) -> list[Tensor]:
    """Make the call of `fastcoll.all_reduce` that the operator stands for."""
    x, residual, weight, eps, offset, rounds_first, wide_sum, op = terms
    out, summed = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    norm = fastcoll.RMSNorm(
        None if weight is None else weight.contiguous(),
        eps,
        residual=None if residual is None else residual.resolve_neg().contiguous(),
        summed=summed,
        offset=offset,
        rounds_first=rounds_first,
        wide_sum=wide_sum,
    )
    op = dist.ReduceOp.AVG if op else dist.ReduceOp.SUM
    fastcoll.all_reduce(x.contiguous(), op, group=dist.group.WORLD, out=out, then=norm)
    return [out, summed]


# ---- values --------------------------------------------------------------------------------------


def plain_calls(rank: int) -> Iterator[Terms]:
    for dtype, of_weight in itertools.product(DTYPES, (None, *DTYPES)):
        x, residual, weight = given(rank, dtype)
        weight = None if of_weight is None else weight.to(of_weight)
        yield x, residual, weight, EPS, 1.0, False, False, 0
        yield x, None, weight, 0.5, 0.25, True, False, 1
        yield x, x, weight, EPS, 0.0, True, False, 0  # one tensor twice
        yield x, residual, weight, EPS, 0.0, True, True, 0
    x, residual, weight = given(rank)
    yield x[0], residual[0], weight, EPS, 0.0, False, False, 0
    yield x[:, None], residual[:, None], weight, EPS, 0.0, False, False, 0
    yield x[:0], residual[:0], weight, EPS, 0.0, False, False, 0
    yield x[1:], residual[1:], weight.expand(1, COLUMNS)[0], EPS, 0.0, False, False, 0


def odd_calls(rank: int) -> Iterator[Terms]:
    """Calls that Python carries out, on tensors that are not plain."""
    x, residual, weight = given(rank)
    wide = torch.stack([x, residual], -1)
    yield wide[..., 0], residual, weight, EPS, 0.0, False, False, 0
    yield x, wide[..., 1], weight, EPS, 0.0, False, False, 0
    yield x, residual, torch.stack([weight, weight], -1)[:, 0], EPS, 0.0, False, False, 0
    yield x, torch._neg_view(-residual), weight, EPS, 0.0, False, False, 0


def compare_bits(rank: Rank) -> tuple[list[str], list[int]]:
    """Return what differs, and how many functions Python entered in known plain and odd calls."""
    name = graph_names.name_of(dist.group.WORLD)
    wrong, counts = [], []
    for calls in (plain_calls, odd_calls):
        entered: list[str] = []
        for number, terms in enumerate(calls(rank.rank)):
            tensors = [one for one in terms[:3] if one is not None]
            kept, versions = [one.clone() for one in tensors], [one._version for one in tensors]
            first = call(terms, name)
            with entering(entered):
                again = call(terms, name)
            wanted = by_the_verb(terms)
            for found in (first, again):
                if not all(map(torch.equal, found, wanted)):
                    wrong.append(f"{calls.__name__} {number} has other bits")
                if [(one.dtype, one.is_contiguous()) for one in found] != [
                    (terms[0].dtype, True)
                ] * 2:
                    wrong.append(f"{calls.__name__} {number} has other results")
            if not all(map(torch.equal, tensors, kept)):
                wrong.append(f"{calls.__name__} {number} writes its inputs")
            if [one._version for one in tensors] != versions:
                wrong.append(f"{calls.__name__} {number} counts a write")
        counts.append(len(entered))
    return wrong, counts


def test_known_calls_have_the_bits_of_the_verb(compiled_pools: Any, bare_pools: Any) -> None:
    for wrong, (plain, odd) in compiled_pools(2).run(on_backend, "fastcoll", compare_bits):
        assert wrong == []
        assert plain == 0 < odd
    for wrong, (plain, odd) in bare_pools(2).run(on_backend, "fastcoll", compare_bits):
        assert wrong == []
        assert plain > 0 < odd


# ---- errors --------------------------------------------------------------------------------------


def mistakes(rank: int) -> dict[str, Terms]:
    x, residual, weight = given(rank)
    double, whole = x.double(), torch.ones(ROWS, COLUMNS, dtype=torch.int32)
    rest: Terms = EPS, 0.0, False, False, 0
    return {
        "a short residual": (x, residual[:1], weight, *rest),
        "a residual of another shape": (x, residual.reshape(COLUMNS, ROWS), weight, *rest),
        "a residual of another dtype": (x, residual.half(), weight, *rest),
        "a long weight": (x, residual, torch.ones(COLUMNS + 1), *rest),
        "a weight of two dimensions": (x, residual, weight[None], *rest),
        "a weight of another dtype": (x, residual, weight.double(), *rest),
        "a negative eps": (x, residual, weight, -1.0, *rest[1:]),
        "an infinite eps": (x, residual, weight, float("inf"), *rest[1:]),
        "MAX": (x, residual, weight, *rest[:4], 4),
        "no reduction": (x, residual, weight, *rest[:4], 1 << 32),
        "a negative reduction": (x, residual, weight, *rest[:4], -(1 << 32)),
        "float64": (double, double, weight, *rest),
        "int32": (whole, None, None, *rest),
        "no rows": (torch.ones(()), None, None, *rest),
        "no columns": (torch.ones(3, 0), None, None, *rest),
    }


def refuse(rank: Rank) -> list[tuple[str, str, str]]:
    """Make each mistake where the sum behind it is known; then use a group that is closed."""
    group = fastcoll.new_group()
    name, seen = graph_names.name_of(group), []
    right = (*given(rank.rank), EPS, 0.0, False, False, 0)
    for what, terms in mistakes(rank.rank).items():
        if terms[6] in range(8):
            torch.ops.fastcoll.all_reduce(terms[0], terms[6], name)
        for _ in range(2):
            call(right, name)
            seen.append((what, *error_of(terms, name)))
    call(right, name)
    group.close()
    seen.append(("closed", *error_of(right, name)))
    del group
    return [*seen, ("gone", *error_of(right, name))]


def error_of(terms: Terms, name: str) -> tuple[str, str]:
    """Return the error of a call, without the names of groups, which differ between runs."""
    found = attempt(call, terms, name)
    return found.kind, re.sub('"[^"]*"', '"..."', found.text)


def test_known_calls_have_the_errors_of_unknown_ones(compiled_pools: Any, bare_pools: Any) -> None:
    compiled = compiled_pools(2).run(on_backend, "fastcoll", refuse)
    python = bare_pools(2).run(on_backend, "fastcoll", refuse)
    assert compiled == python
    assert all(kind for _, kind, _ in compiled[0])


# ---- derivatives ---------------------------------------------------------------------------------


def derive(rank: Rank) -> dict[str, Any]:
    """Take derivatives of a call that is known, of all tensors and of one alone."""
    name, found = graph_names.name_of(dist.group.WORLD), {}
    rest: Terms = (EPS, 1.0, False, False, 0)

    def run(*tensors: Tensor) -> list[Tensor]:
        return call((*tensors, *rest), name)

    for which in ((0, 1, 2), (0,), (1,), (2,)):
        tensors = given(rank.rank)
        leaves = [tensors[one].requires_grad_() for one in which]
        with torch.no_grad():
            run(*tensors)
            assert not any(one.requires_grad for one in run(*tensors))
        loss = loss_of(rank.rank, *run(*tensors))
        found[f"backward {which}"] = [*torch.autograd.grad(loss, leaves)]
    tensors = given(rank.rank)
    found["grad"] = torch.func.grad(lambda a: loss_of(rank.rank, *run(a, *tensors[1:])))(tensors[0])
    for place in range(3):
        with forward_ad.dual_level():
            dual = [*tensors]
            dual[place] = forward_ad.make_dual(dual[place], dual[place])
            found[f"dual {place}"] = attempt(run, *dual).text
    return found


@pytest.mark.long
def test_known_calls_have_derivatives(compiled_pools: Any, bare_pools: Any) -> None:
    """The same as on the Python backend, whose values test_row_ops has."""
    compiled = compiled_pools(2).run(on_backend, "fastcoll", derive)
    for found, wanted in zip(
        compiled, bare_pools(2).run(on_backend, "fastcoll", derive), strict=True
    ):
        assert found.keys() == wanted.keys()
        for name, one in found.items():
            assert same(one, wanted[name]), name
        assert all("no forward derivative" in found[f"dual {place}"] for place in range(3))
        assert [len(found[name]) for name in found if name.startswith("backward")] == [3, 1, 1, 1]
