# SPDX-License-Identifier: Apache-2.0
"""Which ranks share memory: from what they say of themselves, and as their kernels see it."""

import ctypes
import dataclasses
import io
import os
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fastcoll
from fastcoll.bootstrap import identity
from fastcoll.bootstrap.identity import Hello, Terms, describe_rank, map_nodes, why_apart
from fastcoll.errors import UsageError
from tests.support.harness import Attempt, Rank, Setup, attempt
from tests.support.launched import free_port


def hellos(nodes: str, **changes: Any) -> list[Hello]:
    one = describe_rank("address", "token", Terms("same_bits", "gloo"))
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
    node_map = map_nodes(hellos(nodes))
    assert node_map.nodes == ranks
    assert all(
        nodes[rank] == node_map.hosts[node_map.places[rank][0]] for rank in range(len(nodes))
    )


def test_every_lane_has_one_rank_of_every_node() -> None:
    node_map = map_nodes(hellos("aaaabbcccd"))
    served = [
        [lane for local in range(len(ranks)) for lane in node_map.lanes_of(node, local)]
        for node, ranks in enumerate(node_map.nodes)
    ]
    assert all(sorted(lanes) == [0, 1, 2, 3] for lanes in served)


def test_a_shared_id_on_two_machines_is_refused() -> None:
    first, second = hellos("aa")
    with pytest.raises(UsageError, match="FASTCOLL_NODE_ID"):
        map_nodes([first, dataclasses.replace(second, machine="another")])


def test_ranks_of_one_machine_that_see_different_cpus_are_refused() -> None:
    def differing(nodes: str) -> list[Hello]:
        first, *others = hellos(nodes)
        return [dataclasses.replace(first, ring_ways="emulated"), *others]

    assert map_nodes(differing("ab")).num_nodes == 2
    with pytest.raises(UsageError, match=r"kinds of CPU .*: emulated on ranks \[0\]; .* \[1\]"):
        map_nodes(differing("aa"))


@pytest.mark.parametrize(
    ("nodes", "sizes", "ids"),
    [
        ("a" * 64 + "b", [64, 1], "ab"),
        ("a" * 65, [32, 33], "aa"),
        ("a" * 192, [64, 64, 64], "aaa"),
        ("b" + "a" * 65 + "b", [2, 32, 33], "baa"),
    ],
)
def test_a_machine_of_many_ranks_is_several_nodes(nodes: str, sizes: list[int], ids: str) -> None:
    node_map = map_nodes(hellos(nodes))
    assert [*map(len, node_map.nodes)] == sizes
    assert (node_map.ids, node_map.hosts) == (tuple(ids),) * 2
    assert sorted(node_map.places) == [*range(len(nodes))]


def in_halves(rank: Rank) -> list[Any]:
    """A machine of four ranks, of which three share memory at most: its group, and parts of it."""
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    with patch.object(identity, "_MOST_RANKS", 3), fastcoll.init(store=rank.store, **who) as comm:
        found = [comm.node_map.nodes]
        for ranks in ([0, 1, 2, 3], [1, 2, 3]):
            part = comm.new_group(ranks)
            if rank.rank in ranks:
                tensor = torch.full((5000,), float(rank.rank))
                part.all_reduce(tensor)
                found.append((type(part).__name__, tensor[-1].item()))
                part.close()
        return found


def test_a_part_of_such_a_machine_shares_memory_where_it_fits(fresh_pool: Any) -> None:
    whole, part = ("HierarchicalCommunicator", 6.0), ("Communicator", 6.0)
    first, *others = fresh_pool(4, Setup(init=False)).run(in_halves)
    assert first == [((0, 1), (2, 3)), whole]
    assert others == [[((0, 1), (2, 3)), whole, part]] * 3


def test_carriers_must_agree_only_where_there_is_a_hop() -> None:
    def differing(nodes: str) -> list[Hello]:
        first, *others = hellos(nodes)
        return [dataclasses.replace(first, hop="mpi"), *others]

    assert map_nodes(differing("aa")).num_nodes == 1
    with pytest.raises(UsageError, match="mpi on ranks"):
        map_nodes(differing("ab"))


