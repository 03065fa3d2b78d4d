# SPDX-License-Identifier: Apache-2.0
"""Which calls need no Python: the second plain call of its kind; and which must not do without.

Decides nothing about results beyond what tells the calls apart: the other tests compare them, on
either way.
"""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll.api import VERBS
from tests.support.harness import LATE_S, Pool, Pools, Rank, attempt

TRANSFERS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
WITHOUT_A_PLAN = ("barrier", "all_to_all", *TRANSFERS)  # or with one that knows no size


class Passed(Exception):
    """A call was passed on to Python."""


def counted(comm: Any, verb: str, numel: int) -> tuple[list[Callable[[], Any]], Callable[[], bool]]:
    """Calls of a verb with plain tensors, and whether the last one gave what it must."""
    import fastcoll

    me, world = comm.rank, comm.world_size
    root = world - 1
    mine = torch.full((numel,), me + 1.0)
    out = torch.zeros(numel)
    whole = torch.zeros(world * numel)
    rows = torch.arange(1.0, world + 1).repeat_interleave(numel)  # what rank 0, 1, ... gives
    left = torch.full((numel,), (me - 1) % world + 1.0)
    total = world * (world + 1) / 2
    sums = torch.full((numel,), total)
    pieces = list(whole.chunk(world))
    own = pieces[me]
    splits = [numel] * world
    all_my = mine.repeat(world)
    tensors = [mine.clone(), mine[:1].clone(), torch.zeros(0), mine.int()]

    def transfer() -> None:
        if world > 1 and me == 0:
            comm.send(mine, 1)
        elif me == 1:
            comm.recv(out, 0)

    def around() -> None:
        works = [comm.irecv(out, (me - 1) % world, 7), comm.isend(mine, (me + 1) % world, 7)]
        for work in works:
            work.wait()

    def in_a_batch() -> None:
        ops = [
            fastcoll.P2POp(fastcoll.irecv, out, None, tag=5),
            fastcoll.P2POp("isend", mine, (me + 1) % world, tag=5),
        ]
        for work in comm.batch_isend_irecv(ops):
            work.wait()

    calls: dict[str, tuple[list[Callable[[], Any]], Callable[[], bool]]] = {
        "all_reduce": (
            [lambda: comm.all_reduce(mine, out=out)],
            lambda: torch.equal(out, sums),
        ),
        "reduce_scatter_tensor": (
            [lambda: comm.reduce_scatter_tensor(out, all_my)],
            lambda: torch.equal(out, sums),
        ),
        "all_gather_into_tensor": (
            [lambda: comm.all_gather_into_tensor(whole, mine)],
            lambda: torch.equal(whole, rows),
        ),
        "broadcast": (
            [lambda: comm.broadcast(mine, root)],
            lambda: torch.equal(mine, torch.full((numel,), float(world))),
        ),
        "barrier": ([comm.barrier], lambda: True),
        "reduce": (
            [lambda: comm.reduce(mine, root, out=out), lambda: comm.reduce(mine.clone(), root)],
            lambda: torch.equal(out, sums if me == root else out * 0),
        ),
        "all_gather": (
            [lambda: comm.all_gather(pieces, mine)],
            lambda: torch.equal(whole, rows),
        ),
        "gather": (
            [lambda: comm.gather(mine, pieces if me == root else None, root)],
            lambda: torch.equal(whole, rows if me == root else rows * 0),
        ),
        "gather_single": (
            [
                lambda: comm.gather_single(mine, whole, root),
                lambda: comm.gather_single(own if me == root else mine, whole, root),
            ],
            lambda: torch.equal(whole, rows if me == root else rows * 0),
        ),
        "scatter": (
            [lambda: comm.scatter(out, list(rows.chunk(world)) if me == root else None, root)],
            lambda: torch.equal(out, mine),
        ),
        "all_to_all_single": (
            [
                lambda: comm.all_to_all_single(whole, all_my, splits, splits),
                lambda: comm.all_to_all_single(whole, all_my),
            ],
            lambda: torch.equal(whole, rows),
        ),
        "all_to_all": (
            [lambda: comm.all_to_all(pieces, list(all_my.chunk(world)))],
            lambda: torch.equal(whole, rows),
        ),
        "reduce_scatter": (
            [lambda: comm.reduce_scatter(out, [mine.clone() for _ in range(world)])],
            lambda: torch.equal(out, sums),
        ),
        "all_reduce_coalesced": (
            [
                lambda: (
                    [tensor.fill_(me + 1) for tensor in tensors]
                    and comm.all_reduce_coalesced(tensors)
                )
            ],
            lambda: all(bool((tensor == total).all()) for tensor in tensors),
        ),
        "reduce_scatter_tensor_coalesced": (
            [lambda: comm.reduce_scatter_tensor_coalesced((out,), (all_my,))],
            lambda: torch.equal(out, sums),
        ),
        "all_gather_into_tensor_coalesced": (
            [lambda: comm.all_gather_into_tensor_coalesced([whole], [mine])],
            lambda: torch.equal(whole, rows),
        ),
    }
    transfers = [transfer], lambda: me != 1 or torch.equal(out, rows[:numel])
    calls["send"] = calls["recv"] = transfers
    calls["isend"] = calls["irecv"] = [around], lambda: torch.equal(out, left)
    calls["batch_isend_irecv"] = [in_a_batch], lambda: torch.equal(out, left)
    return calls[verb]


