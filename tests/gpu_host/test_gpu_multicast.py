# SPDX-License-Identifier: Apache-2.0
"""How the ranks' regions come behind the one address of the switch's, and who then has it add.

Over a driver made of dictionaries, and with the CPU in the kernels' place (support/fake_gpu.py).
"""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fastcoll.choose import algorithms, select
from fastcoll.choose.plan import Plan
from fastcoll.errors import FastcollError, PeerLostError, UnsupportedError, UsageError
from fastcoll.gpu.residency import Blocks
from fastcoll.group.communicator import Communicator
from fastcoll.machine import gpu
from fastcoll.types import Algorithm, DType, Numerics, Op, ReduceOp, Verb, supported_ops
from tests.gpu_host.gpu_rows import request
from tests.support.fake_driver import THREE, Driver, Links, map_all, mapped
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank
from tests.support.sites import group_on_fake_gpu

pytestmark = needs_gpu_part


# ---- memory --------------------------------------------------------------------------------------


def test_all_regions_come_behind_one_address(driver: Driver) -> None:
    with mapped([0, 1, 2], THREE, [1, 0, 2]) as results:
        for regions, group, _ in results:
            assert regions.no_multicast == ""
            assert group.multicast == regions.multicast.ptr
        first = results[0][0].multicast.object
        assert all(regions.multicast.object is first for regions, _, _ in results)
        assert sorted(first.bound) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"refused": {("multicast_create", 0)}}, "rank 0: multicast_create refused"),
        ({"refused": {("multicast_export", 0)}}, "rank 0: multicast_export refused"),
        ({"refused": {("multicast_open", 2)}}, "rank 2: multicast_open refused"),
        ({"refused": {("multicast_add", 1)}}, "rank 1: multicast_add refused"),
        ({"refused": {("multicast_bind", 1)}}, "rank 1: multicast_bind refused"),
        (
            {"refused": {("multicast_map", 0), ("multicast_map", 2)}},
            "rank 2: multicast_map refused",
        ),
        (
            {"lost": {("SUM of float16", 1), ("SUM of bfloat16", 1)}},
            "rank 1: mapped, but the switch was wrong: SUM of float16, SUM of bfloat16",
        ),
        (
            {"lost": {("MIN of int64", 0)}},
            "rank 0: mapped, but the switch was wrong: MIN of int64",
        ),
        (
            {"lost": {("store", 1)}},
            "rank 2: mapped, but what the switch was to store did not arrive",
        ),
    ],
)
def test_where_one_rank_cannot_nobody_has_multicast(
    driver: Driver, fault: dict[str, set[Any]], reason: str
) -> None:
    vars(driver).update(fault)
    with mapped([0, 1, 2], THREE) as results:
        for regions, group, _ in results:
            assert regions.route == "vmm", "kernels reach the peers all the same"
            assert reason in regions.no_multicast
            assert (regions.multicast, group.multicast) == (None, 0)
        assert len({regions.no_multicast for regions, _, _ in results}) == 1, (
            "the same on all ranks"
        )
        assert driver.handles == []


def test_only_memory_of_descriptors_is_bound(driver: Driver) -> None:
    driver.refused = {("vmm_create", 0)}
    with mapped([0, 1], THREE[:2]) as results:
        for regions, _, _ in results:
            assert regions.no_multicast == "memory by the route ipc can't be bound"


@pytest.mark.parametrize("same_process", [False, True])
def test_a_region_stays_bound_until_the_peers_have_left(driver: Driver, same_process: bool) -> None:
    from fastcoll.gpu import regions as device
    from fastcoll.gpu.terms import PROCESS

    links = Links(2)
    results = map_all(links, [0, 1], [PROCESS] * 2 if same_process else THREE[:2])
    bound = results[0][0].multicast.object.bound
    results[0][0].leave()
    links.leave(0)
    device.reap()
    assert sorted(bound) == [0, 1], "rank 1's kernels may still have the switch read rank 0's"
    results[1][0].leave()
    links.leave(1)
    device.reap()
    assert bound == {}


