# SPDX-License-Identifier: Apache-2.0
"""`then=RMSNorm(...)` gives the bits of the plain call and then the steps, and is local.

The calls are drawn (support/row_calls.py): at each site, each verb meets every dtype, algorithm and
width. Below: ranks that follow their sums by other steps than their peers, calls without Python,
memory that changes, and refused arguments.
"""

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from fastcoll.api import VERBS as VERBS_IN_PYTHON
from tests.support import oracle, row_oracle
from tests.support.calls import Call
from tests.support.draw import some
from tests.support.fallbacks import refusing
from tests.support.harness import Pools, Rank, attempt
from tests.support.oracle import decode, encode
from tests.support.row_calls import (
    COLUMNS,
    KINDS,
    ROW_DTYPES,
    RowCall,
    bits_of,
    check_rows,
    draw,
    problems_of,
    tensor_of,
    words,
)
from tests.support.row_oracle import Norm
from tests.support.sites import WITHOUT_GPU, Site, at, on_torch

# torch.distributed's verbs take no `then`.
SITES = [param for param in WITHOUT_GPU if param.values[0].in_group is not on_torch]
VERBS = ("all_reduce", "reduce_scatter")


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
@at(SITES)
def test_rows_have_the_bits_of_the_steps(site: Site, verb: str) -> None:
    check_rows(site, some(draw(site, verb, most_numel=1 << 14), 60, site.world))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@at(SITES)
def test_large_rows_have_the_bits_of_the_steps(site: Site, verb: str) -> None:
    check_rows(site, some(draw(site, verb), 80, site.world))


def test_the_generator_covers_every_option() -> None:
    calls = [one for verb in VERBS for one in draw(Site(3), verb)]
    for verb in VERBS:
        mine = [one for one in calls if one.call.verb == verb]
        assert {(one.call.dtype, one.columns) for one in mine} == {
            (dtype, columns) for dtype in ROW_DTYPES for columns in COLUMNS
        }
        for option in ("sums", "way", "in_place", "rounds_first", "wide_sum"):
            assert len({getattr(one, option) for one in mine}) >= 2, option
        assert {one.kind for one in mine} == {*KINDS}
        assert {one.out for one in mine} == {*ROW_DTYPES, "int8", "float8_e4m3fn"}


# ---- negative controls: an arithmetic that is nearly right is seen -------------------------------


def add_unrounded(plain: Any, residual: Any, dtype: str) -> Any:
    """Return the norm of a sum that was not rounded before."""
    values = np.asarray(decode(plain, dtype) + decode(residual, dtype), np.float32)
    scales = np.float32(1) / np.sqrt(row_oracle.mean_of_squares(values) + np.float32(1e-6))
    return encode(np.asarray(values * scales[:, None], np.float32), dtype)


def test_an_addition_without_its_rounding_is_seen() -> None:
    plain, residual = (words("bfloat16", (64, 512), seed) for seed in (1, 2))
    _, right = row_oracle.rms_norm(plain, "bfloat16", Norm(), residual)
    assert (add_unrounded(plain, residual, "bfloat16") != right).mean() > 0.05


def test_a_norm_of_the_rounded_sum_is_seen() -> None:
    plain, residual = (words("bfloat16", (64, 512), seed) for seed in (1, 2))
    summed, right = row_oracle.rms_norm(plain, "bfloat16", Norm(wide_sum=True), residual)
    assert (add_unrounded(plain, residual, "bfloat16") == right).all()
    rounded, wrong = row_oracle.rms_norm(plain, "bfloat16", Norm(), residual)
    assert (rounded == summed).all() and (wrong != right).mean() > 0.05


def test_an_order_of_the_squares_is_seen() -> None:
    """In fp32 two orders of one row's squares differ; the oracle's have one result."""
    row = decode(words("float32", (1, 4096), 3), "float32")[0]
    orders = [np.random.default_rng(seed).permutation(row) for seed in range(8)]
    assert len({float(np.cumsum(one * one, dtype=np.float32)[-1]) for one in orders}) > 1
    assert len({float(row_oracle.mean_of_squares(one)) for one in orders}) == 1