def without_python(rank: Rank, verb: str, numel: int, seal: bool) -> list[str]:
    """Each call twice, the second time with nothing to pass it on to.

    Sealed, the first one has nothing either; in a group of its own, as other tests make calls too.
    """
    from fastcoll import _C

    usual = VERBS[verb]

    def refuse(*_args: Any, **_options: Any) -> None:
        raise Passed(verb)

    comm = rank.comm.new_group() if seal else rank.comm
    calls, right = counted(comm, verb, numel)
    problems = []
    for number, call in enumerate(calls):
        for turn in range(2):
            if turn or seal:
                _C.set_fallback(verb, refuse)
            try:
                call()
            except Passed:
                problems.append(f"call {number} was passed on")
            finally:
                _C.set_fallback(verb, usual)
        if not seal and not right():
            problems.append(f"call {number} went wrong")
    if seal:
        comm.close()
    return problems


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_the_second_call_needs_no_python(pools: Pools, verb: str, world: int) -> None:
    for numel in (5, 30_000):
        assert pools(world).run(without_python, verb, numel, False) == [[]] * world


def test_the_first_call_does(pools: Pools) -> None:
    """The means by which this file tells: calls of a size that nobody made before."""
    for number, verb in enumerate(VERBS):
        if verb not in WITHOUT_A_PLAN:
            [first, *_], *_ = pools(2).run(without_python, verb, 1_111 + number, True)
            assert first == "call 0 was passed on"


def many_sizes(rank: Rank) -> list[int]:
    """Sizes of which not every later call finds its plan, among hundreds that take turns."""
    import fastcoll
    from fastcoll import _C

    usual = VERBS["all_reduce"]
    values = torch.ones(800)
    passed: list[int] = []

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        passed.append(tensor.numel())
        return usual(tensor, *args, **options)

    for numel in range(801):
        rank.comm.all_reduce(values[:numel], fastcoll.ReduceOp.MAX)
    try:
        _C.set_fallback("all_reduce", count)
        for _ in range(2):
            for numel in range(801):
                rank.comm.all_reduce(values[:numel], fastcoll.ReduceOp.MAX)
    finally:
        _C.set_fallback("all_reduce", usual)
    assert bool((values == 1).all())
    return passed


def test_sizes_do_not_drive_each_other_out(pools: Pools) -> None:
    assert pools(2).run(many_sizes) == [[], []]


def new_sizes(rank: Rank, verb: str) -> list[Any]:
    """Sizes that nobody had before, beside one that somebody had; the next ones, and asked ones."""
    import fastcoll
    from fastcoll import _C

    usual, comm = VERBS[verb], rank.comm.new_group()
    function = getattr(fastcoll, verb)
    passed: list[int] = []

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        passed.append(tensor.numel())
        return usual(tensor, *args, **options)

    def call(numel: int, **options: Any) -> bool:
        values = torch.arange(float(numel)) + rank.rank
        wants = values * 2 + 1 - 2 * rank.rank if verb == "all_reduce" else values - rank.rank
        function(values, *(() if verb == "all_reduce" else (0,)), group=comm, **options)
        return torch.equal(values, wants)

    right = [call(100_000)]  # planned alike: 98,305 to 114,688
    try:
        _C.set_fallback(verb, count)
        right += [call(numel) for numel in (98_305, 98_306, 111_111, 114_688)]
        alike = len(passed)
        right += [call(numel) for numel in (98_304, 114_689)]
        asked = len(passed) - alike
        if verb == "all_reduce":
            right += [call(100_000 + i, algorithm="two_shot") for i in (0, 1, 0, 1)]
    finally:
        _C.set_fallback(verb, usual)
    comm.close()
    return [all(right), alike, asked, len(passed) - alike - asked]


@pytest.mark.parametrize(("verb", "asks"), [("all_reduce", 1), ("broadcast", 0)])
def test_sizes_near_known_ones_need_no_python(pools: Pools, verb: str, asks: int) -> None:
    assert pools(2).run(new_sizes, verb) == [[True, 0, 2, asks]] * 2


