# SPDX-License-Identifier: Apache-2.0
"""Calls that NCCL carries, with Gloo for NCCL and the CPU for the kernels (support/fake_gpu.py).

What NCCL itself does, and that its streams are waited for, is for tests/gpu/test_nccl.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastcoll.choose import algorithms, select
from fastcoll.cli import app
from fastcoll.errors import UnsupportedError
from fastcoll.machine import gpu
from fastcoll.types import Algorithm, DType, Op, Request, Verb, nccl_adds
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call, Place, expected
from tests.support.harness import Attempt, Pools, Rank, attempt
from tests.support.perform import Result, compare, perform_all

pytestmark = pytest.mark.skipif(
    "built without" in gpu.problem(), reason="not run: this build has no GPU part (no nvcc)"
)

WORLD = 3


# ---- the choice ----------------------------------------------------------------------------------


def request(**fields: Any) -> Request:
    plain = Request(
        Verb.all_reduce, DType.float32, Op.SUM, 1000, 0, 8, "auto", "same_bits", 8, num_channels=16
    )
    return dataclasses.replace(plain, ranks_per_gpu=1, **fields)


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
    from fastcoll.gpu.terms import DeviceHello, agree_terms

    hellos = [
        DeviceHello("", 0, uuid, "p", "1", True, 1, 100, 0, 0, name)
        for uuid, name in zip(gpus, names, strict=True)
    ]
    return agree_terms(hellos, 4096).no_nccl


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
    assert refused.exit_code == 2
    monkeypatch.setattr(gpu, "problem", lambda: "")
    one = gpu.Gpu(0, "Some GPU", "id", "0", 90, 132, 1, 1, True, False)
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


def carried(rank: Rank, calls: list[Call]) -> tuple[list[Result], list[Any], list[str]]:
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    with fake_gpu(comm, reaches_peers=False, no_nccl="") as core:
        me = dataclasses.replace(rank, comm=comm)
        results = perform_all(me, calls)
        called = list(comm._gpus.group._nccl._group.log)
    comm.close()
    return results, core.log, called


def matrix() -> list[Call]:
    places = (Place(), Place(in_place=True), Place("strided"))
    calls = [
        Call(verb, "complex128", numel, root=root, places=(place,), seed=numel)
        for verb in (*MOVES, *REDUCTIONS)
        for numel in (0, 1, 700)
        for place in places
        for root in ((0, 2) if verb in ROOTED else (0,))
        if not (place.in_place and verb == "all_to_all")
    ]
    # Parts that end within a pack, at any place of a chunk, of every type and operation.
    calls += [
        Call(verb, dtype, 101, op=op, root=1, seed=5)
        for verb in REDUCTIONS
        for dtype in (oracle.DTYPES if verb == "all_reduce" else ("float16", "uint8"))
        for op in oracle.ops_of(dtype)
    ]
    return calls


def test_every_verb_has_the_bits_of_the_kernels(own_pools: Pools) -> None:
    calls = matrix()
    rows = own_pools(WORLD).run(carried, calls)
    wants = [expected(call, WORLD) for call in calls]
    assert not compare(calls, wants, [results for results, _, _ in rows])
    _, log, called = rows[0]
    assert set(log) == {"add"}, "no other kernel ran"
    assert "alltoall_base" in called
    assert called.count("reduce") > 0, "NCCL added integers itself"


def test_a_wrong_order_would_be_seen(own_pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what one rank adds comes in the order of another one's parts."""
    calls = [Call("all_reduce", "float32", 300, seed=2)]
    rows = own_pools(WORLD).run(in_wrong_order, calls)
    assert compare(calls, [expected(call, WORLD) for call in calls], [row[0] for row in rows])


def in_wrong_order(rank: Rank, calls: list[Call]) -> tuple[list[Result], list[Any], list[str]]:
    from tests.support import fake_gpu

    right = fake_gpu.reduce_into
    fake_gpu.reduce_into = lambda target, rows, *kinds: right(target, rows[::-1], *kinds)
    try:
        return carried(rank, calls)
    finally:
        fake_gpu.reduce_into = right


def uneven(rank: Rank) -> list[bool]:
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    me, world = rank.rank, rank.world_size
    rows = [[(3 * i + 5 * j) % 7 for j in range(world)] for i in range(world)]
    given, taken = rows[me], [row[me] for row in rows]
    right = []
    with fake_gpu(comm, reaches_peers=False, no_nccl=""):
        whole = torch.cat([torch.full((rows[me][to],), 10.0 * me + to) for to in range(world)])
        wanted = torch.cat([torch.full((n,), 10.0 * by + me) for by, n in enumerate(taken)])
        out = torch.empty(sum(taken))
        comm.all_to_all_single(out, whole, taken, given)
        right.append(torch.equal(out, wanted))
        gathered = [torch.empty(5 * by) for by in range(world)]
        comm.all_gather(gathered, torch.full((5 * me,), float(me)), async_op=True).wait()
        right += [bool((one == by).all()) for by, one in enumerate(gathered)]
        tensors = [torch.ones(3), torch.ones(5, dtype=torch.int64)]
        comm.all_reduce_coalesced(tensors)
        right += [bool((one == world).all()) for one in tensors]
        right.append("nccl" in comm.gpu_report())
    comm.close()
    return right


