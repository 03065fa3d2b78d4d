# SPDX-License-Identifier: Apache-2.0
"""A fused call has the bits of the plain call followed by the step, by every kernel that reduces.

Decides what the steps should give, from the oracle's result of the reduction.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import oracle, row_oracle
from tests.support.harness import Rank
from tests.triton import ranks
from tests.triton.ranks import World, bits_of, tensor_of, words_in

pytestmark = [pytest.mark.proof("kernels"), pytest.mark.long]

ROWS, COLUMNS = 6, 40
NUMEL = ROWS * COLUMNS
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
KERNELS = ("one_shot", "two_shot", "reduce", "apply")


def plain_words(dtype: str, seed: int) -> np.ndarray:
    """Ordinary numbers."""
    numbers = np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)
    return oracle.encode(numbers, dtype)


def fuse(me: Rank, world: World, kernel: str) -> dict[str, Any]:
    """Every epilogue behind one kernel; what it stored, by name, as bits."""
    import importlib

    from fastcoll_kernels import call, epilogues
    from tests.triton.users_epilogue import square_plus

    space = ranks.workspace(me, world)
    module = importlib.import_module(f"fastcoll_kernels.{kernel}")
    launch = call.Launch(2, 4, 64)
    found = {}

    def run(name: str, dtype: str, out: torch.Tensor, epilogue: Any, op: str = "SUM") -> None:
        parts = [words_in(dtype, NUMEL, rank, 1) for rank in range(world.world_size)]
        tensors = [tensor_of(words, dtype).view(out.shape) for words in parts]
        if kernel == "reduce":
            table = [tensor.data_ptr() for tensor in tensors]
            options: dict[str, Any] = {"dtype": tensors[0].dtype}
            module.reduce(table, out, op, epilogue=epilogue, launch=launch, **options)
        elif kernel == "apply":
            plain = tensor_of(oracle.reduce(parts, dtype, op, world.world_size), dtype)
            module.apply(plain, out, epilogue, launch)
        else:
            mine = tensors[me.rank]
            module.all_reduce(mine, space, op, out=out, epilogue=epilogue, launch=launch)
        found[name] = bits_of(out)

    run("scale", "bfloat16", torch.empty(NUMEL, dtype=torch.bfloat16), epilogues.scale(0.3))
    run("cast", "float32", torch.empty(NUMEL, dtype=torch.float8_e5m2), None, "AVG")
    addend = tensor_of(plain_words("float32", 3), "float32")
    rows = torch.full((ROWS, COLUMNS), -1)
    user = call.Epilogue(square_plus, (addend, rows), by_rows=True)
    run("user", "float16", torch.empty(ROWS, COLUMNS), user)
    found["user_rows"] = rows.numpy()
    for dtype in LARGEST:
        out = torch.empty(ROWS, COLUMNS, dtype=getattr(torch, dtype))
        scales = torch.empty(ROWS)
        run(f"rows_{dtype}", "bfloat16", out, epilogues.quantise_rows(out, scales))
        found[f"rows_scale_{dtype}"] = bits_of(scales)
        half, amax, scale = torch.empty(NUMEL), torch.zeros(1), torch.empty(1)
        run("amax", "float16", half, epilogues.track_amax(amax))
        epilogues.quantise(half, amax, out.view(-1), scale, launch)
        found[f"whole_{dtype}"] = bits_of(out)
        found[f"whole_scale_{dtype}"] = bits_of(scale)
    for dtype in ("float32", "bfloat16"):
        out = torch.empty(ROWS, COLUMNS, dtype=getattr(torch, dtype))
        residual = tensor_of(plain_words(dtype, 4), dtype).view(out.shape)
        weight = tensor_of(plain_words(dtype, 5)[:COLUMNS], dtype)
        run(f"norm_{dtype}", dtype, out, epilogues.add_rms_norm(out, residual, weight, 1e-5))
        found[f"norm_sums_{dtype}"] = bits_of(residual)
        if kernel == "apply":
            fused = epilogues.add_rms_norm(out, residual.zero_(), weight, 1e-5)
            module.apply(tensor_of(edges(dtype), dtype).view(out.shape), out, fused, launch)
            found[f"edges_{dtype}"], found[f"edges_sums_{dtype}"] = bits_of(out), bits_of(residual)
    found["verdict"] = space.broken()
    return found


def reduced(dtype: str, world: int, op: str = "SUM") -> np.ndarray:
    """The plain call's result, as numbers."""
    words = [words_in(dtype, NUMEL, rank, 1) for rank in range(world)]
    return oracle.decode(oracle.reduce(words, dtype, op, world), dtype)


