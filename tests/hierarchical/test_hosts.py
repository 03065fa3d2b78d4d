# SPDX-License-Identifier: Apache-2.0
"""Two hosts that are network namespaces, where a link has counters and can be cut."""

import functools
import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, why_not

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("on_host.py")
LIMIT_S = 8.0


@pytest.fixture(scope="module", autouse=True)
def hosts_can_be_made() -> None:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")


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
        """What some ranks, by default all, say next."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [json.loads(self.processes[rank].stdout.readline()) for rank in chosen]

    def go_on(self) -> None:
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()


@pytest.mark.parametrize(
    ("order", "nodes"),
    [((0, 0, 0, 1), [[0, 1, 2], [3]]), ((0, 1, 1, 0), [[0, 3], [1, 2]])],
)
def test_namespaces_are_found_out(order: Sequence[int], nodes: list[list[int]]) -> None:
    with Hosts() as hosts, Ranks(hosts, order, "total", "30") as ranks:
        assert ranks.hear() == [[nodes, True, [0, 1, 2, 3]]] * 4


@functools.cache
def sent_by_all_reduce(order: Sequence[int], num_bytes: int) -> list[int]:
    """What each host sends in one all_reduce."""
    with Hosts() as hosts, Ranks(hosts, order, "reduce_once", "30", str(num_bytes)) as ranks:
        ranks.hear()
        before = hosts.sent_bytes()
        ranks.go_on()
        assert ranks.hear() == ["done"] * 4
        after = hosts.sent_bytes()
        ranks.go_on()
    return [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)])
def test_each_byte_crosses_once_a_node(order: Sequence[int]) -> None:
    """2 S (m-1)/m with m = 2 nodes; a flat ring sends 1.5 S at best, 3 S with ranks in turn."""
    num_bytes = 16 << 20
    for sent in sent_by_all_reduce(order, num_bytes):
        assert num_bytes <= sent <= 1.1 * num_bytes


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


def test_a_killed_host_is_named() -> None:
    with Hosts() as hosts, Ranks(hosts, (0, 0, 1, 1), "until_broken", str(LIMIT_S)) as ranks:
        ranks.hear()
        for process in ranks.processes[2:]:
            process.kill()
        for kind, text, blamed, seconds in ranks.hear([0, 1]):
            assert kind == "PeerLostError", text
            assert blamed, text
            assert set(blamed) <= {2, 3}, text
            assert seconds < LIMIT_S + 12
