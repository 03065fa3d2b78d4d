# SPDX-License-Identifier: Apache-2.0
"""Doors, by which a rank sees that one of another node lives: what proves that it is gone."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.nodes.verdict import lookout
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door
from fastcoll.nodes.verdict.lookout import Lookout

NODES = ((0,), (1, 2), (3,))
SEAT = Seat(NodeMap(NODES, ("a", "b", "c"), ("a", "b", "c")), 0, "nonce")


class House:
    """The doors of all ranks, in this process; rank 0 looks at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookout, "_LONELY_S", 0.0)
        self.board = Board(HashStore(), "nonce")
        self.doors = [Door(self.board, rank) for rank in range(4)]
        self.lost: set[int] = set()
        for rank in range(4):
            while not self.board.read(f"door/{rank}"):
                time.sleep(0.001)

    def lookout(self) -> Lookout:
        watch: Any = SimpleNamespace(await_verdict=lambda: None)
        return Lookout(SEAT, self.board, watch, self.lost.__contains__, self.doors[0])


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    found = House(monkeypatch)
    with ExitStack() as ends:
        for door in found.doors:
            ends.callback(door.close)
        yield found


def test_a_rank_is_gone_when_its_door_closes_and_another_one_answers(house: House) -> None:
    with house.lookout() as lookout:
        assert not lookout.are_gone([1])
        house.doors[1].close()
        assert lookout.are_gone([1])
        assert not lookout.are_gone([1, 2])


def test_a_door_that_was_open_before_needs_no_other(house: House) -> None:
    with house.lookout() as lookout:
        assert not lookout.are_gone([3])
        house.doors[3].close()
        assert lookout.are_gone([3])


def test_a_refusal_alone_proves_nothing(house: House) -> None:
    """As of a firewall, or where an address is another machine's; a broken lane proves the rest."""
    for rank in (1, 2, 3):
        house.doors[rank].close()
    with house.lookout() as lookout:
        assert not any(lookout.are_gone([rank]) for rank in (1, 2, 3))
        house.lost.add(2)
        assert lookout.are_gone([1])
        assert not lookout.are_gone([3])


def test_a_loopback_address_of_another_machine_is_not_asked(house: House) -> None:
    house.board.say("door/1", f'["127.0.0.1", {free_port()}, "another machine"]')
    with house.lookout() as lookout:
        assert not lookout.are_gone([1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_rank_that_clears_its_door_lives(house: House) -> None:
    with house.lookout() as lookout:
        for _ in range(3):
            assert not lookout.are_gone([1])
            house.doors[1].clear()


def test_a_forked_child_does_not_answer_for_its_parent(house: House) -> None:
    reader, writer = os.pipe()
    hears, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(says, b"!")
        os.read(reader, 1)
        os._exit(0)
    try:
        assert os.read(hears, 1) == b"!"  # fork has returned there: its copy is closed
        with house.lookout() as lookout:
            assert not lookout.are_gone([1])
            house.doors[1].close()
            assert lookout.are_gone([1])
    finally:
        for end in (writer, reader, hears, says):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0