def new_cuts(rank: Rank) -> list[Any]:
    """Lists and uneven parts of sizes that nobody had before, of about as much as somebody had."""
    from fastcoll import _C

    comm, me = rank.comm.new_group(), rank.rank
    verbs = ("all_gather", "all_reduce_coalesced", "all_gather_into_tensor_coalesced")
    usual = {verb: VERBS[verb] for verb in verbs}
    passed: list[str] = []

    def count(verb: str) -> Callable[..., Any]:
        return lambda *args, **options: (passed.append(verb), usual[verb](*args, **options))[1]

    def call(first: int, second: int) -> bool:
        parts = [torch.empty(first), torch.empty(second)]
        comm.all_gather(parts, torch.full((parts[me].numel(),), me + 1.0))
        right = [bool((part == by + 1).all()) for by, part in enumerate(parts)]
        sums = [torch.full((first,), me + 1.0), torch.full((second,), me + 2.0)]
        comm.all_reduce_coalesced(sums)
        right += [bool((one == want).all()) for one, want in zip(sums, (3, 5), strict=True)]
        wholes = [torch.empty(2, first), torch.empty(2, second)]
        mine = [torch.full((first,), me + 3.0), torch.full((second,), me + 4.0)]
        comm.all_gather_into_tensor_coalesced(wholes, mine)
        return all(
            bool((whole[by] == add + by).all())
            for whole, add in zip(wholes, (3, 4), strict=True)
            for by in range(2)
        ) and all(right)

    right = [call(50_000, 40_000)]
    try:
        for verb in verbs:
            _C.set_fallback(verb, count(verb))
        right += [call(50_001, 39_999), call(1, 88_000), call(0, 89_000), call(41_000, 41_500)]
        known = len(passed)
        right.append(call(60_000, 40_000))
    finally:
        for verb, function in usual.items():
            _C.set_fallback(verb, function)
    comm.close()
    return [all(right), known, sorted(passed)]


def test_cuts_that_are_new_need_no_python(pools: Pools) -> None:
    verbs = ["all_gather", "all_gather_into_tensor_coalesced", "all_reduce_coalesced"]
    assert pools(2).run(new_cuts) == [[True, 0, verbs]] * 2


def by_two_ways(rank: Rank) -> list[bool]:
    """Rank 0's plans are Python's, the others' are C++'s, which has met neighbours only.

    Ranks that had other plans would find out: they are part of the calls' stamps.
    """
    import fastcoll

    comm, me, world = rank.comm.new_group(), rank.rank, rank.world_size
    numels = np.unique(np.geomspace(1, 1_500_000, 200).astype(int)).tolist()
    verbs = ("all_reduce", "all_gather_into_tensor", "all_gather", "all_reduce_coalesced")
    right = []
    for numel in [*numels[::3], *numels]:
        by_python = me == 0 or numel in numels[::3]
        reduce, gather, gather_parts, reduce_list = (
            VERBS[verb] if by_python else getattr(fastcoll, verb) for verb in verbs
        )
        values, whole = torch.full((numel,), me + 1.0), torch.zeros(world, numel)
        gather(whole, values, group=comm)
        reduce(values, group=comm)
        right.append(bool((values == world * (world + 1) / 2).all()))
        right.append(bool((whole == torch.arange(1.0, world + 1)[:, None]).all()))
        parts = [torch.zeros(numel + by) for by in range(world)]
        gather_parts(parts, torch.full((numel + me,), me + 1.0), comm)
        reduce_list(parts, group=comm)
        right += [bool((part == world * (by + 1)).all()) for by, part in enumerate(parts)]
    comm.close()
    return right


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_python_and_cpp_plan_alike(pools: Pools, world: int) -> None:
    for row in pools(world).run(by_two_ways):
        assert all(row)


# ---- options and arrays --------------------------------------------------------------------------

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
    """What the last call of the newest group here was carried out by."""
    from fastcoll.calls.recorder import read_process

    return str(read_process(os.getpid())[-1].operations[-1].plan)


