# SPDX-License-Identifier: Apache-2.0
"""Options, numbers and arrays of calls that need no Python, and those that C++ must pass on."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fastcoll
from fastcoll.calls.recorder import read_process
from tests.support.fallbacks import noting, refusing
from tests.support.harness import Pools, Rank, attempt

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"algorithm": "one_shot"},
    {"algorithm": "two_shot"},
    {"algorithm": "ring", "numerics": "fast"},
    {"numerics": "same_bits"},
    {"algorithm": "two_shot", "numerics": "fast", "timeout_s": 19},
    {"timeout_s": 19.5},
    {"timeout_s": np.float64(19.5)},
    {"timeout_s": np.int32(19)},
)


def last_plan() -> str:
    """Return the plan by which the last call of the newest group here was carried out."""
    return str(read_process(os.getpid())[-1].operations[-1].plan)


def with_options(rank: Rank) -> list[list[str]]:
    """The plans of calls with each of OPTIONS, twice; those of the second turn need no Python."""
    comm = rank.comm.new_group()
    plans: list[list[str]] = []
    for watch in (noting, refusing):
        with watch("all_reduce"):
            plans.append([])
            for options in OPTIONS:
                values = torch.full((20_000,), 2.0)
                comm.all_reduce(values, **options)
                assert bool((values == 2 * rank.world_size).all())
                plans[-1].append(last_plan())
    comm.close()
    return plans


def test_options_need_no_python(pools: Pools) -> None:
    for first, second in pools(2).run(with_options):
        assert second == first
        asked = [(options.get("algorithm"), options.get("numerics")) for options in OPTIONS]
        for plan, (algorithm, numerics) in zip(first, asked, strict=True):
            assert algorithm is None or plan.startswith(algorithm)
            assert plan.endswith(f"numerics={numerics or 'same_bits'}")


class Index:
    """A number of the program's own, which C++ leaves to Python."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def with_odd_numbers(rank: Rank) -> list[Any]:
    """Roots, ranks and tags that are not quite integers; the second turn needs no Python."""
    comm, peer, values = rank.comm.new_group(), np.int64(rank.rank ^ 1), torch.ones(4)
    group = comm.new_group()
    for watch in (noting, refusing):
        is_known = watch is refusing
        with watch("broadcast", "isend"):
            numbers = [np.int64(1), np.uint8(1)]
            for root in (*numbers, *(() if is_known else (torch.tensor(1), Index(1)))):
                values.fill_(rank.rank)
                group.broadcast(values, root)
                assert values.tolist() == [1.0] * 4
            work = comm.isend(values + rank.rank, peer, np.int16(7))
            comm.recv(values, peer, np.int16(7))
            assert values.tolist() == [1.0 + peer] * 4
            work.wait()
            if is_known:
                proxy = weakref.proxy(index := Index(1))  # a type that is not made in Python
                own = [attempt(group.broadcast, values, proxy).kind]
                del index
                own += [attempt(group.broadcast, values, Index(1)).kind]
                own.append(attempt(comm.isend, values, peer, Index(7)).kind)
    kinds = [attempt(group.broadcast, values, odd).kind for odd in (True, 1.0, "1", Index(-1))]
    comm.close()
    return [own, kinds]


def test_numbers_that_need_no_python(pools: Pools) -> None:
    for own, kinds in pools(2).run(with_odd_numbers):
        assert own == ["Passed"] * 3
        assert kinds == ["", "UsageError", "UsageError", "UsageError"]


def of_arrays(rank: Rank) -> dict[str, bool]:
    """Which arrays need no Python, the plan of their call being known."""

    class Derived(np.ndarray):
        pass

    dtypes = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16")
    arrays = {dtype: np.ones((3, 4), dtype) for dtype in dtypes}
    arrays["no dimension"] = np.ones((), "f4")
    arrays["nothing"] = np.ones((0, 4), "f4")
    arrays["odd address"] = np.ones(17, "u1")[1:].view("f4")
    arrays["strided"] = np.ones((3, 8), "f4")[::-1, ::2]
    arrays["read-only"] = np.ones((3, 4), "f4")
    arrays["read-only"].setflags(write=False)
    arrays["swapped"] = np.ones((3, 4), np.dtype("f4").newbyteorder())
    arrays["derived"] = np.ones((3, 4), "f4").view(Derived)
    for array in arrays.values():
        if array.flags.writeable and array.dtype.isnative:
            rank.comm.all_reduce(array)
    needs_none = {}
    for name, array in arrays.items():
        before = array.copy()
        with refusing("all_reduce"):
            kind = attempt(rank.comm.all_reduce, array).kind
        assert kind in ("", "Passed")
        needs_none[name] = not kind and bool((array == before).all())
    return needs_none


def test_arrays_need_no_python(pools: Pools) -> None:
    for needs_none in pools(1).run(of_arrays):
        passed = {name for name, fast in needs_none.items() if not fast}
        assert passed == {"read-only", "swapped", "derived"}


def passed_on(rank: Rank) -> list[str]:
    """Transfers that C++ must leave to Python, all of them to the rank itself."""
    comm, me, some = rank.comm.new_group(), rank.rank, torch.ones(4, 2)
    calls: dict[str, Callable[[], Any]] = {
        "strided": lambda: comm.isend(some[:, 0], me),
        "marked negative": lambda: comm.isend(torch._neg_view(some), me),
        "array": lambda: comm.isend(some.numpy()[::-1], me),
        "no limit": lambda: comm.isend(some, me, timeout_s=float("inf")),
        "no rank": lambda: comm.isend(some, rank.world_size),
        "anybody": lambda: comm.isend(some, None),
        "no tag": lambda: comm.isend(some, me, 1 << 32),
        "batch": lambda: comm.batch_isend_irecv(
            [fastcoll.P2POp("isend", some, me), fastcoll.P2POp("isend", some[:, 0], me)]
        ),
        "no word": lambda: comm.batch_isend_irecv([fastcoll.P2POp("send", some, me)]),
        "nothing": lambda: comm.batch_isend_irecv([]),
    }
    with refusing("isend", "batch_isend_irecv"):
        taken = [name for name, call in calls.items() if attempt(call).kind != "Passed"]
    if comm.irecv(torch.zeros(8), None).is_completed():
        taken.append("something was sent")
    comm.close()
    return taken


def test_what_is_no_fast_transfer(pools: Pools) -> None:
    assert pools(1).run(passed_on) == [[]]
