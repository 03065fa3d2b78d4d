# SPDX-License-Identifier: Apache-2.0
"""FASTCOLL_DEBUG=trace: errors say where both ranks made their calls, and every call has times."""

import inspect
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fastcoll
from fastcoll.cli import app
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.waiting import wait_until

TRACE = Setup(env={"FASTCOLL_DEBUG": "trace"})


def by_c_function(group: Any, numel: int) -> None:
    fastcoll.all_reduce(torch.ones(numel), group=group)


def by_method(group: Any, numel: int) -> None:
    group.all_reduce(torch.ones(numel))


def of_numpy(group: Any, numel: int) -> None:
    group.all_reduce(np.ones(numel, np.float32))


def of_parts(group: Any, numel: int) -> None:
    parts = [torch.ones(numel) for _ in range(group.world_size)]
    group.all_to_all([torch.empty(numel) for _ in parts], parts)


def of_lists(group: Any, numel: int) -> None:
    fastcoll.all_reduce_coalesced([torch.ones(numel), torch.ones(3)], group=group)


def asynchronously(group: Any, numel: int) -> None:
    work = group.all_reduce(torch.ones(numel), async_op=True)
    wait_elsewhere(work)


def wait_elsewhere(work: Any) -> None:
    work.wait()


def of_objects(group: Any, numel: int) -> None:
    group.all_gather_object([None] * group.world_size, "x" * 1000 * numel)


WAYS = [by_c_function, by_method, of_numpy, of_parts, of_lists, asynchronously, of_objects]


def differently(group: Any) -> None:
    group.barrier()


def disagree(rank: Rank, ways: list[Callable[[Any, int], None]]) -> list[Attempt]:
    """In every way: two calls alike, then a barrier on rank 1 alone."""
    attempts = []
    for way in ways:
        group = rank.comm.new_group(timeout_s=20)
        for _ in range(2):
            way(group, 5)
        attempts.append(attempt(differently, group) if rank.rank == 1 else attempt(way, group, 5))
        # Not before both know: who leaves is lost to the other.
        rank.comm.barrier()
        group.close()
    return attempts


def site_of(function: Callable[..., None], text: str) -> str:
    """The line of a function that contains a text, as an error shows it."""
    lines, start = inspect.getsourcelines(function)
    [line] = [start + at for at, line in enumerate(lines) if text in line]
    return f"/faults/{Path(__file__).name}:{line} in {function.__name__}"


TEXTS = {
    by_c_function: "fastcoll.all_reduce(",
    by_method: "group.all_reduce(",
    of_numpy: "group.all_reduce(",
    of_parts: "group.all_to_all(",
    of_lists: "fastcoll.all_reduce_coalesced(",
    asynchronously: "group.all_reduce(",
    of_objects: "group.all_gather_object(",
}


def test_a_mismatch_says_where_both_called(fresh_pool: Callable[..., Pool]) -> None:
    rows = fresh_pool(2, TRACE).run(disagree, WAYS)
    for way, mine, theirs in zip(WAYS, *rows, strict=True):
        assert mine.kind == theirs.kind == "DesyncError", way
        assert mine.text == theirs.text
        assert site_of(way, TEXTS[way]) in mine.text, mine.text
        assert site_of(differently, "group.barrier()") in mine.text, mine.text


def test_nothing_is_noted_unless_asked_for(fresh_pool: Callable[..., Pool]) -> None:
    [row, _] = fresh_pool(2).run(disagree, [by_c_function])
    assert row[0].kind == "DesyncError"
    assert ".py" not in row[0].text


def receive(group: Any) -> None:
    fastcoll.recv(torch.ones(5), 1, group=group)


def send_some_time(group: Any) -> None:
    work = group.isend(torch.ones(1 << 20), 1)
    wait_elsewhere(work)


def receive_numpy(group: Any) -> None:
    group.recv(np.ones(5, np.float32), 1)