def unknown_carrier(rank: Rank) -> Any:
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    return attempt(fastcoll.init, store=rank.store, carrier="pigeon", **who)


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_an_unknown_carrier_is_named(fresh_pool: Any, nodes: str) -> None:
    for found in fresh_pool(2, Setup(init=False, nodes=nodes)).run(unknown_carrier):
        assert found.kind == "UsageError", found
        assert "pigeon" in found.text
        assert "gloo" in found.text


def unknown_on_rank_1(rank: Rank) -> Any:
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


def add_up(rank: Rank) -> tuple[str, float]:
    """Return the kind of a group of all ranks, and a sum of it."""
    who = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 10}
    with fastcoll.init(store=rank.store, **who) as comm:
        tensor = torch.ones(50_000)
        comm.all_reduce(tensor)
        sending = comm.isend(tensor, 1 - comm.rank)
        comm.recv(tensor, 1 - comm.rank)
        sending.wait()
        return type(comm).__name__, float(tensor[-1])


def from_elsewhere(rank: Rank) -> tuple[str, float]:
    """Rank 1 makes an IPC namespace of its own, as each container has one."""
    if rank.rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWIPC) != 0:
        os._exit(0)
    return add_up(rank)


def test_containers_in_one_network_share_memory(fresh_pool: Any) -> None:
    first, second = fresh_pool(2, Setup(init=False)).outcomes(from_elsewhere)
    if second.exit_code == 0:
        pytest.skip("this process may not make namespaces")
    assert (first.value, second.value) == (("Communicator", 2.0),) * 2, (first, second)


def from_another_network(rank: Rank, doctors_port: int) -> tuple[Any, str, list[str]]:
    """Rank 1 has another network by its own account; the store and Gloo can reach it all the same.

    Returns what `add_up` does, what was said, and what doctor says.
    """
    said = io.StringIO()
    with (
        patch.object(identity, "_namespace", lambda kind: f"{kind}:[{rank.rank + 7}]"),
        patch.object(sys, "stderr", said),
    ):
        return add_up(rank), said.getvalue(), drawn(rank, doctors_port)


def test_ranks_of_one_machine_hear_what_parts_them(fresh_pool: Any) -> None:
    pool = fresh_pool(2, Setup(init=False))
    first, second = pool.run(from_another_network, free_port())
    assert first[0] == second[0] == ("HierarchicalCommunicator", 2.0)
    sides = "ranks [0] in net:[7], ranks [1] in net:[8]"
    assert first[1].count("different network namespaces") == 1, first[1]
    assert sides in first[1]
    assert second[1] == ""
    for _, _, findings in (first, second):
        assert sides in findings[-1], findings


def test_an_id_that_the_user_gave_parts_ranks_without_a_word() -> None:
    here = describe_rank("", "", Terms("", ""))
    there = dataclasses.replace(here, machine="boot 1, net:[1]", node="boot 1, net:[1]")
    elsewhere = dataclasses.replace(here, machine="boot 1, net:[2]", node="boot 1, net:[2]")
    assert why_apart([here, there]) == why_apart([here, here]) == ""  # two machines, or one
    assert "ranks [0] in net:[1], ranks [2] in net:[2]" in why_apart([there, here, elsewhere])
    assert why_apart([there, dataclasses.replace(elsewhere, node="b")]) == ""


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
        assert (without.text, again.text) == ("", "")


def drawn(rank: Rank, port: int) -> list[str]:
    """Return what doctor says of the ranks that it is run as."""
    from fastcoll.cli.doctor import _nodes

    world = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
    return [finding.value for finding in _nodes()]


def test_doctor_draws_the_map(fresh_pool: Any) -> None:
    nodes, port = "aba", free_port()
    for rank, lines in enumerate(fresh_pool(3, Setup(init=False, nodes=nodes)).run(drawn, port)):
        own, first, second = lines
        assert own == nodes[rank]
        assert first.endswith(": ranks 0, 2")
        assert second.endswith(": ranks 1")
