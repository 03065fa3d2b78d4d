# SPDX-License-Identifier: Apache-2.0
"""Which ranks share memory: from what they say of themselves, and as their kernels see it."""

import ctypes
import dataclasses
import os
import socket
from typing import Any

import pytest
import torch

from fastcoll.bootstrap.identity import Hello, Terms, introduce, map_islands
from fastcoll.errors import UnsupportedError, UsageError
from harness import Attempt, Rank, Setup, attempt


def hellos(nodes: str, **changes: Any) -> list[Hello]:
    one = introduce("address", "token", Terms("same_bits", "gloo"))
    return [
        dataclasses.replace(one, node=node, machine=f"machine of {node}", host=node, **changes)
        for node in nodes
    ]


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        ("aaab", ((0, 1, 2), (3,))),
        ("abab", ((0, 2), (1, 3))),
        ("baab", ((0, 3), (1, 2))),
        ("abc", ((0,), (1,), (2,))),
    ],
)
def test_a_map_has_the_ranks_by_node(nodes: str, ranks: tuple[tuple[int, ...], ...]) -> None:
    islands = map_islands(hellos(nodes))
    assert islands.nodes == ranks
    assert all(nodes[rank] == islands.hosts[islands.places[rank][0]] for rank in range(len(nodes)))


def test_every_lane_has_one_rank_of_every_node() -> None:
    islands = map_islands(hellos("aaaabbcccd"))
    served = [
        [lane for local in range(len(ranks)) for lane in islands.lanes_of(node, local)]
        for node, ranks in enumerate(islands.nodes)
    ]
    assert all(sorted(lanes) == [0, 1, 2, 3] for lanes in served)


def test_a_shared_id_on_two_machines_is_refused() -> None:
    first, second = hellos("aa")
    with pytest.raises(UsageError, match="FASTCOLL_NODE_ID"):
        map_islands([first, dataclasses.replace(second, machine="another")])


def test_too_many_ranks_on_a_node_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="64"):
        map_islands(hellos("a" * 65))
    assert map_islands(hellos("a" * 64 + "b")).num_nodes == 2


def test_carriers_must_agree_only_where_there_is_a_hop() -> None:
    def differing(nodes: str) -> list[Hello]:
        first, *others = hellos(nodes)
        return [dataclasses.replace(first, hop="mpi"), *others]

    assert map_islands(differing("aa")).num_nodes == 1
    with pytest.raises(UsageError, match="mpi on ranks"):
        map_islands(differing("ab"))


def unknown_carrier(rank: Rank) -> Any:
    import fastcoll

    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    return attempt(fastcoll.init, store=rank.store, carrier="pigeon", **who)


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_an_unknown_carrier_is_named(fresh_pool: Any, nodes: str) -> None:
    for found in fresh_pool(2, Setup(init=False, nodes=nodes)).run(unknown_carrier):
        assert found.kind == "UsageError", found
        assert "pigeon" in found.text
        assert "gloo" in found.text


def unknown_on_rank_1(rank: Rank) -> Any:
    import fastcoll

    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    carrier = "pigeon" if rank.rank == 1 else None
    return attempt(fastcoll.init, store=rank.store, carrier=carrier, **who)


def test_on_one_node_the_others_hear_of_an_unknown_carrier(fresh_pool: Any) -> None:
    zero, one, two = fresh_pool(3, Setup(init=False)).run(unknown_on_rank_1)
    assert one.kind == "UsageError"
    for found in (zero, two):
        assert found.kind == "PeerLostError", found
        assert "pigeon" in found.text
        assert found.seconds < 8


CLONE_NEWIPC = 0x08000000


def from_elsewhere(rank: Rank) -> float:
    """Rank 1 goes where rank 0 can't share memory with it, as in another container."""
    import fastcoll

    libc = ctypes.CDLL(None, use_errno=True)
    if rank.rank == 1 and libc.unshare(CLONE_NEWIPC) != 0:
        os._exit(0)
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    comm = fastcoll.init(store=rank.store, **who)
    assert type(comm) is fastcoll.HierarchicalCommunicator
    tensor = torch.ones(1)
    fastcoll.all_reduce(tensor)
    return float(tensor)


def test_namespaces_are_nodes(fresh_pool: Any) -> None:
    first, second = fresh_pool(2, Setup(init=False)).outcomes(from_elsewhere)
    if second.exit_code == 0:
        pytest.skip("this process may not make namespaces")
    assert (first.value, second.value) == (2.0, 2.0)


def moved(rank: Rank) -> list[Attempt]:
    """Rank 3 says that it is on node a by now; then that it is where it was."""
    if rank.rank == 3:
        os.environ["FASTCOLL_NODE_ID"] = "a"
    found = [attempt(rank.comm.new_group), attempt(rank.comm.new_group, [0, 1, 2])]
    if rank.rank == 3:
        os.environ["FASTCOLL_NODE_ID"] = "b"
    return [*found, attempt(rank.comm.new_group)]


def test_nodes_that_change_after_init_are_refused(fresh_pool: Any) -> None:
    for everybody, without, again in fresh_pool(4, Setup(nodes="aabb")).run(moved):
        assert everybody.kind == "UsageError", everybody
        assert "ranks [[0, 1], [2, 3]]" in everybody.text
        assert "[[0, 1, 3], [2]]" in everybody.text
        assert without.kind == again.kind == ""


def drawn(rank: Rank, port: int) -> list[str]:
    """What doctor says of the ranks that it is run as."""
    from fastcoll.cli.doctor import _nodes

    world = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
    return [finding.value for finding in _nodes()]


def test_doctor_draws_the_map(fresh_pool: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    nodes = "aba"
    for rank, lines in enumerate(fresh_pool(3, Setup(init=False, nodes=nodes)).run(drawn, port)):
        own, first, second = lines
        assert own == nodes[rank]
        assert first.endswith(": ranks 0, 2")
        assert second.endswith(": ranks 1")
