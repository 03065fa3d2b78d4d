# SPDX-License-Identifier: Apache-2.0
"""The tests' own tools must catch what they are there for: each is shown a planted mistake."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support import oracle
from tests.support.calls import Call, Place, difference, expected, words_in
from tests.support.harness import Pool, Pools, Rank, RankFailure, Setup
from tests.support.perform import Memory, Result, Started, check, compare

BARE = Setup(init=False)


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_a_single_wrong_bit_is_found(dtype: str) -> None:
    for op in oracle.ops_of(dtype):
        call = Call("all_reduce", dtype, 1000, op)
        [want, *_] = expected(call, 3)
        assert difference(call, 3, 0, want, want.copy()) == ""
        for where in (0, 999, want.size - 1):
            wrong = want.copy()
            wrong[where] ^= 1
            assert f"word {where} is" in difference(call, 3, 0, want, wrong)


def test_the_tolerance_of_fast_numerics_is_no_blank_cheque() -> None:
    for dtype, op in (("float32", "SUM"), ("bfloat16", "AVG"), ("float64", "PRODUCT")):
        call = Call("all_reduce", dtype, 1000, op, "ring", "fast")
        [want, *_] = expected(call, 4)
        assert difference(call, 4, 0, want, want) == ""
        wrong = want.copy()
        largest = int(np.argmax(np.abs(oracle.decode(want, dtype))))
        wrong[largest] += 40 if dtype != "bfloat16" else 2
        assert "1 of 1000 words differ" in difference(call, 4, 0, want, wrong)


def test_inputs_hold_what_is_difficult() -> None:
    """NaN, infinities, both zeros, subnormals, and sums that depend on the order of the ranks."""
    for dtype, form in oracle.FLOATS.items():
        call = Call("all_reduce", dtype, 20_000)
        inputs = [words_in(call, rank, 4) for rank in range(4)]
        present = set(np.unique(inputs[0]).tolist())
        assert {0, form.sign_bit, 1, form.infinity, form.overflow} <= present
        forth = oracle.reduce(inputs, dtype, "SUM", 4)
        back = oracle.reduce(inputs[::-1], dtype, "SUM", 4)
        if dtype not in ("float8_e4m3fn", "float8_e5m2"):  # their sums are exact in float32
            assert (forth != back).sum() > 20
        assert 0 < form.is_nan(forth).sum() < 0.3 * forth.size


@pytest.mark.parametrize("kind", ["private", "strided", "numpy"])
def test_a_byte_written_outside_is_found(kind: str) -> None:
    memory = Memory("int16", 10, Place(kind, 3), None)
    memory.fill(np.arange(10, dtype=np.uint16))
    assert memory.untouched_around()
    assert memory.words().tolist() == list(range(10))
    assert [int(value) for value in memory.array] == list(range(10))
    array = memory.array if kind == "numpy" else memory.array.numpy()
    for beyond in (-1, 10):
        changed = np.lib.stride_tricks.as_strided(array[:1], (1,), array.strides)
        where = changed.__array_interface__["data"][0] + beyond * array.strides[0]
        byte = (np.ctypeslib.ctypes.c_uint8 * 1).from_address(where)
        kept, byte[0] = byte[0], 0
        assert not memory.untouched_around()
        byte[0] = kept
        assert memory.untouched_around()


# The parts of a call's memory that no call may change, and the problem that is said of each.
SPOILT = {
    "input": "changed its input",
    "first byte": "wrote outside its output",
    "last byte": "wrote outside its output",
}


class Spoiled(Started):
    """A call that does more than it should."""

    part = "input"

    def result(self) -> Result:
        """Change the part, then check it."""
        if self.part == "input":
            self._input.array[0] = 5
        else:
            self._output._bytes[0 if self.part == "first byte" else -1] ^= 1
        return super().result()


def spoil(rank: Rank, part: str, in_place: bool) -> str:
    Spoiled.part = part
    call = Call("all_reduce", "float32", 5, places=(Place(in_place=in_place),))
    return Spoiled(rank.comm, call).result()[1]


@pytest.mark.parametrize("part", SPOILT)
def test_a_changed_byte_is_found(pools: Pools, part: str) -> None:
    for in_place in [False] + [True] * (part != "input"):
        for problem in pools(2).run(spoil, part, in_place):
            assert SPOILT[part] in problem


def test_a_wrong_result_fails_the_check(pools: Pools, monkeypatch: Any) -> None:
    call = Call("all_reduce", "float32", 5)
    assert check(pools(2), [call]) == 1
    right = oracle.reduce
    monkeypatch.setattr(oracle, "reduce", lambda *args: right(*args) ^ np.uint32(1))
    with pytest.raises(AssertionError, match="wrong results"):
        check(pools(2), [call])
    other = dataclasses.replace(call, numel=6)
    assert compare([call], [expected(other, 1)], [[(expected(call, 1)[0], "")]])


def misbehave(rank: Rank, how: str) -> int:
    if rank.rank == 1 and how == "raise":
        raise ValueError("on purpose")
    if rank.rank == 1 and how == "exit":
        print("last words", flush=True)
        os._exit(3)
    if rank.rank == 1 and how == "hang":
        time.sleep(60)
    return rank.rank


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ("rank 1", "ValueError: on purpose", "misbehave")),
        ("exit", ("rank 1", "exit code 3", "last words")),
        ("hang", ("no answer after 1 s", "rank 1 hangs", "misbehave", "rank 0: returned 0")),
    ],
)
def test_a_rank_that_misbehaves(
    fresh_pool: Callable[..., Pool], how: str, words: tuple[str, ...]
) -> None:
    pool = fresh_pool(2, BARE)
    assert pool.run(misbehave, "not at all") == [0, 1]
    with pytest.raises(RankFailure) as caught:
        pool.run(misbehave, how, deadline_s=1 if how == "hang" else 30)
    assert [word for word in words if word not in str(caught.value)] == []
    assert not pool.is_open
    assert not [pid for pid in pool.pids if psutil.pid_exists(pid)]


def test_a_stopped_rank_is_ended(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(1, BARE)
    os.kill(pool.pids[0], signal.SIGSTOP)
    pool.close(grace_s=0.2)
    assert not psutil.pid_exists(pool.pids[0])


def test_a_broken_pool_is_replaced() -> None:
    pools = Pools()
    try:
        first = pools(1)
        assert pools(1) is first
        with pytest.raises(RankFailure):
            first.run(torch.ones, -1)
        assert pools(1) is not first
        assert pools(1).run(misbehave, "not at all") == [0]
    finally:
        pools.close()