@pytest.mark.parametrize("lost_at", range(11))
def test_a_peer_that_is_lost_on_the_way_leaves_nothing_open(driver: Driver, lost_at: int) -> None:
    from fastcoll.gpu import regions as device

    links = Links(2, lost_at)
    results = map_all(links, [0, 1], THREE[:2])
    assert all(isinstance(error, PeerLostError) for error in results)
    for rank in range(2):
        links.leave(rank)
    device.reap()


def test_multicast_that_is_not_wanted_is_not_tried(driver: Driver) -> None:
    from fastcoll.gpu.terms import PROCESS

    with mapped([0, 0], [PROCESS] * 2) as results:
        for regions, _, _ in results:
            assert regions.no_multicast.startswith("2 ranks share a GPU")
            assert regions.multicast is None


def introduced(driver: Driver, has_multicast: bool, world_size: int) -> dict[str, Any]:
    from fastcoll.gpu.terms import describe_device

    facts = gpu.Gpu(1, "Some GPU", "id", 90, 132, True, has_multicast)
    blocks = Blocks(100, 100, 25, False)
    return describe_device(facts, world_size, blocks=blocks, heap_bytes=1, most_channels=0)


def test_a_region_has_a_size_that_can_be_bound(driver: Driver) -> None:
    with_it = introduced(driver, True, 4)
    assert (with_it["granularity"], with_it["no_multicast"]) == (32 << 20, "")
    assert introduced(driver, True, 1)["granularity"] == 2 << 20
    without = introduced(driver, False, 4)
    assert without["granularity"] == 2 << 20
    assert "no multicast (NVLink SHARP)" in without["no_multicast"]
    driver.refused = {("multicast_granularity", 0)}
    refused = introduced(driver, True, 4)
    assert (refused["problem"], refused["granularity"]) == ("", 2 << 20), "a group all the same"
    assert refused["no_multicast"] == "multicast_granularity refused"


def test_one_rank_may_forbid_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_GPU_MULTICAST", "never")
    forbidden = introduced(driver, True, 4)
    assert (forbidden["granularity"], forbidden["problem"]) == (2 << 20, "")
    reason = forbidden["no_multicast"]
    assert gpu.multicast_problem(["", reason], 1) == "rank 1: FASTCOLL_GPU_MULTICAST=never"
    assert "no multicast" in introduced(driver, False, 4)["no_multicast"], "what can't be helped"
    monkeypatch.setenv("FASTCOLL_GPU_MULTICAST", "always")
    with pytest.raises(UsageError, match="must be one of auto, never"):
        introduced(driver, True, 4)


@pytest.mark.parametrize(
    ("reasons", "ranks_per_gpu", "told"),
    [
        (["", "", ""], 1, ""),
        ([""], 1, "one rank alone has nothing to add"),
        (["", ""], 2, "2 ranks share a GPU, and the switch adds what different GPUs hold"),
        (["", "none", "too old"], 1, "rank 1: none; rank 2: too old"),
    ],
)
def test_what_speaks_against_it_beforehand(
    reasons: list[str], ranks_per_gpu: int, told: str
) -> None:
    assert gpu.multicast_problem(reasons, ranks_per_gpu) == told


# ---- choice --------------------------------------------------------------------------------------

NONE = "the switch is on strike"


fast_request = partial(request, numel=1 << 20, numerics="fast")


