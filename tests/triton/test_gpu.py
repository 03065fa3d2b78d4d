# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on a GPU: several ranks share it, each on a stream of its own.

Decides what a device adds to the interpreter: compiled code, threads, captured graphs. Results are
compared with the oracle's, bit for bit.
"""

from collections.abc import Callable

import pytest
import torch
from streams import Group

from fastcoll_kernels import epilogues, one_shot, two_shot
from fastcoll_kernels.call import Launch
from fastcoll_kernels.workspace import Workspace
from tests.support import oracle
from tests.triton.ranks import Case, bits_of, tensor_of, words_in
from tests.triton.test_collectives import SIZES, WAYS, expected

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32")
MODULES = {"one_shot": one_shot, "two_shot": two_shot}


def collective(case: Case, outs: list[torch.Tensor]) -> Callable[[Workspace], object]:
    """The call of a case; `outs` are the ranks' outputs."""
    sources = [
        tensor_of(words_in(case.dtype, case.numel, rank, case.seed), case.dtype).cuda()
        for rank in range(len(outs))
    ]
    module = MODULES[case.algorithm]
    launch = Launch(case.channels, 4, case.block)

    def call(space: Workspace) -> object:
        source, out = sources[space.rank], outs[space.rank]
        if case.verb == "all_reduce":
            return module.all_reduce(source, space, case.op, out=out, launch=launch)
        return module.reduce_scatter(out, source, space, case.op, launch=launch)

    return call


def outputs(case: Case, world: int) -> list[torch.Tensor]:
    numel = case.numel if case.verb == "all_reduce" else case.numel // world
    dtype = getattr(torch, case.dtype)
    return [torch.zeros(numel, device="cuda").to(dtype) for _ in range(world)]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_oracles(world: int, dtype: str) -> None:
    group = Group(world)
    for turn, numel in enumerate((*SIZES, 100_003)):
        for algorithm, verb in WAYS:
            total = numel if verb == "all_reduce" else numel * world
            ops = oracle.ops_of(dtype)
            op = ops[turn % len(ops)]
            case = Case(algorithm, verb, dtype, total, op, 1024, 1 + turn % 4, turn)
            outs = outputs(case, world)
            group.run(collective(case, outs))
            for rank, space in enumerate(group.spaces):
                assert space.broken() is None
                assert (bits_of(outs[rank].cpu()) == expected(case, world, rank)).all(), case


@pytest.mark.parametrize(("algorithm", "verb"), WAYS)
def test_a_captured_graph_is_replayed(algorithm: str, verb: str) -> None:
    case = Case(algorithm, verb, "bfloat16", 8192, "SUM", 1024, 2, 1)
    group, outs = Group(2), outputs(case, 2)
    replays = group.capture(collective(case, outs), 1)
    for _ in range(20):
        for out in outs:
            out.zero_()
        group.replay(replays)
        for rank, out in enumerate(outs):
            assert (bits_of(out.cpu()) == expected(case, 2, rank)).all()


@pytest.mark.parametrize(("algorithm", "verb"), WAYS)
def test_a_rank_that_never_arrives(algorithm: str, verb: str) -> None:
    case = Case(algorithm, verb, "bfloat16", 4096, "SUM", 1024, 2, 1)
    group, outs = Group(2, limit_s=0.5), outputs(case, 2)
    for _ in range(20):  # all but the first drain at once
        group.run(collective(case, outs), who=[0])
    verdict = group.spaces[0].broken()
    assert verdict is not None
    assert (verdict.rank, verdict.missing) == (0, 1)
    assert outs[0].isnan().all()


def test_fused_is_unfused() -> None:
    """all_reduce -> add -> RMSNorm, against the three steps."""
    rows, columns = 37, 4096
    group = Group(2)
    parts = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)]
    residual = torch.randn(rows, columns, device="cuda").bfloat16()
    weight = torch.randn(columns, device="cuda").bfloat16()
    outs, summed = ([torch.empty_like(residual) for _ in range(2)] for _ in range(2))

    def call(space: Workspace) -> object:
        out = outs[space.rank]
        fused = epilogues.add_rms_norm(out, residual, weight, 1e-5, summed[space.rank])
        return one_shot.all_reduce(parts[space.rank], space, out=out, epilogue=fused)

    group.run(call)
    total = (parts[0] + parts[1]) + residual
    norm = torch.nn.functional.rms_norm(total.float(), (columns,), weight.float(), 1e-5)
    for rank in range(2):
        assert torch.equal(summed[rank], total)
        torch.testing.assert_close(outs[rank].float(), norm, rtol=2.0**-7, atol=1e-6)
