# SPDX-License-Identifier: Apache-2.0
"""Mistakes about the default group: each is named, and says what to call instead."""

import io
import os
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.contract.test_init import BARE, launched, total
from tests.support.harness import Attempt, Rank, attempt


def launched_wrongly(rank: Rank, name: str, value: str | None) -> Attempt:
    """A launcher has set one variable to something else, or not at all."""
    launched(rank, 1)
    del os.environ[name]
    if value is not None:
        os.environ[name] = value
    return attempt(fastcoll.init, timeout_s=2)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MASTER_PORT", "99999", "MASTER_PORT=99999 is outside 0 to 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT=65536 is outside 0 to 65535"),
        ("MASTER_PORT", "-1", "MASTER_PORT=-1 is outside 0 to 65535"),
        ("MASTER_ADDR", None, "WORLD_SIZE and MASTER_PORT are set, but MASTER_ADDR is not"),
    ],
)
def test_a_wrong_or_missing_address_is_named(
    fresh_pool: Any, name: str, value: Any, text: str
) -> None:
    [found] = fresh_pool(1, BARE).run(launched_wrongly, name, value)
    assert found.kind == "UsageError", found
    assert text in found.text


def not_initialised(rank: Rank) -> list[str]:
    tensor = torch.ones(4)
    calls: dict[str, Any] = {
        "init": lambda: fastcoll.init(),
        "all_reduce": lambda: fastcoll.all_reduce(tensor),
        "reduce_scatter": lambda: fastcoll.reduce_scatter_tensor(tensor[:1], tensor),
        "all_gather": lambda: fastcoll.all_gather_into_tensor(tensor, tensor[:1]),
        "broadcast": lambda: fastcoll.broadcast(tensor, 0),
        "barrier": lambda: fastcoll.barrier(),
        "empty": lambda: fastcoll.empty(3),
        "new_group": lambda: fastcoll.new_group([0]),
        "asynchronous": lambda: fastcoll.all_reduce(tensor, async_op=True),
    }
    wrong = []
    for name, call in calls.items():
        one = attempt(call)
        missing = [word for word in ("fastcoll.init", "torchrun") if word not in one.text]
        if one.kind != "UsageError" or missing:
            wrong.append(f"{name}: {one}")
    fastcoll.destroy()  # of nothing does nothing
    assert tensor.tolist() == [1.0] * 4
    return wrong


def bad_arguments(rank: Rank) -> list[str]:
    store = rank.store
    cases: list[tuple[dict[str, Any], str]] = [
        ({"store": store}, "world_size"),
        ({"store": store, "rank": 0}, "world_size"),
        ({"rank": 0, "world_size": 1}, "store"),
        ({"store": store, "rank": 1, "world_size": 1}, "rank"),
        ({"store": store, "rank": -1, "world_size": 1}, "rank"),
        ({"store": store, "rank": 0, "world_size": 0}, "world"),
        ({"store": store, "rank": 0, "world_size": 1, "timeout_s": 0}, "timeout_s"),
        ({"store": store, "rank": 0, "world_size": 1, "timeout_s": -3.0}, "timeout_s"),
        ({"store": store, "rank": 0, "world_size": 1, "timeout_s": "3"}, "timeout_s"),
        ({"store": store, "rank": 0, "world_size": 1, "timeout_s": True}, "timeout_s"),
        ({"store": store, "rank": 0, "world_size": 1, "numerics": "exact"}, "numerics"),
        ({"store": store, "rank": "0", "world_size": 1}, "integers"),
        ({"store": store, "rank": 0, "world_size": 1.0}, "integers"),
        ({"group": "gloo"}, "group"),
    ]
    wrong = []
    for options, word in cases:
        one = attempt(fastcoll.init, **options)
        if one.kind != "UsageError" or word not in one.text:
            wrong.append(f"{options}: {one}")
            fastcoll.destroy()
    return wrong


def twice(rank: Rank) -> list[Any]:
    facts: list[Any] = []
    options = {"rank": 0, "world_size": 1}
    comm = fastcoll.init(store=dist.PrefixStore("a", rank.store), **options)
    again = attempt(fastcoll.init, store=dist.PrefixStore("b", rank.store), **options)
    facts += [again.kind == "UsageError" and "destroy" in again.text, total(rank)]
    fastcoll.destroy()
    fastcoll.destroy()
    facts.append(comm.closed)
    with fastcoll.init(store=dist.PrefixStore("c", rank.store), **options):
        facts.append(total(rank))
        fastcoll.destroy()
    return facts