def with_options(rank: Rank) -> list[list[str]]:
    """The plans of calls with each of OPTIONS, twice; those of the second turn need no Python."""
    from fastcoll import _C

    def refuse(*_args: Any, **_options: Any) -> None:
        raise Passed("all_reduce")

    comm = rank.comm.new_group()
    plans: list[list[str]] = []
    for turn in range(2):
        _C.set_fallback("all_reduce", refuse if turn else VERBS["all_reduce"])
        try:
            plans.append([])
            for options in OPTIONS:
                values = torch.full((20_000,), 2.0)
                comm.all_reduce(values, **options)
                assert bool((values == 2 * rank.world_size).all())
                plans[-1].append(last_plan())
        finally:
            _C.set_fallback("all_reduce", VERBS["all_reduce"])
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
    from fastcoll import _C

    def refuse(*_args: Any, **_options: Any) -> None:
        raise Passed("a verb")

    comm, peer, values = rank.comm.new_group(), np.int64(rank.rank ^ 1), torch.ones(4)
    group = comm.new_group()
    python = {verb: VERBS[verb] for verb in ("broadcast", "isend")}
    for turn in range(2):
        for verb, fallback in python.items():
            _C.set_fallback(verb, refuse if turn else fallback)
        try:
            for root in (np.int64(1), np.uint8(1), *(() if turn else (torch.tensor(1), Index(1)))):
                values.fill_(rank.rank)
                group.broadcast(values, root)
                assert values.tolist() == [1.0] * 4
            work = comm.isend(values + rank.rank, peer, np.int16(7))
            comm.recv(values, peer, np.int16(7))
            assert values.tolist() == [1.0 + peer] * 4
            work.wait()
            if turn:
                proxy = weakref.proxy(index := Index(1))  # a type that is not made in Python
                own = [attempt(group.broadcast, values, proxy).kind]
                del index
                own += [attempt(group.broadcast, values, Index(1)).kind]
                own.append(attempt(comm.isend, values, peer, Index(7)).kind)
        finally:
            for verb, fallback in python.items():
                _C.set_fallback(verb, fallback)
    kinds = [attempt(group.broadcast, values, odd).kind for odd in (True, 1.0, "1", Index(-1))]
    comm.close()
    return [own, kinds]


def test_numbers_that_need_no_python(pools: Pools) -> None:
    for own, kinds in pools(2).run(with_odd_numbers):
        assert own == ["Passed"] * 3
        assert kinds == ["", "UsageError", "UsageError", "UsageError"]


def comes_too_late(rank: Rank) -> str:
    """Its own limit holds in a call that needs no Python."""
    import fastcoll

    group = rank.comm.new_group()
    values = torch.ones(100)
    group.all_reduce(values, timeout_s=19)
    kind = ""
    if rank.rank == 0:
        began = time.monotonic()
        try:
            group.all_reduce(values, timeout_s=0.5)
        except fastcoll.CollectiveTimeout:
            kind = "in time" if time.monotonic() - began < LATE_S else "late"
        rank.tell("over")
    else:
        rank.wait_for("over")
    group.close()
    return kind


def test_a_limit_that_needs_no_python(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(2).run(comes_too_late) == ["in time", ""]


def of_arrays(rank: Rank) -> dict[str, bool]:
    """Which arrays need no Python, the plan of their call being known."""
    from fastcoll import _C

    class Derived(np.ndarray):
        pass

    def refuse(*_args: Any, **_options: Any) -> None:
        raise Passed("all_reduce")

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
    _C.set_fallback("all_reduce", refuse)
    try:
        for name, array in arrays.items():
            before = array.copy()
            try:
                rank.comm.all_reduce(array)
                needs_none[name] = bool((array == before).all())
            except Passed:
                needs_none[name] = False
    finally:
        _C.set_fallback("all_reduce", VERBS["all_reduce"])
    return needs_none


def test_arrays_need_no_python(pools: Pools) -> None:
    for needs_none in pools(1).run(of_arrays):
        passed = {name for name, fast in needs_none.items() if not fast}
        assert passed == {"read-only", "swapped", "derived"}


def passed_on(rank: Rank) -> list[str]:
    """Transfers that C++ must leave to Python, all of them to the rank itself."""
    import fastcoll
    from fastcoll import _C

    def refuse(*_args: Any, **_options: Any) -> None:
        raise Passed("isend")

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
    taken = []
    for name, call in calls.items():
        verb = "isend" if name in list(calls)[:7] else "batch_isend_irecv"
        _C.set_fallback(verb, refuse)
        try:
            call()
            taken.append(name)
        except Passed:
            pass
        finally:
            _C.set_fallback(verb, VERBS[verb])
    if comm.irecv(torch.zeros(8), None).is_completed():
        taken.append("something was sent")
    comm.close()
    return taken


def test_what_is_no_fast_transfer(pools: Pools) -> None:
    assert pools(1).run(passed_on) == [[]]


def test_every_verb_is_here() -> None:
    from fastcoll import _C

    fast = {
        name
        for name in dir(_C)
        if type(getattr(_C, name)).__name__ == "builtin_function_or_method"
        and getattr(_C, name).__module__ == "fastcoll"
    }
    assert fast == set(VERBS)