def edges(dtype: str) -> np.ndarray:
    """Rows of zeros, of subnormals and of the largest numbers, one with infinity, one with NaN."""
    rows = np.random.default_rng(6).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    rows[0], rows[1], rows[2] = 0, rows[1] * np.float32(1e-39), np.float32(3e38)
    rows[3, 5], rows[4, 7] = np.inf, np.nan
    return oracle.encode(rows.reshape(-1), dtype)


def check_norm(found: dict[str, Any], name: str, plain: np.ndarray, dtype: str) -> None:
    """Compare with the definition of docs/numerics.md."""
    rows, added = (one.reshape(ROWS, COLUMNS) for one in (plain, plain_words(dtype, 4)))
    weight = plain_words(dtype, 5)[:COLUMNS]
    norm = row_oracle.Norm(1e-5, weight=weight, weight_dtype=dtype)
    summed, normed = row_oracle.rms_norm(rows, dtype, norm, added * (name == "norm"))
    assert np.array_equal(found[f"{name}_sums_{dtype}"], summed.reshape(-1))
    assert np.array_equal(found[f"{name}_{dtype}"], normed.reshape(-1))


def quantised(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fp8: the bits and the scales'."""
    magnitude = np.abs(values).max(axis=1)  # propagates NaN
    scale = np.maximum(magnitude / np.float32(LARGEST[dtype]), np.float32(2.0**-126))
    with np.errstate(all="ignore"):
        quotient = values / scale[:, None]
    return oracle.encode(quotient.reshape(-1), dtype), oracle.encode(scale, "float32")


@pytest.mark.parametrize(
    "kernel", [KERNELS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in KERNELS[1:])]
)
def test_fused_is_unfused(
    interpreters: Callable[..., Any], new_world: Callable[..., World], kernel: str
) -> None:
    for found in interpreters(2)(fuse, new_world(2), kernel):
        assert found["verdict"] is None
        with np.errstate(all="ignore"):
            scaled = reduced("bfloat16", 2) * np.float32(0.3)
            halves = reduced("float16", 2)
            user = halves * halves + plain_words("float32", 3).view(np.float32)
        assert np.array_equal(found["scale"], oracle.encode(scaled, "bfloat16"))
        cast = oracle.encode(reduced("float32", 2, "AVG"), "float8_e5m2")
        assert np.array_equal(found["cast"], cast)
        assert np.array_equal(found["user"], oracle.encode(user, "float32"))
        assert np.array_equal(
            found["user_rows"], np.repeat(np.arange(ROWS), COLUMNS).reshape(ROWS, -1)
        )
        for dtype in LARGEST:
            bits, scales = quantised(reduced("bfloat16", 2).reshape(ROWS, COLUMNS), dtype)
            assert np.array_equal(found[f"rows_{dtype}"], bits)
            assert np.array_equal(found[f"rows_scale_{dtype}"], scales)
            bits, scales = quantised(halves.reshape(1, NUMEL), dtype)
            assert np.array_equal(found[f"whole_{dtype}"], bits)
            assert np.array_equal(found[f"whole_scale_{dtype}"], scales)
        for dtype in ("float32", "bfloat16"):
            check_norm(found, "norm", oracle.encode(reduced(dtype, 2), dtype), dtype)
            if kernel == "apply":
                check_norm(found, "edges", edges(dtype), dtype)


def test_epilogues_of_a_broken_group_hand_nan_on(
    interpreters: Callable[..., Any], new_world: Callable[..., World]
) -> None:
    found = interpreters(2)(fuse_alone, new_world(2, limits_s=(1.0,), absent=(1,)))[0]
    assert found["verdict"][:2] == (0, 1)
    assert (found["out"] == oracle.FLOATS["float8_e4m3fn"].canonical_nan).all()
    assert np.isnan(found["scales"].view(np.float32)).all()


def fuse_alone(me: Rank, world: World) -> dict[str, Any]:
    """One fused call, in which a rank is missing."""
    from fastcoll_kernels import call, epilogues, one_shot

    if me.rank in world.absent:
        return {}
    space = ranks.workspace(me, world)
    out = torch.zeros(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(ROWS)
    tensor = torch.zeros(ROWS, COLUMNS)
    fused = epilogues.quantise_rows(out, scales)
    one_shot.all_reduce(tensor, space, out=out, epilogue=fused, launch=call.Launch(2))
    verdict = space.broken()
    return {
        "verdict": verdict and tuple(verdict),
        "out": bits_of(out),
        "scales": bits_of(scales),
    }
