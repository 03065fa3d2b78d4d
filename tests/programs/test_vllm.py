# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU engine on fastcoll, unchanged: the tokens are those of vLLM's own shared memory.

Runs where vLLM is installed (vllm.txt); its packages are too many for each run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Rank

pytest.importorskip("vllm", reason="vLLM is not installed: tests/programs/vllm.txt")
from vllm_engine import Batch, Engine, run  # it needs vLLM, too

pytestmark = pytest.mark.slow

BATCH = Batch(size=3, prompt_tokens=16, new_tokens=16)


# On CPUs vLLM 0.32 itself needs a compiled model for pipelines: an assertion of its own fails else.
@pytest.mark.parametrize(
    ("parallel", "eager"),
    [
        ("tensor_parallel_size", True),
        ("tensor_parallel_size", False),
        ("pipeline_parallel_size", False),
    ],
)
def test_the_engine_chooses_the_same_tokens(tmp_path: Path, parallel: str, eager: bool) -> None:
    options = {parallel: 2, "enforce_eager": eager}
    ours = run(tmp_path, Engine("fastcoll", options=options), [BATCH])
    assert "communicates through fastcoll" in ours.printed
    theirs = run(tmp_path, Engine("", options=options), [BATCH])
    assert "communicates through fastcoll" not in theirs.printed
    assert ours.tokens == theirs.tokens


@pytest.mark.timeout(900)
def test_a_compiled_engine_fuses_where_it_is_asked_to(tmp_path: Path) -> None:
    """Three starts share vLLM's cache of compiled models, which must know the two kinds apart."""
    options, counts = {"tensor_parallel_size": 2}, []
    starts = [Engine("fastcoll", options=options, fuse=fuse) for fuse in (False, True, False)]
    plain, fused, again = (run(tmp_path, one, [BATCH]) for one in starts)
    for output in (plain, fused, again):
        counts.append(output.printed.count("fastcoll fused a norm with 5 of 5 all_reduces"))
    assert counts == [0, 2, 0], fused.printed[-4000:]
    assert plain.tokens == fused.tokens == again.tokens


def communicate(rank: Rank) -> list[Any]:
    from fastcoll.integrations.vllm_communicator import FastcollCommunicator

    comm = FastcollCommunicator(
        dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, unique_name="tp:0"
    )
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank.rank
    results: list[Any] = [comm.all_reduce(mine.clone())]
    results += [comm.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [comm.gather(mine, 1, dim) for dim in (0, -1)]
    sent = {"hidden": mine, "none": torch.empty(0, 4), "step": 7, "bits": mine.to(torch.bfloat16)}
    if rank.rank == 0:
        comm.send_tensor_dict(sent, 1)
    elif rank.rank == 1:
        results.append(comm.recv_tensor_dict(0))
    return results


def test_the_calls_of_the_communicator(bare_pools: Any) -> None:
    parts = [torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in range(3)]
    rows = bare_pools(3).run(on_backend, "gloo", communicate)
    for rank, (total, *gathered) in enumerate(rows):
        assert torch.equal(total, sum(parts))
        for dim, whole in zip((0, 1, -1), gathered[:3], strict=True):
            assert torch.equal(whole, torch.cat(parts, dim))
        for dim, whole in zip((0, -1), gathered[3:5], strict=True):
            assert whole is None if rank != 1 else torch.equal(whole, torch.cat(parts, dim))
    received = rows[1][-1]
    assert list(received) == ["hidden", "none", "step", "bits"]
    assert torch.equal(received["hidden"], parts[0])
    assert torch.equal(received["bits"], parts[0].to(torch.bfloat16))
    assert (received["none"].shape, received["step"]) == ((0, 4), 7)