def chosen(**fields: Any) -> Plan:
    return select(fast_request(**fields), algorithms.ALL).plan


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_it_is_admitted_where_the_switch_knows_what_to_do(dtype: DType) -> None:
    # Complex numbers are pairs of floats. PTX has integers of 4 and 8 bytes.
    floats = (DType.float32, DType.complex64, DType.float16, DType.bfloat16)
    integers = (DType.int32, DType.uint32, DType.int64, DType.uint64)
    for verb in (Verb.all_reduce, Verb.reduce_scatter):
        for op in supported_ops(dtype):
            by_floats = dtype in floats and op in (Op.SUM, Op.AVG)
            by_integers = dtype in integers and op is not Op.PRODUCT
            for numerics, knows in (("fast", by_floats or by_integers), ("same_bits", by_integers)):
                asked = request(
                    numel=1 << 20, verb=verb, dtype=dtype, op=op, numerics=cast(Numerics, numerics)
                )
                reason = algorithms.multimem.admits(asked)
                assert (reason is None) == knows, (verb, op, numerics, reason)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_it_pushes_data_of_every_type(dtype: DType) -> None:
    pushed = [
        verb
        for verb in Verb
        if algorithms.multimem.admits(request(verb=verb, dtype=dtype, op=Op.MAX)) is None
    ]
    assert set(pushed) - {Verb.all_reduce, Verb.reduce_scatter} == {Verb.all_gather, Verb.broadcast}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"op": Op.MAX}, "the switch's MAX of floats does not keep NaN and -0 < +0"),
        ({"op": Op.PRODUCT, "dtype": DType.int64}, "the switch does not multiply"),
        ({"dtype": DType.int16}, "multimem has no GPU kernel for all_reduce of int16"),
        ({"dtype": DType.float64}, "multimem has no GPU kernel for all_reduce of float64"),
        ({"verb": Verb.reduce}, "reduce has the algorithms one_shot and two_shot"),
        ({"verb": Verb.all_to_all}, "all_to_all only moves data"),
        ({"verb": Verb.all_gather, "splits": 1}, "the switch pushes parts of one size"),
        ({"no_multicast": NONE}, f"the GPUs' switch can't be used here: {NONE}"),
        ({"reaches_peers": False}, "the GPUs do not reach each other's memory"),
        ({"numerics": "same_bits"}, 'an order of its own, which numerics="same_bits" forbids'),
    ],
)
def test_who_asks_for_it_in_vain_is_told_why(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=r'\(algorithm="multimem"\)') as caught:
        chosen(algorithm="multimem", **fields)
    assert why in str(caught.value)


def test_cpus_have_no_switch() -> None:
    with pytest.raises(UnsupportedError, match="multimem is for GPUs"):
        chosen(algorithm="multimem", num_channels=0)


def test_auto_takes_it_only_where_the_order_may_be_its_own() -> None:
    assert chosen().algorithm is Algorithm.multimem
    assert chosen(numerics="same_bits").algorithm is not Algorithm.multimem
    assert chosen(no_multicast=NONE).algorithm is not Algorithm.multimem
    assert chosen(op=Op.MAX).algorithm is not Algorithm.multimem
    for op in (Op.SUM, Op.AVG, Op.MAX, Op.BXOR):
        one = chosen(numerics="same_bits", dtype=DType.int64, op=op)
        assert one.algorithm is Algorithm.multimem
        assert not one.fast_numerics
    # Between two GPUs it moves more than two_shot does.
    assert chosen(world_size=2).algorithm is not Algorithm.multimem


def test_auto_pushes_a_broadcast_where_the_root_would_send_it_often() -> None:
    pushed = partial(chosen, verb=Verb.broadcast, numerics="same_bits")
    assert pushed().algorithm is Algorithm.multimem
    assert pushed(world_size=2).algorithm is Algorithm.direct
    assert pushed(numel=1000).algorithm is Algorithm.direct
    assert pushed(no_multicast=NONE).algorithm is Algorithm.direct
    # As many bytes arrive at each rank by direct, and those of a push are copied once more.
    assert chosen(verb=Verb.all_gather, numerics="same_bits").algorithm is Algorithm.direct


# ---- calls ---------------------------------------------------------------------------------------