def of_no_group(rank: Rank) -> list[Any]:
    """A group that was closed, and one of others, can't become the default one."""
    store = dist.PrefixStore("d", rank.store)
    whole = fastcoll.init(store=store, rank=rank.rank, world_size=rank.world_size)
    part, closed = whole.new_group([0]), whole.new_group()
    fastcoll.destroy()
    closed.close()
    facts = []
    for group in (closed, part):
        seen = attempt(fastcoll.init, group)
        facts.append((seen.kind, seen.text.replace(group.name, "it")))
        fastcoll.destroy()
    whole = fastcoll.init(store=store, rank=rank.rank, world_size=rank.world_size)
    facts.append(total(rank))
    return facts


def test_groups_that_cannot_be_the_default_one(fresh_pool: Any) -> None:
    rows = fresh_pool(2, BARE).run(of_no_group)
    destroyed = ("UsageError", 'group "it" was destroyed')
    assert rows[0] == [destroyed, ("", ""), 3.0]
    assert rows[1] == [destroyed, ("UsageError", 'this rank is not in the group "it"'), 3.0]


def test_mistakes_on_one_rank(fresh_pool: Any) -> None:
    pool = fresh_pool(1, BARE)
    assert pool.run(not_initialised) == [[]]
    assert pool.run(bad_arguments) == [[]]
    assert pool.run(twice_differs) == [[True] * 4]
    assert pool.run(twice) == [[True, 1.0, True, 1.0]]


def twice_differs(rank: Rank) -> list[bool]:
    """A broken environment is reported as such, not guessed around."""
    facts = []
    for changes, word in (({"RANK": "x"}, "environment"), ({"RANK": "5"}, "RANK=5")):
        launched(rank, 1)
        os.environ.update(changes)
        for call in (fastcoll.init, lambda: fastcoll.all_reduce(torch.ones(1))):
            facts.append(word in attempt(call).text)
    return facts


def bad_setting(rank: Rank, name: str, value: str) -> Attempt:
    os.environ[name] = value
    return attempt(fastcoll.init, store=rank.store, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"FASTCOLL_{end}", "nonsense") for end in ("SIMD", "NUMERICS", "LOG")),
        *(("FASTCOLL_TIMEOUT_S", value) for value in ("0", "-1", "soon", "inf", "nan")),
    ],
)
def test_a_senseless_variable_is_named(fresh_pool: Any, name: str, value: str) -> None:
    [one] = fresh_pool(1, BARE).run(bad_setting, name, value)
    assert one.kind == "UsageError", one
    assert name in one.text
    assert value in one.text


def disagreeing(rank: Rank) -> Attempt:
    numerics = "fast" if rank.rank == 1 else "same_bits"
    options = {"rank": rank.rank, "world_size": rank.world_size, "numerics": numerics}
    return attempt(fastcoll.init, store=rank.store, **options)


def test_numerics_must_agree(fresh_pool: Any) -> None:
    for one in fresh_pool(3, BARE).run(disagreeing):
        assert one.kind == "UsageError"
        assert "fast" in one.text
        assert "same_bits" in one.text


# In two parts: a name that is written out has to be one that exists.
WRONG = {"FASTCOLL_" + end: "3" for end in ("TIMEOUTS", "TORCHBACKEND", "ZZZ")}
RIGHT = {"FASTCOLL_TIMEOUT_S": "20", "FASTCOLL_VENV": "a", "FASTCOLL_TORCH": "2.13.0"}


def said_at_init(rank: Rank, local_rank: str) -> list[str]:
    os.environ.update(WRONG | RIGHT)
    if rank.rank == 1:
        os.environ["LOCAL_RANK"] = local_rank
    said = io.StringIO()
    with patch.object(sys, "stderr", said):
        fastcoll.init(store=rank.store, rank=rank.rank, world_size=rank.world_size)
        fastcoll.new_group().close()
        fastcoll.destroy()
    return said.getvalue().splitlines()


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_misspelt_variable_is_named_once_on_each_node(fresh_pool: Any, local_rank: str) -> None:
    first, second = fresh_pool(2, BARE).run(said_at_init, local_rank)
    assert len(first) == len(WRONG), first
    timeouts, backend, unknown = first
    assert f"{next(iter(WRONG))} is set" in timeouts
    assert "did you mean FASTCOLL_TIMEOUT_S?" in timeouts
    assert "did you mean FASTCOLL_TORCH_BACKEND?" in backend
    assert "`fastcoll doctor` lists them all" in unknown
    assert second == (first if local_rank == "0" else [])
