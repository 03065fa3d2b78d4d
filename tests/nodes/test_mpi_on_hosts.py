# SPDX-License-Identifier: Apache-2.0
"""MPI as the carrier between hosts that are network namespaces: Open MPI's daemons on all."""

import time
from collections.abc import Iterator

import pytest
from hosts import Hosts

from tests.nodes.everything import check_differences, check_everything
from tests.nodes.host_pool import (
    NUM_BYTES,
    MpiHostPool,
    OnHosts,
    assert_each_byte_crosses_once,
    pools_on_hosts,
)
from tests.nodes.mpi_pool import require_open_mpi
from tests.nodes.test_mpi import LIMIT_S, carriers, until_broken
from tests.support.harness import LATE_S, Attempt, Rank

pytestmark = pytest.mark.slow
STILL_S = 6.0


@pytest.fixture(scope="module")
def mpi_on_hosts() -> Iterator[OnHosts]:
    install = require_open_mpi()

    def start(hosts: Hosts, nodes: str) -> MpiHostPool:
        return MpiHostPool(install, hosts, [nodes.count(host) for host in sorted(set(nodes))])

    with pools_on_hosts(start) as on_hosts:

        def get(nodes: str) -> MpiHostPool:
            pool: MpiHostPool = on_hosts(nodes)
            assert set(pool.run(carriers)) == {"MpiCarrier"}
            return pool

        yield get


@pytest.mark.parametrize("nodes", ["aaab", "aabb", "aabc"])
def test_every_verb_over_a_link(mpi_on_hosts: OnHosts, nodes: str) -> None:
    pool = mpi_on_hosts(nodes)
    check_everything(pool, nodes)
    for numerics in ("same_bits", "fast"):
        assert_each_byte_crosses_once(pool, numerics)


def test_hosts_that_differ(mpi_on_hosts: OnHosts) -> None:
    check_differences(mpi_on_hosts("aabb"))


def send_or_receive(rank: Rank) -> float:
    """Rank 0 starts to send and stands still; return how long the transfer took."""
    import torch

    carrier = rank.comm._lanes.carrier(0)
    message, nothing = torch.zeros(NUM_BYTES, dtype=torch.uint8), torch.empty(0)
    begin = time.monotonic()
    if rank.rank == 0:
        transfer = carrier.all_to_all(nothing, message, [0, 0], [0, NUM_BYTES])
        time.sleep(STILL_S)
    else:
        transfer = carrier.all_to_all(message, nothing, [NUM_BYTES, 0], [0, 0])
    while not transfer.is_completed():
        time.sleep(1e-3)
    transfer.wait()
    return time.monotonic() - begin


def test_bytes_move_while_their_sender_does_something_else(mpi_on_hosts: OnHosts) -> None:
    _, receiving = mpi_on_hosts("ab").run(send_or_receive)
    assert receiving < STILL_S / 2


def until_cut(rank: Rank) -> Attempt:
    from fastcoll.nodes.verdict.board import Board

    Board.ANSWER_S = 1.0  # as in a program
    return until_broken(rank)


def test_a_cut_link_is_an_error_on_both_sides(mpi_on_hosts: OnHosts) -> None:
    pool = mpi_on_hosts("aabb")
    pool.start(until_cut)
    time.sleep(0.5)
    pool.hosts.cut()
    found = [one.value for one in pool.collect()]
    pool.close(grace_s=0.2)  # MPI can't end in order
    for rank, one in enumerate(found):
        other = 1 - rank // 2
        assert one.kind in ("CollectiveTimeout", "PeerLostError"), one
        assert f"node {other}" in one.text
        assert one.ranks == (2 * other, 2 * other + 1)
        assert one.seconds < LIMIT_S + LATE_S