def call(rank: Rank, no_multicast: str) -> tuple[list[bool], list[str], list[str], str]:
    """Calls by name and by choice; what ran, what was refused, and the report."""
    world, right, refused = rank.world_size, [], []
    with group_on_fake_gpu(rank, no_multicast=no_multicast) as (comm, core):
        for more in ({"algorithm": "multimem"}, {}):
            for op, wanted in ((ReduceOp.SUM, 10.0), (ReduceOp.AVG, 10.0 / world)):
                tensor = torch.full((400_000,), rank.rank + 1.0)
                try:
                    comm.all_reduce(tensor, op, numerics="fast", **more)
                    right.append(bool((tensor == wanted).all()))
                    out = torch.empty(1000)
                    parts = torch.full((1000 * world,), rank.rank + 1.0)
                    comm.reduce_scatter_tensor(out, parts, op, numerics="fast", **more)
                    right.append(bool((out == wanted).all()))
                except FastcollError as error:
                    refused.append(str(error))
        names = [one.name for one in core.algorithms]
        return right, names, refused, comm.gpu_report()


def push(rank: Rank) -> tuple[list[bool], list[str]]:
    """Broadcasts and gathers by default; what was right, and what ran."""
    right = []
    with group_on_fake_gpu(rank, no_multicast="") as (comm, core):
        tensor = torch.full((400_000,), float(rank.rank))
        comm.broadcast(tensor, 2)
        right.append(bool((tensor == 2).all()))
        out = torch.empty(rank.world_size * 1000)
        comm.all_gather_into_tensor(out, tensor[:1000] + rank.rank)
        wanted = 2 + torch.arange(rank.world_size).repeat_interleave(1000)
        right.append(bool((out == wanted).all()))
        return right, [one.name for one in core.algorithms]


def test_large_broadcasts_reach_its_kernel(own_pools: Pools) -> None:
    assert own_pools(4).run(push) == [([True, True], ["multimem", "direct"])] * 4


def test_calls_reach_its_kernels(own_pools: Pools) -> None:
    for right, names, refused, report in own_pools(4).run(call, ""):
        assert right == [True] * 8
        assert names[:4] == ["multimem"] * 4, "asked for"
        assert names[4] == names[6] == "multimem", "chosen for the large ones"
        assert refused == []
        assert "; multicast; " in report


def test_without_it_calls_go_another_way_and_say_why(own_pools: Pools) -> None:
    for right, names, refused, report in own_pools(4).run(call, NONE):
        assert right == [True] * 4
        assert "multimem" not in names
        assert len(refused) == 2
        assert all(f"the GPUs' switch can't be used here: {NONE}" in text for text in refused)
        assert f"; no multicast: {NONE}; " in report


def call_in_a_group_of_torch(rank: Rank, default: Numerics) -> tuple[str, str]:
    """Return which algorithms carry a large sum without `numerics=`, and one with it."""
    from tests.support.fake_gpu import fake_gpu  # only now: builds without a GPU part can't

    store = dist.PrefixStore(f"a group that is {default}", rank.store)
    group = Communicator.from_store(
        store, rank.rank, rank.world_size, timeout_s=15, default_on_gpus=default
    )
    with group, fake_gpu(group, no_multicast="") as core:
        tensor = torch.full((400_000,), rank.rank + 1.0)
        group.all_reduce(tensor)
        assert bool((tensor == 10.0).all())
        group.all_reduce(tensor, numerics="same_bits")
        group.barrier()  # a rank that leaves earlier is lost to the others
        first, second, *_ = (one.name for one in core.algorithms)
        return first, second


def test_the_switch_adds_by_default_where_the_default_is_fast(own_pools: Pools) -> None:
    pool = own_pools(4)
    assert pool.run(call_in_a_group_of_torch, "fast") == [("multimem", "two_shot")] * 4
    assert pool.run(call_in_a_group_of_torch, "same_bits") == [("two_shot", "two_shot")] * 4
