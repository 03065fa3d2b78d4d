# SPDX-License-Identifier: Apache-2.0
"""Calls that NCCL carries, with Gloo for NCCL and the CPU for the kernels (support/fake_gpu.py).

NCCL's own work, and that its streams are waited for, is for tests/gpu/test_nccl.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastcoll.choose import algorithms, select
from fastcoll.cli import app
from fastcoll.cli.console import ExitCode
from fastcoll.errors import UnsupportedError
from fastcoll.machine import gpu
from fastcoll.types import Algorithm, DType, Op, Verb, nccl_adds
from tests.gpu_host.gpu_rows import request
from tests.gpu_host.test_gpu_host import agree_terms, hello
from tests.support import oracle
from tests.support.calls import Call, expected
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Attempt, Pools, Rank, attempt
from tests.support.perform import Result, compare, perform_all
from tests.support.sites import NCCL_CARRIES, by_fake_nccl, group_on_fake_gpu

pytestmark = needs_gpu_part

WORLD = 3


# ---- the choice ----------------------------------------------------------------------------------


def test_nccl_carries_where_kernels_reach_no_peer() -> None:
    for verb in Verb:
        apart = request(verb=verb, reaches_peers=False)
        choice = select(apart, algorithms.ALL)
        assert choice.plan.algorithm is Algorithm.nccl
        assert {name for name, why in choice.reasons.items() if why.endswith(" us")} == {"nccl"}
    with pytest.raises(UnsupportedError, match=r"no algorithm runs .*torch has no NCCL on rank 1"):
        select(request(reaches_peers=False, no_nccl="torch has no NCCL on rank 1"), algorithms.ALL)


@pytest.mark.parametrize("verb", Verb, ids=lambda verb: verb.name)
def test_the_model_never_prefers_nccl_to_kernels(verb: Verb) -> None:
    for numel in (1, 1000, 1 << 20, 1 << 28):
        for numerics in ("same_bits", "fast"):
            asked = request(verb=verb, numel=numel, numerics=numerics)
            assert select(asked, algorithms.ALL).plan.algorithm is not Algorithm.nccl


def test_nccl_can_be_asked_for_and_says_why_not() -> None:
    plan = select(request(algorithm="nccl"), algorithms.ALL).plan
    assert (plan.algorithm, plan.channels) == (Algorithm.nccl, 16)
    assert "-> nccl" in plan.describe()
    with pytest.raises(UnsupportedError, match="NCCL can't be used here: it is too old"):
        select(request(algorithm="nccl", no_nccl="it is too old"), algorithms.ALL)
    with pytest.raises(UnsupportedError, match="nccl is for GPUs"):
        select(request(algorithm="nccl", num_channels=0), algorithms.ALL)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_nccl_adds_itself_only_where_its_order_and_its_numbers_are_ours(dtype: DType) -> None:
    for op in Op:
        if not nccl_adds(dtype, op, any_order=False):
            continue
        assert not oracle.order_matters(dtype.name, op.name)
        assert dtype not in (DType.bool, DType.float32), "it adds bools up, and drops a NaN"
    assert nccl_adds(DType.bfloat16, Op.SUM, any_order=True)


def missing_nccl(*names: str, gpus: str = "ab") -> str:
    hellos = [hello(uuid, nccl=name) for uuid, name in zip(gpus, names, strict=True)]
    return agree_terms(hellos).no_nccl


def test_all_ranks_agree_whether_nccl_can_be_had() -> None:
    assert missing_nccl("2.27.5", "2.27.5") == ""
    assert missing_nccl("2.27.5", "") == "torch has no NCCL on rank 1"
    assert missing_nccl("2.27.5", "2.28.3").endswith("rank 0: 2.27.5, rank 1: 2.28.3")
    assert "2 ranks share a GPU" in missing_nccl("2.27.5", "2.27.5", gpus="aa")
    sharing = "2.30.1" + gpu.NCCL_SHARES
    assert missing_nccl(sharing, sharing, gpus="aa") == ""


def test_explain_says_it_of_this_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    command = ["explain", "all_reduce", "1M", "--ranks", "4", "--device", "cuda"]
    refused = runner.invoke(app, command)
    assert refused.exit_code == ExitCode.MISSING
    monkeypatch.setattr(gpu, "problem", lambda: "")
    one = gpu.Gpu(0, "Some GPU", "id", 90, 132, True, False)
    monkeypatch.setattr(gpu, "gpus", lambda: [one] * 4)
    monkeypatch.setattr(gpu, "pairs_without_access", lambda: [(0, 1)])
    monkeypatch.setattr(gpu, "nccl_name", lambda: "2.27.5")
    told = runner.invoke(app, command, env={"COLUMNS": "200"})
    assert "4 ranks on GPUs, 1 on each" in told.output, told.output
    assert "the GPUs do not reach each other's memory" in told.output
    assert "-> nccl" in told.output
    monkeypatch.setattr(gpu, "nccl_name", lambda: "")
    assert "torch has no NCCL" in runner.invoke(app, command, env={"COLUMNS": "200"}).output


# ---- calls ---------------------------------------------------------------------------------------


def asked(rank: Rank) -> list[str]:
    """List what is asked of NCCL."""
    with group_on_fake_gpu(rank, **NCCL_CARRIES) as (comm, core):
        comm.reduce(torch.ones(7, dtype=torch.int32), 1)
        comm.all_reduce(torch.ones(7))
        assert core.log == ["add"]
        return comm._gpus.group._nccl._group.log


def test_nccl_adds_what_has_no_order_and_moves_the_rest(own_pools: Pools) -> None:
    for called in own_pools(WORLD).run(asked):
        assert "reduce" in called
        assert "alltoall_base" in called


def test_a_wrong_order_would_be_seen(own_pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what one rank adds comes in the order of another one's parts."""
    calls = [Call("all_reduce", "float32", 300, seed=2)]
    rows = own_pools(WORLD).run(in_wrong_order, calls)
    assert compare(calls, [expected(call, WORLD) for call in calls], rows)


