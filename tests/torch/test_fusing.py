# SPDX-License-Identifier: Apache-2.0
"""The compiler's pass on a decoder, whose two layers have four chains.

Fused, a program has the bits of its uncompiled text with the operator written into it. So a match
with another weight, another offset or other roundings is seen.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend, renew_group
from tests.support.fused import KEEPS_ROUNDINGS, SUMS, compile_fused, sum_by_operator
from tests.support.harness import Rank, attempt
from tests.support.llama import NORMS, Decoder, decode_by_operator

COLUMNS, NUM_ROWS = 64, 6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rows_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_ROWS, COLUMNS, generator=generator).to(dtype)


def decode(rank: Rank, norm: str, how: str, dtypes: Any = DTYPES) -> list[str]:
    """Compile a decoder of each dtype; return the differences from the program uncompiled."""
    wrong = []
    for dtype in dtypes:
        model, x = Decoder(COLUMNS, norm, SUMS[how]).to(dtype), rows_of(rank.rank, dtype)
        with torch.no_grad():
            steps, operators = model(x), decode_by_operator(model, x)
            made = compile_fused(model, x)
        counts = made.num_fused, made.calls("all_reduce_rms_norm"), made.calls("all_reduce")
        if counts != (4, 4, 0):
            wrong.append(f"{dtype}: {counts} matches, fused calls, sums left")
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        sides = zip(("normed", "summed"), made.results, steps, operators, strict=True)
        for name, found, by_steps, by_operator in sides:
            if not torch.equal(found, by_operator):
                wrong.append(f"{dtype}: {name} has other bits than the operator")
            if not torch.allclose(found, by_steps, rtol=tolerance, atol=tolerance):
                wrong.append(f"{dtype}: {name} differs from the steps")
    return wrong


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "vllm" or KEEPS_ROUNDINGS])
def test_every_norm_of_a_decoder_is_found(bare_pools: Any, norm: str) -> None:
    """On one rank: its program is compiled alone, and the others' sums change no graph."""
    found = bare_pools(1).run(on_backend, "fastcoll", decode, norm, "operator", deadline_s=400)
    assert found == [[]]


@pytest.mark.parametrize("how", [how for how in SUMS if how != "operator"])
def test_every_sum_of_a_decoder_is_found(backend_pools: Any, how: str) -> None:
    dtypes = (torch.bfloat16,)
    run = backend_pools(2).run
    assert run(on_backend, "fastcoll", decode, "llama", how, dtypes, deadline_s=400) == [[], []]


def decode_wrongly(rank: Rank, bug: str) -> list[str]:
    """Decode as a pass with a bug does."""
    from fastcoll.integrations import norm_chains

    weighted, offset = norm_chains._weighted, norm_chains._without_offset
    wide = norm_chains._wide_chain

    def narrow(plain: Any, dtype: Any) -> Any:
        chain = wide(plain, dtype)
        return chain and replace(chain, norm=replace(chain.norm, wide_sum=False))

    kept = {"_weighted": weighted, "_without_offset": offset, "_wide_chain": wide}
    bugs: dict[str, Any] = {
        "offset": ("_without_offset", lambda factor: (offset(factor)[0], 0.0)),
        "rounding": (
            "_weighted",
            lambda steps, eps, dtype, rounds_first=False: weighted(steps, eps, dtype),
        ),
        "eps": (
            "_weighted",
            lambda steps, eps, dtype, **how: weighted(steps, eps + 0.01, dtype, **how),
        ),
        "wide": ("_wide_chain", narrow),
    }
    name, planted = bugs[bug]
    setattr(norm_chains, name, planted)
    try:
        norm = {"offset": "gemma", "wide": "vllm"}.get(bug, "llama")
        dtypes = (torch.float32,) if bug == "eps" else (torch.bfloat16,)
        return decode(rank, norm, "operator", dtypes)
    finally:
        setattr(norm_chains, name, kept[name])


