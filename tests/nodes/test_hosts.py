# SPDX-License-Identifier: Apache-2.0
"""Hosts that are network namespaces, whose links are cut and ranks killed; torchrun on each."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import ADDRESSES, Hosts

import fastcoll
from fastcoll.nodes.verdict import doors, machines
from tests.nodes.host_pool import HostPool, require_hosts
from tests.support import training
from tests.support.harness import Attempt, Rank, attempt, make_group

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("on_host.py")
LIMIT_S = 5.0
NUMEL = 500_000


@pytest.fixture(scope="module", autouse=True)
def hosts_can_be_made() -> None:
    require_hosts(2)


@contextlib.contextmanager
def ranks_on(*order: int) -> Iterator[HostPool]:
    """Yield ranks on hosts that are given by rank, for one test, which may cut links."""
    num_hosts = max(order) + 1
    require_hosts(num_hosts)
    with Hosts(num_hosts=num_hosts) as hosts:
        pool = HostPool(hosts, order, cuts=True)
        try:
            yield pool
        finally:
            pool.close(grace_s=0.2)


# ---- on a rank -----------------------------------------------------------------------------------


def begin(rank: Rank) -> None:
    """Make a group and its first call; only then is the limit short."""
    make_group(rank)
    rank.comm.all_reduce(torch.zeros(NUMEL))
    rank.comm.set_timeout(LIMIT_S)


def call(tensor: torch.Tensor) -> None:
    fastcoll.all_reduce(tensor)
    fastcoll.barrier()


def until_broken(rank: Rank) -> Attempt:
    """Small and large calls until an error comes."""
    del rank
    tensor, found = torch.zeros(NUMEL), Attempt("", "", 0)
    while not found.kind:
        found = attempt(call, tensor)
    return found


def go_on(rank: Rank) -> tuple[Attempt, Any, list[float]]:
    """The same; then with those that are left."""
    found = until_broken(rank)
    group: Any = fastcoll.shrink()
    tensor = torch.full((NUMEL,), 1.0 + group.rank)
    fastcoll.all_reduce(tensor)
    return found, group.node_map.nodes, tensor.unique().tolist()


def find_machines(rank: Rank, silent_s: float) -> None:
    """Make a group in which each rank has waited long, so that it looks at the other machine."""
    doors.PROBES, machines.SILENT_S = (1, 1, 2), silent_s
    make_group(rank, 120)
    for late in (0, 2):
        if rank.rank == late:
            time.sleep(1.5)
        rank.comm.barrier()


def until_silent(rank: Rank) -> Attempt:
    """Rank 0 waits in a receive, the others in a collective."""
    if rank.rank:
        return until_broken(rank)
    return attempt(rank.comm.recv, torch.zeros(NUMEL), 2)


def through_a_cut(rank: Rank) -> float:
    """Calls for some seconds, over a link that is cut for fewer than a machine may be silent."""
    del rank
    end, tensor = time.monotonic() + 6, torch.ones(NUMEL)
    while tensor[0]:
        tensor.fill_(time.monotonic() < end)
        fastcoll.all_reduce(tensor)
    return tensor.sum().item()


# ---- on all --------------------------------------------------------------------------------------


def check_cut(one: Attempt, node: int) -> None:
    assert one.kind in ("CollectiveTimeout", "PeerLostError"), one
    assert f"node {node}" in one.text
    assert one.seconds < LIMIT_S + 12


def test_a_cut_link_is_an_error_on_both_sides() -> None:
    with ranks_on(0, 0, 1, 1) as pool:
        pool.run(begin)
        pool.start(until_broken)
        pool.hosts.cut()
        found = pool.finish()
    for rank, one in enumerate(found):
        other = 1 - rank // 2
        check_cut(one, other)
        assert one.ranks == (2 * other, 2 * other + 1)


def test_a_machine_that_no_longer_answers_is_named_before_the_limit() -> None:
    """The limit is 120 s; machines count as lost within seconds."""
    with ranks_on(0, 0, 1, 1) as pool:
        pool.run(find_machines, 1.0)
        pool.start(until_silent)
        pool.hosts.cut()
        found = pool.finish()
    for rank, one in enumerate(found):
        other = 1 - rank // 2
        assert one.kind == "PeerLostError", one
        assert "no answer from that machine any more" in one.text, one
        assert one.ranks == (2 * other, 2 * other + 1)


def test_a_short_cut_is_waited_out() -> None:
    with ranks_on(0, 0, 1, 1) as pool:
        pool.run(find_machines, 10.0)
        pool.start(through_a_cut)
        pool.hosts.cut()
        time.sleep(4)  # both links of doors break meanwhile
        pool.hosts.mend()
        assert pool.finish() == [0.0] * 4


def test_a_host_that_is_cut_off_is_named_by_all_others() -> None:
    """Three hosts, of which two still reach each other."""
    with ranks_on(0, 0, 1, 2) as pool:
        pool.run(begin)
        pool.start(until_broken)
        pool.hosts.cut(2)
        *others, alone = pool.finish()
    assert alone.kind in ("CollectiveTimeout", "PeerLostError"), alone
    assert alone.seconds < LIMIT_S + 12
    for one in others:
        check_cut(one, 2)
        assert one.ranks == (3,)


def test_a_killed_host_is_named_by_all_others_who_go_on() -> None:
    killed, left = {3, 4}, (0, 1, 2)
    with ranks_on(0, 0, 1, 2, 2) as pool:
        pool.run(begin)
        pool.start(go_on)
        for rank in killed:
            pool.processes[rank].kill()
        stories = [one.value for one in pool.collect(ranks=left) if one.ok]
    assert [story[1:] for story in stories] == [(((0, 1), (2,)), [6.0])] * len(left)
    for one, *_ in stories:
        assert one.kind == "PeerLostError", one
        assert one.ranks and set(one.ranks) <= killed, one
        assert one.seconds < LIMIT_S + 12


def test_torchrun_trains_as_one_process(tmp_path: Path) -> None:
    """One torchrun on each host; DDP and FSDP2, on the backend "fastcoll"."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Hosts() as hosts:
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        launcher += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
        program = [str(PROGRAM), str(tmp_path)]
        launchers = [
            hosts.start(host, [*launcher, f"--node-rank={host}", *program], env) for host in (0, 1)
        ]
        try:
            assert [one.wait(120) for one in launchers] == [0, 0]
        finally:
            for one in launchers:
                one.kill()
                one.wait()
    nodes, found = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(4)), strict=True)
    assert nodes == (((0, 1), (2, 3)),) * 4
    for rows in zip(*found, strict=True):  # of each program
        training.assert_as_one_process(rows)