def in_wrong_order(rank: Rank, calls: list[Call]) -> list[Result]:
    from tests.support import fake_gpu

    right = fake_gpu.reduce_into
    fake_gpu.reduce_into = lambda target, rows, *kinds: right(target, rows[::-1], *kinds)
    try:
        return by_fake_nccl(rank, perform_all, calls)
    finally:
        fake_gpu.reduce_into = right


def listed(rank: Rank) -> None:
    with group_on_fake_gpu(rank, **NCCL_CARRIES) as (comm, _):
        tensors = [torch.ones(3), torch.ones(5, dtype=torch.int64)]
        comm.all_reduce_coalesced(tensors)
        assert all(bool((one == comm.world_size).all()) for one in tensors)
        assert "nccl" in comm.gpu_report()


def test_lists(own_pools: Pools) -> None:
    own_pools(WORLD).run(listed)


def nothing_to_send(rank: Rank) -> float:
    from fastcoll.calls.batches import P2POp

    other = 1 - rank.rank
    with group_on_fake_gpu(rank, **NCCL_CARRIES) as (comm, _):
        ops = [P2POp(way, torch.empty(0), other) for way in ("isend", "irecv")]
        for work in comm.batch_isend_irecv(ops):
            work.wait()
        tensor = torch.ones(3)
        comm.all_reduce(tensor)
    return float(tensor.sum())


def test_messages_of_no_elements_need_no_nccl(own_pools: Pools) -> None:
    assert own_pools(2).run(nothing_to_send) == [6.0, 6.0]


# ---- mistakes ------------------------------------------------------------------------------------


def differ(rank: Rank, how: str) -> tuple[Attempt, Attempt]:
    """Rank 1 makes another call than the others, all of them through NCCL."""
    odd = rank.rank == 1
    some = torch.ones(6)
    with group_on_fake_gpu(rank, no_nccl="") as (comm, _):
        if how == "size":
            found = attempt(comm.all_reduce, torch.ones(6 + odd), algorithm="nccl")
        else:
            splits = [1, 2, 3] if odd else [2, 2, 2]
            side = comm._gpus.group
            side.terms = dataclasses.replace(side.terms, reaches_peers=False)
            found = attempt(comm.all_to_all_single, torch.empty(6), some, [2, 2, 2], splits)
        return found, attempt(comm.all_reduce, some, algorithm="nccl")