@pytest.mark.parametrize("bug", ["offset", "rounding", "eps", "wide"])
def test_a_wrong_match_is_seen(bare_pools: Any, bug: str) -> None:
    [wrong] = bare_pools(1).run(on_backend, "fastcoll", decode_wrongly, bug, deadline_s=400)
    assert any("other bits than the operator" in line for line in wrong), wrong


# ---- programs around it --------------------------------------------------------------------------


def fuse_on_one_rank(rank: Rank, how: str) -> list[float]:
    """Rank 0's program is fused, and rank 1's is not compiled."""
    model, x = Decoder(COLUMNS, "torch", SUMS[how]), torch.ones(NUM_ROWS, COLUMNS)
    with torch.no_grad():
        normed, _ = compile_fused(model, x).results if rank.rank == 0 else model(x)
    return [round(one, 4) for one in normed[0].tolist()]


@pytest.mark.parametrize("how", ["operator", "torch"])
def test_a_rank_may_fuse_by_itself(backend_pools: Any, how: str) -> None:
    run = backend_pools(2).run
    one, other = run(on_backend, "fastcoll", fuse_on_one_rank, how, deadline_s=400)
    assert one == pytest.approx(other, abs=2e-4)


def gradients(model: Decoder, x: torch.Tensor, run: Any) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    normed, summed = run(model, leaf)
    loss = (normed**3).sum() + (summed**2).mean()
    return [one.detach() for one in torch.autograd.grad(loss, [leaf, *model.parameters()])]


def train(rank: Rank) -> list[bool]:
    """Compare a compiled program's gradients with those of the program uncompiled."""
    model, x = Decoder(COLUMNS, "llama", sum_by_operator, num_layers=1), rows_of(rank.rank)
    wanted = gradients(model, x, lambda model, x: model(x))
    found: list[torch.Tensor] = []

    def run(model: Decoder, x: torch.Tensor) -> Any:
        return compile_fused(model, x, kernels=False).results

    found = gradients(model, x, run)
    pairs = zip(found, wanted, strict=True)
    return [torch.allclose(one, want, rtol=2e-3, atol=2e-4) for one, want in pairs]


def test_a_program_with_gradients_keeps_them(bare_pools: Any) -> None:
    for found in bare_pools(2).run(on_backend, "fastcoll", train, deadline_s=400):
        assert len(found) == 5 and all(found)


def outlive_the_group(rank: Rank) -> list[Any]:
    """Run a fused program in another group of torch's that has the name of the first."""
    calls, name = torch.ops._c10d_functional, dist.group.WORLD.group_name  # type: ignore[union-attr]

    def program(x: torch.Tensor) -> Any:
        total = calls.wait_tensor(calls.all_reduce(x, "sum", name))
        return torch.nn.functional.rms_norm(total, (COLUMNS,), None, 1e-6)

    x, found = rows_of(rank.rank), []
    with torch.no_grad():
        found.append(compile_fused(program, x).num_fused)
        again = torch.compile(program, fullgraph=True)
        for backend in ("fastcoll", "gloo"):
            renew_group(rank, backend)
            with torch.compiler.set_stance("fail_on_recompile"):
                found.append(again(x) if backend == "fastcoll" else attempt(again, x))
    return found


def test_a_fused_program_takes_the_group_of_its_name(bare_pools: Any) -> None:
    for rank, (num_fused, same, gloo) in enumerate(
        bare_pools(2).run(on_backend, "fastcoll", outlive_the_group, deadline_s=400)
    ):
        total = rows_of(0) + rows_of(1)
        wanted = torch.nn.functional.rms_norm(total, (COLUMNS,), None, 1e-6)
        assert num_fused == 1
        torch.testing.assert_close(same, wanted, rtol=2e-5, atol=2e-5)
        assert gloo.kind == "UsageError" and "trace the program again" in gloo.text, rank
