# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet at a store on which ranks died before, as torchrun's when it starts them anew."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import StoreExchange
from fastcoll.errors import CollectiveTimeout


class Mortal(Store):
    """The store of a rank that dies: of its questions only the first `after` are asked."""

    def __init__(self, shared: Store, after: int) -> None:
        super().__init__()
        self._shared, self._left = shared, after

    def _living(self) -> Store:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("dead")
        return self._shared

    def add(self, key: str, value: int) -> int:
        return self._living().add(key, value)

    def set(self, key: str, value: Any) -> None:
        self._living().set(key, value)

    def get(self, key: str) -> bytes:
        return self._living().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._living().check(keys)


def die(shared: Store, rank: int, after: int) -> None:
    with pytest.raises(CollectiveTimeout):
        StoreExchange(Mortal(shared, after), rank, 2).gather({"of": "the dead"}, Deadline(5))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("after", range(8))
def test_ranks_that_start_anew_meet_each_other(after: int, late: int) -> None:
    """Rank 0 died behind any of its questions, then behind one more; rank 1 never came before."""
    shared = HashStore()
    die(shared, 0, after)
    die(shared, 0, after + 1)

    def meet(rank: int) -> list[dict[str, Any]]:
        time.sleep(0.05 * (rank == late))
        return StoreExchange(shared, rank, 2).gather({"of": rank}, Deadline(10))

    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):  # groups are made again and again
            assert list(threads.map(meet, (0, 1))) == [[{"of": 0}, {"of": 1}]] * 2


def test_a_rank_that_died_behind_its_introduction_is_named() -> None:
    shared = HashStore()
    die(shared, 1, 5)
    with pytest.raises(CollectiveTimeout, match=r"ranks \[1\], which did not come") as caught:
        StoreExchange(shared, 0, 2).gather({}, Deadline(0.5))
    assert caught.value.ranks == (1,)


def give_up(store: Store, rank: int, world_size: int) -> CollectiveTimeout:
    with pytest.raises(CollectiveTimeout) as caught:
        StoreExchange(store, rank, world_size).gather({}, Deadline(0.3))
    return caught.value


def test_a_rank_that_timed_out_is_not_missing() -> None:
    """Rank 0 left by an error of its own. The others waited for it, one a little longer."""
    shared = HashStore()
    with pytest.raises(TypeError):
        StoreExchange(shared, 0, 3).gather({"no JSON": object()}, Deadline(5))
    for rank, missing in ((1, (0, 2)), (2, (0,))):
        error = give_up(shared, rank, 3)
        assert error.ranks == missing
        assert "did not come to the store, or gave up" in str(error)


def test_a_rank_with_a_shorter_limit_is_named_where_all_came() -> None:
    shared = HashStore()
    error = give_up(shared, 1, 2)
    assert error.ranks == (0,)
    assert "gave up" not in str(error)
    assert give_up(shared, 0, 2).ranks == (1,)


def test_a_word_is_for_the_turn_in_which_it_was_left() -> None:
    shared = HashStore()
    both = [StoreExchange(shared, rank, 2) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        for farewell in (b"\x00\xff why", b""):  # nothing is left the second time
            list(threads.map(lambda one: one.gather({}, Deadline(10)), both))
            if farewell:
                both[0].leave_farewell(farewell, Deadline(5))
            assert both[1].farewell_from(0, Deadline(5)) == farewell
            assert both[1].farewell_from(1, Deadline(5)) == b""


def test_a_store_that_is_gone_has_no_word() -> None:
    one = StoreExchange(Mortal(HashStore(), 0), 0, 2)
    one.leave_farewell(b"why", Deadline(5))
    assert one.farewell_from(1, Deadline(5)) == b""
