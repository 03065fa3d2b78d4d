# SPDX-License-Identifier: Apache-2.0
"""Ranks on the hosts of bench/hosts.py, used like those of harness.Pool."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
from hosts import ADDRESSES, LINK, Hosts

from fastcoll.measure.mpi import MpiInstall
from tests.nodes.mpi_pool import MpiPool
from tests.support.harness import Pool, Rank, Setup, be_patient
from tests.support.sites import ranks_by_node

NUM_BYTES = 16 << 20
_BECOME = (sys.executable, str(Path(hosts.__file__).resolve()))
# Bytes go over the links only.
_SETTINGS = ("OMPI_MCA_pml=ob1", "OMPI_MCA_btl=self,sm,tcp", f"OMPI_MCA_btl_tcp_if_include={LINK}")


def _meeting_place(on: Hosts, host: int) -> Any:
    """Return a store that is reached over the links."""
    import torch.distributed as dist

    def serve() -> Any:
        return dist.TCPStore(ADDRESSES[host], 0, is_master=True, wait_for_workers=False)

    return on.inside(host, serve)


def _be_on(names: Sequence[str], cuts: bool, rank: int) -> None:
    hosts.enter(names[rank])
    if not cuts:
        be_patient()


def _be_there(rank: int) -> None:
    del rank
    be_patient()


class HostPool(Pool):
    """Ranks on hosts that are given by rank, over Gloo; they meet on the first one's.

    Where a test cuts links, no rank is patient, and each makes its group itself.
    """

    def __init__(self, on: Hosts, order: Sequence[int], cuts: bool = False) -> None:
        self.hosts = on
        self._first = order[0]
        names = [on.names[host] for host in order]
        env = {"GLOO_SOCKET_IFNAME": LINK}
        prepare = partial(_be_on, names, cuts)
        super().__init__(len(order), Setup(init=not cuts, env=env, prepare=prepare))

    def store_server(self) -> Any:
        return _meeting_place(self.hosts, self._first)


class MpiHostPool(MpiPool):
    """Ranks that one mpiexec of Open MPI starts on hosts, so many on each, over MPI."""

    def __init__(self, install: MpiInstall, on: Hosts, ranks_on: Sequence[int]) -> None:
        self.hosts = on
        self._ranks_on = ranks_on
        setup = Setup(env={"FASTCOLL_CARRIER": "mpi"}, prepare=_be_there)
        super().__init__(install, sum(ranks_on), setup)

    def store_server(self) -> Any:
        return _meeting_place(self.hosts, 0)

    def launch(self, program: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start mpiexec on the first host; its daemons get onto the others by `_BECOME`."""
        names = self.hosts.names
        slots = ",".join(f"{name}:{n}" for name, n in zip(names, self._ranks_on, strict=True))
        install = self._install
        # Daemons come to hosts by what Open MPI takes for ssh, which it cuts at all spaces.
        agent = Path(self._session.name, "become")
        agent.write_text(f'#!/bin/sh\nexec {shlex.join(_BECOME)} "$@"\n')
        agent.chmod(0o700)
        command = ["exec", "env", *install.variables(), *_SETTINGS]
        command += [f"PRTE_MCA_plm_ssh_agent={agent}"]
        command += [str(install.prefix / "bin/mpiexec"), *install.flavour.options]
        command += ["--host", slots, "-n", str(self.world_size), *program]
        return self.start_mpiexec([*_BECOME, names[0], *map(shlex.quote, command)])


def require_hosts(num_hosts: int) -> None:
    """Skip the test where so many hosts can't be made."""
    if reason := hosts.why_not(num_hosts):
        pytest.skip(f"no {num_hosts} network namespaces with links here: {reason}")


def node_map(rank: Rank) -> list[list[int]]:
    return [list(ranks) for ranks in rank.comm.node_map.nodes]


OnHosts = Callable[[str], Any]


@contextlib.contextmanager
def pools_on_hosts(start: Callable[[Hosts, str], Pool]) -> Iterator[OnHosts]:
    """Yield a function: of "aab" it has ranks 0 and 1 on a host and rank 2 on another one."""
    with contextlib.ExitStack() as stack:
        pools: dict[str, Pool] = {}

        def get(nodes: str) -> Pool:
            if nodes not in pools or not pools[nodes].is_open:
                require_hosts(len(set(nodes)))
                pools[nodes] = start(stack.enter_context(Hosts(num_hosts=len(set(nodes)))), nodes)
                stack.callback(pools[nodes].close)
                assert pools[nodes].run(node_map) == [ranks_by_node(nodes)] * len(nodes)
            return pools[nodes]

        yield get


def _reduce(rank: Rank, numerics: str) -> None:
    import torch

    rank.comm.all_reduce(torch.zeros(NUM_BYTES // 4), numerics=numerics)


def assert_each_byte_crosses_once(pool: HostPool | MpiHostPool, numerics: str) -> None:
    """Each host's link carries 2 S (m-1)/m of an all_reduce over m hosts, each way."""
    num_hosts, on = len(pool.hosts.names), pool.hosts
    pool.run(_reduce, numerics)  # connections come first
    before = on.sent_bytes() + on.received_bytes()
    pool.run(_reduce, numerics)
    after = on.sent_bytes() + on.received_bytes()
    crossed = [new - old for new, old in zip(after, before, strict=True)]
    least = 2 * NUM_BYTES * (num_hosts - 1) // num_hosts
    # A quarter more for headers, acknowledgements and what TCP sends again to a busy machine: 11 %
    # were seen. An algorithm that sends a byte twice sends at least half more.
    assert all(least <= count <= 1.25 * least for count in crossed), (crossed, least)