TRANSFERS = {
    receive: "fastcoll.recv(",
    send_some_time: "group.isend(",
    receive_numpy: "group.recv(",
}


def transfer_alone(rank: Rank) -> list[Attempt]:
    """Rank 1 neither sends nor receives."""
    attempts = []
    for way in TRANSFERS:
        group = rank.hasty_group(0.2)
        if rank.rank == 0:
            attempts.append(attempt(way, group))
        rank.comm.barrier()
    return attempts


def test_a_transfer_says_where_it_was_started(fresh_pool: Callable[..., Pool]) -> None:
    rows, _ = fresh_pool(2, TRACE).run(transfer_alone)
    for (way, text), caught in zip(TRANSFERS.items(), rows, strict=True):
        assert caught.kind == "CollectiveTimeout", caught
        assert site_of(way, text) in caught.text, caught.text


def through_torch(rank: Rank) -> Attempt:
    import torch.distributed as dist

    dist.init_process_group(
        "fastcoll", store=rank.store, rank=rank.rank, world_size=rank.world_size
    )
    dist.all_reduce(torch.ones(3))
    caught = attempt(differ_through_torch, rank.rank)
    rank.store.set(f"over{rank.rank}", "")
    rank.store.wait([f"over{1 - rank.rank}"])
    return caught


def differ_through_torch(rank: int) -> None:
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)
    dist.barrier()


# Compiling takes 15 s where nobody else does anything.
@pytest.mark.parametrize("backend", ["python", pytest.param("auto", marks=pytest.mark.native)])
@pytest.mark.timeout(500)
def test_through_torch(fresh_pool: Callable[..., Pool], backend: str) -> None:
    env = {**TRACE.env, "FASTCOLL_TORCH_BACKEND": backend}
    pool = fresh_pool(2, Setup(init=False, env=env))
    for caught in pool.run(through_torch, deadline_s=400):
        assert caught.kind == "DesyncError", caught
        for text in ("dist.all_reduce(", "dist.broadcast("):
            assert site_of(differ_through_torch, text) in caught.text, caught.text


def work_then_wait(rank: Rank, looked: Path) -> None:
    for _ in range(3):
        by_c_function(rank.comm, 5)
    if rank.rank == 1:
        wait_until(looked.exists)
    by_method(rank.comm, 6)


def test_inspect_shows_every_call_with_its_time_and_place(
    fresh_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_pool(2, TRACE)
    looked = tmp_path / "looked"
    pool.start(work_then_wait, looked)
    trace = tmp_path / "trace.json"
    command = ["inspect", "--json", "-", "--trace", str(trace), "--pid", str(pool.pids[0])]

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, command).stdout)["ranks"][0]
        last = found["operations"][3:]
        return found if last and last[0]["state"] == "waiting" else None

    found = wait_until(look, 30)
    operations = found["operations"]
    shown = CliRunner().invoke(app, command[:1] + command[5:]).output
    looked.touch()
    pool.finish()

    sites = [site_of(by_c_function, "fastcoll.all_reduce(")] * 3
    sites.append(site_of(by_method, "group.all_reduce("))
    for one, site in zip(operations, sites, strict=True):
        assert one["site"].endswith(site)
        assert 0 < one["began_us"] <= (one["ended_us"] or one["wait_began_us"])
    *calls, waiting = operations
    assert all(
        before["ended_us"] <= after["began_us"] for before, after in itertools.pairwise(calls)
    )
    assert waiting["ended_us"] == 0
    events = [row for row in json.loads(trace.read_text())["traceEvents"] if row["ph"] == "X"]
    by_call = [row for row in events if row["name"] != "wait"]
    assert len(by_call) == len(found["operations"])
    [wait] = [
        row for row in events if row["name"] == "wait" and row["args"]["call"] == waiting["call"]
    ]
    assert wait["ts"] >= waiting["began_us"]
    assert Path(__file__).name in shown