@pytest.mark.parametrize("how", ["size", "counts"])
def test_different_calls_are_seen_before_nccl_gets_them(own_pools: Pools, how: str) -> None:
    for found, again in own_pools(WORLD).run(differ, how):
        assert (found.kind, again.kind) == ("DesyncError", "DesyncError"), found
        if how == "size":
            assert "rank 1: all_reduce(SUM, float32, numel=7)" in found.text
        else:
            assert "rank 1 sends rank 0 1 elements, which takes 2" in found.text


class Stuck:
    """A work that never ends."""

    def is_completed(self) -> bool:
        return False


def late(rank: Rank) -> tuple[Attempt, Attempt, list[str]]:
    """NCCL does not come to the end of a call."""
    with group_on_fake_gpu(rank, no_nccl="") as (comm, core):
        comm.all_reduce(torch.ones(4), algorithm="nccl")
        side = comm._gpus.group._nccl
        side._running.append((Stuck(), 0.0))
        found = attempt(comm.check)
        again = attempt(comm.all_reduce, torch.ones(4))
        return found, again, [*side._group.log, *map(str, core.lost)]


def test_what_nccl_does_not_end_is_ended(own_pools: Pools) -> None:
    for found, again, log in own_pools(2).run(late):
        assert found.kind == again.kind == "CollectiveTimeout"
        assert "NCCL did not carry" in found.text
        assert "abort" in log


class Unasked:
    """A work whose event must not be asked for: the driver would invalidate the capture."""

    def is_completed(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def captured(rank: Rank) -> tuple[bool, bool, Attempt]:
    """Calls while this thread captures, behind one that ran outside of it and was not waited for.

    The last value: what a look finds after the capture.
    """
    from fastcoll.gpu import nccl as device_nccl

    with group_on_fake_gpu(rank, no_nccl="") as (comm, _):
        comm.all_reduce(torch.ones(4), algorithm="nccl")
        side = comm._gpus.group._nccl
        side._running.clear()
        side._running.append((Unasked(), 0.0))
        outside, device_nccl.is_current_stream_capturing = (
            device_nccl.is_current_stream_capturing,
            lambda: True,
        )
        tensors = [torch.ones(4) for _ in range(2)]
        for tensor, algorithm in zip(tensors, ("auto", "nccl"), strict=True):
            comm.all_reduce(tensor, algorithm=algorithm)
        comm.check()
        device_nccl.is_current_stream_capturing = outside
        kept = len(side._running) == 1
        side._running[0] = (Stuck(), 0.0)
        comm.barrier()  # from here on the group breaks
        late = attempt(comm.check)
    return all(float(one[0]) == comm.world_size for one in tensors), kept, late


def test_a_capture_asks_for_nothing_that_runs_outside_of_it(own_pools: Pools) -> None:
    for right, kept, late in own_pools(2).run(captured):
        assert right
        assert kept, "what is captured is not waited for"
        assert late.kind == "CollectiveTimeout"


def beside(rank: Rank) -> tuple[list[bool], list[Any]]:
    """Calls by kernels and through NCCL take turns on one group."""
    with group_on_fake_gpu(rank, no_nccl="") as (comm, core):
        right = []
        for turn in range(4):
            tensor = torch.full((50,), turn + 1.0)
            comm.all_reduce(tensor, algorithm="nccl" if turn % 2 else "auto", numerics="fast")
            right.append(bool((tensor == comm.world_size * (turn + 1)).all()))
        right.append(comm.gpu_report().endswith("nccl beside it"))
    return right, core.log


def test_kernels_and_nccl_take_turns(own_pools: Pools) -> None:
    for right, log in own_pools(2).run(beside):
        assert all(right)
        assert len(log) == 2, "the others were NCCL's, which adds by itself"
