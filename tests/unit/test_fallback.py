# SPDX-License-Identifier: Apache-2.0
"""The verdict of a group whose store is lost: told at the doors of ranks that know better."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.errors import PeerLostError
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door, hear
from fastcoll.nodes.verdict.fallback import Fallback
from tests.support.held import limited

MAP = NodeMap(((0, 1, 2, 3), (4, 5)), ("a", "b"), ("a", "b"))
LOST = PeerLostError("rank 0 is lost", [0])
LIMIT_S = 30.0


class Rank:
    """One rank's door and fallback; the store lives, and says nothing of a verdict."""

    def __init__(self, store: HashStore, rank: int, nonce: str = "nonce") -> None:
        self.board = Board(store, "nonce")
        self.door = Door(self.board, rank)
        self.fallback = Fallback(Seat(MAP, rank, nonce, store_rank=0), self.board, self.door)

    def close(self) -> None:
        self.fallback.close()
        self.door.close()


@pytest.fixture
def join() -> Iterator[Callable[..., Rank]]:
    store = HashStore()
    with ExitStack() as ends:

        def made(rank: int, nonce: str = "nonce") -> Rank:
            one = Rank(store, rank, nonce)
            ends.callback(one.close)
            return one

        yield made


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_rank_of_another_node_hears_a_witness(join: Callable[..., Rank]) -> None:
    asks, _, witness = (join(rank) for rank in (4, 1, 2))
    wait_for(lambda: len(asks.fallback._places) == 2)
    assert witness.fallback.tell(LOST, 7)

    def heard() -> bool:
        asks.fallback.ask()
        return asks.board.verdict() is not None

    wait_for(heard)
    verdict = asks.board.verdict()
    assert isinstance(verdict, PeerLostError)
    assert (str(verdict), verdict.ranks) == (str(LOST), (0,))
    assert asks.board.verdict_sequence == 7


def test_every_rank_that_comes_is_told(join: Callable[..., Rank]) -> None:
    asks, witness, _ = (join(rank) for rank in (4, 1, 2))
    wait_for(lambda: len(asks.fallback._places) == 2)
    witness.fallback.tell(LOST, 7)
    told = [hear(asks.fallback._places[1], LIMIT_S) for _ in range(5)]
    assert told[0].startswith("nonce 7 {")
    assert told == told[:1] * 5


def test_a_process_with_many_descriptors_tells(join: Callable[..., Rank]) -> None:
    """select() takes none from 1024 on."""
    with limited(resource.RLIMIT_NOFILE, 4096), ExitStack() as crowd:
        for _ in range(1024):
            crowd.callback(os.close, os.dup(0))
        witness = join(1)
        crowd.callback(witness.close)  # before the limit falls
        wait_for(lambda: witness.board.read("door/1"))
        witness.door.tell("text")
        address, port, _ = json.loads(witness.board.read("door/1") or "")
        assert hear((address, port), LIMIT_S) == "text"


def test_a_closed_door_ends_the_telling(
    join: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = join(1)
    wait_for(lambda: witness.board.read("door/1"))
    witness.door.close()
    monkeypatch.setattr("fastcoll.nodes.verdict.doors.in_background", lambda task: task())
    witness.door.tell("text")


def test_another_group_at_the_same_port_is_not_believed(join: Callable[..., Rank]) -> None:
    asks, witness, _ = join(4), join(1, "another"), join(2)
    wait_for(lambda: len(asks.fallback._places) == 2)
    witness.fallback.tell(LOST, 7)
    asks.fallback._ask(1, asks.fallback._places[1])
    assert asks.board.verdict() is None


@pytest.mark.parametrize("rank", [0, 4, 5])
def test_the_other_ranks_tell_nothing(join: Callable[..., Rank], rank: int) -> None:
    assert not join(rank).fallback.tell(LOST, 7)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_ranks_near_the_store_ask_nobody(join: Callable[..., Rank], rank: int) -> None:
    assert join(rank).fallback._witnesses == []
