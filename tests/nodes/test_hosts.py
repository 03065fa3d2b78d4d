# SPDX-License-Identifier: Apache-2.0
"""Hosts that are network namespaces, whose links are cut and ranks killed; torchrun on each."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import ADDRESSES, Hosts

from tests.nodes.host_pool import require_hosts
from tests.support import training

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("on_host.py")
LIMIT_S = 8.0


@pytest.fixture(scope="module", autouse=True)
def hosts_can_be_made() -> None:
    require_hosts(2)


class Ranks:
    """Programs on the hosts; they are ended with the context."""

    def __init__(self, hosts: Hosts, order: Sequence[int], *argv: str) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes = hosts.start_ranks(order, [str(PROGRAM), *argv], port, **pipes)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def hear(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return what some ranks, by default all, say next."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [json.loads(self.processes[rank].stdout.readline()) for rank in chosen]


def test_a_cut_link_is_an_error_on_both_sides() -> None:
    with Hosts() as hosts, Ranks(hosts, (0, 0, 1, 1), "until_broken", str(LIMIT_S)) as ranks:
        assert ranks.hear() == ["ready"] * 4
        hosts.cut()
        found = ranks.hear()
    for rank, (kind, text, blamed, seconds) in enumerate(found):
        other = 1 - rank // 2
        assert kind in ("CollectiveTimeout", "PeerLostError"), text
        assert f"node {other}" in text
        assert blamed == [2 * other, 2 * other + 1]
        assert seconds < LIMIT_S + 12


def test_a_machine_that_no_longer_answers_is_named_before_the_limit() -> None:
    """Rank 0 waits in a receive, the others in a collective; all for a link that was cut."""
    with Hosts() as hosts, Ranks(hosts, (0, 0, 1, 1), "until_silent", "120") as ranks:
        assert ranks.hear() == ["ready"] * 4
        hosts.cut()
        found = ranks.hear()
    for rank, (kind, text, blamed) in enumerate(found):
        other = 1 - rank // 2
        assert kind == "PeerLostError", text
        assert "no answer from that machine any more" in text, text
        assert blamed == [2 * other, 2 * other + 1]


def test_a_short_cut_is_waited_out() -> None:
    with Hosts() as hosts, Ranks(hosts, (0, 0, 1, 1), "through_a_cut", "120") as ranks:
        assert ranks.hear() == ["ready"] * 4
        hosts.cut()
        time.sleep(4)  # both links of doors break meanwhile
        hosts.mend()
        assert ranks.hear() == ["through"] * 4


def test_a_host_that_is_cut_off_is_named_by_all_others() -> None:
    """Three hosts, of which two still reach each other."""
    require_hosts(3)
    order = (0, 0, 1, 2)
    with Hosts(num_hosts=3) as hosts, Ranks(hosts, order, "until_broken", str(LIMIT_S)) as ranks:
        assert ranks.hear() == ["ready"] * 4
        hosts.cut(2)
        *others, (kind, text, _, seconds) = ranks.hear()
    assert kind in ("CollectiveTimeout", "PeerLostError"), text
    assert seconds < LIMIT_S + 12
    for kind, text, blamed, seconds in others:
        assert kind in ("CollectiveTimeout", "PeerLostError"), text
        assert "node 2" in text
        assert blamed == [3]
        assert seconds < LIMIT_S + 12


def test_a_killed_host_is_named_by_all_others_who_go_on() -> None:
    require_hosts(3)
    order, killed, left = (0, 0, 1, 2, 2), {3, 4}, (0, 1, 2)
    with Hosts(num_hosts=3) as hosts, Ranks(hosts, order, "go_on", str(LIMIT_S)) as ranks:
        assert ranks.hear() == ["ready"] * len(order)
        for rank in killed:
            ranks.processes[rank].kill()
        for kind, text, blamed, seconds in ranks.hear(left):
            assert kind == "PeerLostError", text
            assert blamed, text
            assert set(blamed) <= killed, text
            assert seconds < LIMIT_S + 12
        assert ranks.hear(left) == [[[[0, 1], [2]], [6.0]]] * len(left)


def test_torchrun_trains_as_one_process(tmp_path: Path) -> None:
    """One torchrun on each host; DDP and FSDP2, on the backend "fastcoll"."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Hosts() as hosts:
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        launcher += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
        program = [str(PROGRAM), "train", "60", str(tmp_path)]
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