def test_uneven_parts_and_lists(own_pools: Pools) -> None:
    assert all(all(row) for row in own_pools(WORLD).run(uneven))


def messages(rank: Rank) -> list[bool]:
    """Everybody sends to everybody, itself too, in an order of its own."""
    from fastcoll.calls.batches import P2POp
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    me, world = rank.rank, rank.world_size
    with fake_gpu(comm, reaches_peers=False, no_nccl=""):
        ops, gets = [], []
        for step in range(world):
            peer = (me * 2 + step) % world
            target = torch.zeros(40, 2)
            ops.append(P2POp("isend", torch.full((40, 2), 10.0 * me + peer)[:, 1], peer, tag=4))
            ops.append(P2POp("irecv", target[:, 1], peer, tag=4))
            gets.append((target[:, 1], 10.0 * peer + me))
        for work in comm.batch_isend_irecv(ops):
            work.wait()
    comm.close()
    return [bool((target == value).all()) for target, value in gets]


def test_sends_and_receives(own_pools: Pools) -> None:
    assert all(all(row) for row in own_pools(WORLD).run(messages))


def nothing_to_send(rank: Rank) -> float:
    from fastcoll.calls.batches import P2POp
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    other = 1 - rank.rank
    with fake_gpu(comm, reaches_peers=False, no_nccl=""):
        ops = [P2POp(way, torch.empty(0), other) for way in ("isend", "irecv")]
        for work in comm.batch_isend_irecv(ops):
            work.wait()
        tensor = torch.ones(3)
        comm.all_reduce(tensor)
    comm.close()
    return float(tensor.sum())


def test_messages_of_no_elements_need_no_nccl(own_pools: Pools) -> None:
    assert own_pools(2).run(nothing_to_send) == [6.0, 6.0]


# ---- mistakes ------------------------------------------------------------------------------------


def differ(rank: Rank, how: str) -> tuple[Attempt, Attempt]:
    """Rank 1 makes another call than the others, all of them through NCCL."""
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    odd = rank.rank == 1
    some = torch.ones(6)
    with fake_gpu(comm, no_nccl=""):
        if how == "size":
            found = attempt(comm.all_reduce, torch.ones(6 + odd), algorithm="nccl")
        else:
            splits = [1, 2, 3] if odd else [2, 2, 2]
            side = comm._gpus.group
            side.terms = dataclasses.replace(side.terms, reaches_peers=False)
            found = attempt(comm.all_to_all_single, torch.empty(6), some, [2, 2, 2], splits)
        again = attempt(comm.all_reduce, some, algorithm="nccl")
    comm.close()
    return found, again


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
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    with fake_gpu(comm, no_nccl="") as core:
        comm.all_reduce(torch.ones(4), algorithm="nccl")
        side = comm._gpus.group._nccl
        side._running.append((Stuck(), 0.0))
        found = attempt(comm.check)
        again = attempt(comm.all_reduce, torch.ones(4))
        log = list(side._group.log)
    comm.close()
    return found, again, [*log, *map(str, core.lost)]


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
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    with fake_gpu(comm, no_nccl=""):
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
    comm.close()
    return all(float(one[0]) == comm.world_size for one in tensors), kept, late


def test_a_capture_asks_for_nothing_that_runs_outside_of_it(own_pools: Pools) -> None:
    for right, kept, late in own_pools(2).run(captured):
        assert right
        assert kept, "what is captured is not waited for"
        assert late.kind == "CollectiveTimeout"


def beside(rank: Rank) -> tuple[list[bool], list[Any]]:
    """Calls by kernels and through NCCL take turns on one group."""
    from tests.support.fake_gpu import fake_gpu

    comm = rank.comm.new_group()
    with fake_gpu(comm, no_nccl="") as core:
        right = []
        for turn in range(4):
            tensor = torch.full((50,), turn + 1.0)
            comm.all_reduce(tensor, algorithm="nccl" if turn % 2 else "auto", numerics="fast")
            right.append(bool((tensor == comm.world_size * (turn + 1)).all()))
        right.append(comm.gpu_report().endswith("nccl beside it"))
    comm.close()
    return right, core.log


def test_kernels_and_nccl_take_turns(own_pools: Pools) -> None:
    for right, log in own_pools(2).run(beside):
        assert all(right)
        assert len(log) == 2, "the others were NCCL's, which adds by itself"
