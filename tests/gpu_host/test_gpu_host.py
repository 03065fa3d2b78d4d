# SPDX-License-Identifier: Apache-2.0
"""The host side of the GPU path, as far as no device is needed: terms, budget, plans, texts."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fastcoll import _C
from fastcoll.choose import algorithms, select
from fastcoll.choose.algorithms import shared
from fastcoll.errors import DriverError, FastcollError, UnsupportedError, UsageError
from fastcoll.gpu.verdicts import DESYNC, PEER_LOST, TIMEOUT, USAGE, Verdict, explain
from fastcoll.machine import gpu
from fastcoll.types import Algorithm, DType, Verb
from tests.gpu_host.gpu_rows import request
from tests.support.gpu import needs_gpu_part

needs_no_device = pytest.mark.skipif(not gpu.problem(), reason="not run: there is a GPU here")

GIB = 1 << 30
REGION = (20 << 20) + 5


# ---- without a driver ----------------------------------------------------------------------------


@needs_gpu_part
@needs_no_device
def test_without_a_driver_there_are_no_devices_and_errors_are_clear() -> None:
    from fastcoll import _cuda

    count, reason = _cuda.device_count()
    assert count == 0
    assert reason
    assert gpu.gpus() == []
    assert "no CUDA device can be used" in gpu.problem()
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        gpu.require()
    for call in (
        lambda: _cuda.ipc_create(0, 1 << 21),
        lambda: _cuda.vmm_create(0, 1 << 21),
        lambda: _cuda.load_kernels(0),
        lambda: _cuda.Group(0, 0, [0], 1),
        lambda: _cuda.device_facts(0),
        lambda: _cuda.Multicast(0, 2, 2 << 20),
        lambda: _cuda.multicast_granularity(2, 2 << 20),
    ):
        with pytest.raises((DriverError, UnsupportedError)) as caught:
            call()
        assert str(caught.value)
    # An error was cleared, so the next question gets its own answer.
    assert _cuda.device_count() == (count, reason)


@pytest.mark.slow
def test_a_build_without_the_gpu_part_works_and_says_so() -> None:
    program = (
        "import sys; sys.modules['fastcoll._cuda'] = None\n"
        "import fastcoll\n"
        "from fastcoll.machine import gpu\n"
        "print(gpu.problem(), gpu.gpus(), gpu.driver_version(), gpu.has_kernel(0, 0, 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "GPU" in done.stdout
    assert done.stdout.strip().endswith("[] none False")


@pytest.mark.slow
def test_all_tests_are_found_without_the_gpu_part() -> None:
    program = (
        "import sys; sys.modules['fastcoll._cuda'] = None\n"
        "import pytest\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


# ---- terms ---------------------------------------------------------------------------------------


def agree_terms(hellos):
    from fastcoll.gpu.terms import agree_terms

    return agree_terms(hellos, lambda num_channels, world_size: REGION)


def hello(uuid: str = "a", **fields):
    from fastcoll.gpu.terms import DeviceHello

    facts = {
        "problem": "",
        "device": 0,
        "uuid": uuid,
        "process": "p",
        "layout": "1",
        "has_vmm": True,
        "granularity": 2 << 20,
        "free_blocks": 264,
        "heap_bytes": 256 << 20,
        "most_channels": 0,
        "capacity": 264,
    }
    return DeviceHello(**{**facts, **fields})


@needs_gpu_part
def test_terms_follow_from_everybodys_introduction() -> None:
    alone = agree_terms([hello("a"), hello("b")])
    assert (alone.num_channels, alone.ranks_per_gpu) == (32, 1)
    assert alone.num_bytes % (2 << 20) == 0
    assert REGION < alone.num_bytes < REGION + (2 << 20)
    assert alone.heap_bytes == 256 << 20
    shared_gpu = agree_terms([hello()] * 8)
    assert (shared_gpu.num_channels, shared_gpu.ranks_per_gpu) == (16, 8)
    # The fullest device decides for all, as channels must be equal on all ranks.
    assert agree_terms([hello("a"), hello("b", free_blocks=10)]).num_channels == 5
    assert agree_terms([hello("a"), hello("b", free_blocks=1)]).num_channels == 1
    # A wish holds for all, and is not halved; what is not free can't be had.
    assert agree_terms([hello("a"), hello("b", most_channels=48)]).num_channels == 48
    assert agree_terms([hello(most_channels=999)]).num_channels == 64
    assert agree_terms([hello(most_channels=64)] * 8).num_channels == 33
    assert agree_terms([hello(), hello(heap_bytes=7)]).heap_bytes == 7
    assert agree_terms([hello(), hello()]).routes == ("vmm", "ipc")
    assert agree_terms([hello(), hello(has_vmm=False)]).routes == ("ipc",)


@needs_gpu_part
def test_terms_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"rank 1: no CUDA device"):
        agree_terms([hello(), hello(problem="no CUDA device")])
    with pytest.raises(
        UnsupportedError, match=r"3 ranks on GPU a .* its 132 blocks 2 are free: use fewer ranks"
    ):
        agree_terms([hello(free_blocks=2, shared_blocks=2, capacity=132)] * 3)
    with pytest.raises(UsageError, match=r"equal builds .* rank 0: 1, rank 1: 2"):
        agree_terms([hello(), hello(layout="2")])


@needs_gpu_part
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.integers(0, GIB)),
        min_size=1,
        max_size=16,
    ),
    st.integers(0, 99),
)
def test_terms_never_ask_for_more_than_is_free(rows, most: int) -> None:
    hellos = [
        hello(uuid, free_blocks=free, heap_bytes=heap, most_channels=most)
        for uuid, free, heap in rows
    ]
    per_device = {uuid: sum(row[0] == uuid for row in rows) for uuid, _, _ in rows}
    try:
        terms = agree_terms(hellos)
    except UnsupportedError:
        assert any(free < per_device[uuid] for uuid, free, _ in rows)
        return
    assert 1 <= terms.num_channels <= (most or 32)
    for uuid, free, _ in rows:
        assert terms.num_channels * per_device[uuid] <= free


# ---- plans ---------------------------------------------------------------------------------------


on_cpus = partial(request, num_channels=0, ranks_per_gpu=0)


def test_a_gpu_plan_is_another_plan() -> None:
    on_cpu = shared.make_plan(on_cpus(), Algorithm.two_shot)
    on_gpu = shared.make_plan(request(), Algorithm.two_shot)
    assert on_cpu.channels == 0
    assert (on_gpu.channels, on_gpu.segment_bytes) == (16, 0)
    assert "on 16 channels" in repr(_C.Plan(*on_gpu.args()))
    assert "channels" not in repr(_C.Plan(*on_cpu.args()))
    with pytest.raises(UsageError, match="segment_bytes"):
        _C.Plan(*dataclasses.replace(on_gpu, channels=0).args())
    with pytest.raises(UsageError, match="at most 64 channels, not 65"):
        _C.Plan(*dataclasses.replace(on_gpu, channels=65).args())


def test_a_group_on_cpus_refuses_a_gpu_plan() -> None:
    multimem = 7
    plan = shared.make_plan(request(), Algorithm.one_shot).args()
    _C.Plan(*plan[:3], multimem, *plan[4:])
    with pytest.raises(UsageError, match="out of range"):
        _C.Plan(*plan[:3], multimem, *plan[4:-1], 0)


@needs_gpu_part
@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_the_smallest_travel_with_their_flags(dtype: DType) -> None:
    """That all have kernels at all: test_gpu_rehearsal.py."""
    plan = select(request(dtype=dtype, numel=10, ranks_per_gpu=2), algorithms.ALL).plan
    assert plan.inline
    _C.Plan(*plan.args())


@needs_gpu_part
@pytest.mark.parametrize(
    ("world", "channels", "most_bytes"),
    [(2, 32, 64 << 10), (8, 32, 64 << 10), (8, 4, 16 << 10), (9, 32, 16 << 10), (16, 32, 16 << 10)],
)
def test_the_limit_of_flags_in_packs_follows_the_ranks(
    world: int, channels: int, most_bytes: int
) -> None:
    verbs = (Verb.all_reduce, Verb.reduce_scatter, Verb.all_gather, Verb.all_to_all)
    for verb in verbs:
        for numel, inline in ((most_bytes // 4, True), (most_bytes // 4 + 1, False)):
            fields = {"verb": verb, "numel": numel, "num_channels": channels}
            plan = select(request(world_size=world, **fields), algorithms.ALL).plan
            assert plan.inline == inline, (verb, plan.algorithm)


def test_an_algorithm_without_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_kernel", lambda *_, **__: False)
    reason = shared.no_kernel(request(), Algorithm.two_shot)
    assert reason == "two_shot has no GPU kernel for all_reduce of float32"
    assert shared.no_kernel(on_cpus(), Algorithm.two_shot) is None, "CPUs need no kernel"


# ---- arrays --------------------------------------------------------------------------------------


@needs_no_device
def test_an_array_on_a_gpu_is_refused_where_there_is_none() -> None:
    from fastcoll.calls.arrays import view

    class Array:
        __cuda_array_interface__ = {  # noqa: RUF012
            "version": 3,
            "shape": (4,),
            "typestr": "<f4",
            "data": (0x1000, False),
        }

    with pytest.raises(UnsupportedError, match="tensor, a Array, can't be taken as a tensor"):
        view(Array(), "tensor", gpu=True)
    for other, gpu_too in ((Array(), False), (object(), True)):
        with pytest.raises(UsageError, match="tensor must be a torch tensor"):
            view(other, "tensor", gpu=gpu_too)


@pytest.mark.long
@pytest.mark.parametrize("gpu_too", [False, True])
def test_a_verb_names_where_its_tensors_may_be(gpu_too: bool) -> None:
    from fastcoll.calls.arrays import view

    places = "CPUs and CUDA devices" if gpu_too else "CPUs"
    with FakeTensorMode():  # of a device that needs not be there
        tensor = torch.empty(3, device="xpu:0")
    with pytest.raises(UnsupportedError, match=f"on xpu:0; this verb takes tensors on {places}:"):
        view(tensor, "tensor", gpu=gpu_too)


# ---- verdicts ------------------------------------------------------------------------------------

WHERE = 'in group "world" (seen by rank 0 of 4)'


def verdict(**fields) -> Verdict:
    found = Verdict(TIMEOUT, 0, 2, 5, 41, 0xA, 0xB, 1)
    return dataclasses.replace(found, **fields)


def test_a_verdict_becomes_an_error_that_names_the_rank() -> None:
    kind, text, ranks = explain(verdict(), WHERE, "all_reduce(...)", peer_is_gone=False)
    assert (kind, ranks) == (TIMEOUT, (2,))
    assert "GPU call 41 on channel 5" in text
    assert "rank 0 waited to the limit for rank 2, which did not arrive" in text
    assert "FASTCOLL_GPU_TIMEOUT_S" in text
    assert "all_reduce(...)" in text
    assert WHERE in text
    kind, text, _ = explain(verdict(raiser=3), WHERE, "", peer_is_gone=False)
    assert "rank 3 waited to the limit for rank 2" in text
    kind, text, ranks = explain(verdict(kind=DESYNC), WHERE, "", peer_is_gone=True)
    assert (kind, ranks) == (DESYNC, (2,))
    assert "rank 2 called something else than rank 0" in text
    _, text, _ = explain(verdict(kind=DESYNC, phase=5), WHERE, "", peer_is_gone=False)
    assert "rank 2 says that its tensor lies outside of its symmetric memory" in text
    kind, text, ranks = explain(verdict(kind=USAGE), WHERE, "", peer_is_gone=True)
    assert (kind, ranks) == (USAGE, (2,))
    assert "rank 2 was in two calls of this group at the same time" in text
    kind, text, ranks = explain(verdict(), WHERE, "", peer_is_gone=True)
    assert (kind, ranks) == (PEER_LOST, (2,))
    assert "lost rank 2" in text


@pytest.mark.long
@pytest.mark.parametrize("kind", [USAGE, TIMEOUT, DESYNC, PEER_LOST])
def test_the_kinds_are_those_of_the_core(kind: int, pools) -> None:
    pool = pools(2)
    outcomes = pool.outcomes(fail_with, kind)
    pool.close()
    names = {USAGE: "UsageError", TIMEOUT: "CollectiveTimeout"}
    names |= {DESYNC: "DesyncError", PEER_LOST: "PeerLostError"}
    for outcome in outcomes:
        assert type(outcome.error).__name__ == names[kind]
        assert "told by a kernel" in str(outcome.error)
        if kind in (TIMEOUT, PEER_LOST):
            assert outcome.error.ranks == (1,)


def fail_with(rank, kind: int) -> None:
    """Rank 0's GPU finds something; both ranks' groups end with it."""
    if rank.rank == 0:
        assert not rank.comm.peer_is_gone(1)
        with pytest.raises(FastcollError, match="told by a kernel"):
            rank.comm.fail(kind, "told by a kernel", [1])
    rank.comm.barrier()