def test_a_wrong_bit_is_seen(pools: Pools) -> None:
    one = RowCall(Call("all_reduce", "bfloat16", 128), 64, out="bfloat16", weight="bfloat16")
    found = Site(2).on(pools(2)).run(_perform_one, one)
    assert problems_of([one], found) == []
    for name in ("out", "summed"):
        found[1][0][name][1, 5] ^= 1
        assert len(problems_of([one], found)) == 1
        found[1][0][name][1, 5] ^= 1


def _perform_one(rank: Rank, one: RowCall) -> Any:
    from tests.support.row_calls import perform_rows

    return perform_rows(rank, [one])


# ---- local ---------------------------------------------------------------------------------------


def mix(rank: Rank, seed: int, count: int) -> list[str]:
    """Make random calls, behind which each rank takes steps of its own."""
    shared, own = random.Random(seed), random.Random(seed * 100 + rank.rank)
    wrong = []
    for number in range(count):
        num_rows, columns = shared.choice([1, 2, 7]), shared.choice([3, 64, 1000, 4096])
        dtype, algorithm = shared.choice(ROW_DTYPES), shared.choice(["auto", "auto", "two_shot"])
        seeds = [number + 50 * peer for peer in range(rank.world_size)]
        inputs = [words(dtype, (num_rows, columns), one) for one in seeds]
        plain = tensor_of(inputs[rank.rank], dtype)
        want = oracle.reduce(inputs, dtype, "SUM", rank.world_size)
        how = own.choice(["plain", "norm", "residual", "late"])
        residual = words(dtype, (num_rows, columns), number + 7)
        options: dict[str, Any] = {"async_op": True} if how == "late" else {}
        if how != "plain":
            added = tensor_of(residual, dtype) if how == "residual" else None
            options["then"] = fastcoll.RMSNorm(None, 1e-5, residual=added)
            _, want = row_oracle.rms_norm(
                want, dtype, Norm(1e-5), residual if how == "residual" else None
            )
        work = rank.comm.all_reduce(plain, algorithm=algorithm, **options)
        if work is not None:
            work.wait()
        if not np.array_equal(bits_of(plain), want):
            wrong.append(f"call {number}, {how}: {dtype} [{num_rows}, {columns}] by {algorithm}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_follow_their_sums_differently(pools: Pools, world: int) -> None:
    for seed in range(5):
        assert pools(world).run(mix, seed, 40) == [[]] * world


# ---- calls without Python, and memory that changes -----------------------------------------------


def known(rank: Rank) -> list[str]:
    """Make each kind of call, again with nothing to pass it on to."""
    wrong = []
    for dtype, coded, sums, way in (
        (torch.bfloat16, False, "residual", {}),
        (torch.float16, False, "none", {}),
        (torch.float32, False, "apart", {"async_op": True}),
        (torch.bfloat16, True, "residual", {}),  # the plain result waits in the group's memory
        (torch.float32, True, "apart", {"async_op": True}),
    ):
        for verb in ("all_reduce", "reduce_scatter_tensor"):
            results = []
            for turn in range(3):
                x = torch.arange(12 * 64 * rank.world_size).reshape(-1, 64).remainder(97).to(dtype)
                shape = x.shape if verb == "all_reduce" else (12, 64)
                out = torch.zeros(shape, dtype=torch.int8 if coded else dtype)
                extra = {name: torch.ones(shape, dtype=dtype) for name in ("residual", "summed")}
                kept = {"residual": extra["residual"]} if sums == "residual" else extra
                norm = fastcoll.RMSNorm(
                    torch.ones(64, dtype=dtype),
                    **({} if sums == "none" else kept),
                    scales=torch.zeros(shape[0]) if coded else None,
                )
                arrays = {"output": out, "input": x} if verb != "all_reduce" else {"tensor": x}
                if verb == "all_reduce":
                    arrays["out"] = out
                if turn == 0:
                    getattr(rank.comm, verb)(**arrays, then=norm)
                else:
                    with refusing(verb):
                        work = getattr(rank.comm, verb)(**arrays, then=norm, **way)
                    if work is not None:
                        work.wait()
                results.append(bits_of(out))
            if not all(np.array_equal(results[0], one) for one in results[1:]):
                wrong.append(f"{verb} {dtype} {coded} {sums}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_known_call_needs_no_python(pools: Pools, world: int) -> None:
    assert pools(world).run(known) == [[]] * world


def change_memory(rank: Rank) -> list[str]:
    """A norm that is kept sees its tensors as they are at each call."""
    wrong = []
    weight, residual = torch.ones(64), torch.zeros(4, 64)
    norm = fastcoll.RMSNorm(weight, residual=residual)
    want = []
    for turn in range(4):
        x = torch.full((4, 64), float(rank.rank + 1))
        if turn == 1:
            weight.data = torch.full((64,), 3.0)
        if turn == 2:
            weight.data = torch._neg_view(torch.full((64,), -3.0))
        if turn == 3:
            weight.untyped_storage().resize_(8)
        found = attempt(rank.comm.all_reduce, x, then=norm)
        residual.zero_()
        want.append((x[0, 0].item(), found.kind))
    ones, threes = want[0], want[1]
    if not abs(ones[0] - 1) < 1e-5 or not abs(threes[0] - 3) < 1e-5:
        wrong.append(f"{want}")
    if want[3][1] != "UsageError":
        wrong.append(f"freed memory: {want[3]}")
    return wrong


def test_changed_memory_is_seen(pools: Pools) -> None:
    assert pools(2).run(change_memory) == [[]] * 2


def count_versions(rank: Rank) -> list[list[int]]:
    """Return the writes that autograd counts: of unknown calls, of known ones, and by Python."""
    counts = []
    for all_reduce in (fastcoll.all_reduce, fastcoll.all_reduce, VERBS_IN_PYTHON["all_reduce"]):
        tensors = [torch.ones(4, 64) for _ in range(3)]
        scales, codes = torch.ones(4), torch.zeros(4, 64, dtype=torch.int8)
        x, residual, summed = tensors
        before = [one._version for one in (codes, x, residual, summed, scales)]
        norm = fastcoll.RMSNorm(residual=residual, summed=summed, scales=scales)
        all_reduce(x, group=rank.comm, out=codes, then=norm)
        after = [one._version for one in (codes, x, residual, summed, scales)]
        counts.append([b - a for a, b in zip(before, after, strict=True)])
    return counts


def test_autograd_sees_every_tensor_that_is_written(pools: Pools) -> None:
    assert pools(2).run(count_versions) == [[[1, 0, 0, 1, 1]] * 3] * 2


# ---- the object ----------------------------------------------------------------------------------


def test_a_norm_cannot_be_changed() -> None:
    norm = fastcoll.RMSNorm(torch.ones(64), 1e-5, offset=1.0)
    assert (norm.eps, norm.offset, norm.residual) == (1e-5, 1.0, None)
    assert repr(norm) == "<fastcoll.RMSNorm eps=1e-05, offset=1, rounds_first=False, weight=(64,)>"
    with pytest.raises(AttributeError):
        norm.eps = 1.0  # type: ignore[misc]
    for wrong in ({"bias": 1}, {"weight": None}):
        with pytest.raises(TypeError):
            fastcoll.RMSNorm(torch.ones(64), **wrong)  # type: ignore[arg-type]


def test_the_garbage_collector_meets_each_reference_of_a_norm_once() -> None:
    weight, residual = torch.ones(64), torch.ones(64)
    norm = fastcoll.RMSNorm(weight, residual=residual)
    met = [id(one) for one in gc.get_referents(norm) if one is not None]
    assert sorted(met) == sorted(map(id, (fastcoll.RMSNorm, weight, residual)))
