# SPDX-License-Identifier: Apache-2.0
"""Limits of waits in kernels: which one holds, how a late rank is told of, and by whom."""

import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

from fastcoll.calls.limits import GpuLimits
from fastcoll.calls.settings import resolve
from fastcoll.errors import PeerLostError, UsageError
from tests.gpu_host.test_gpu_host import agree_terms, hello
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank
from tests.support.sites import group_on_fake_gpu
from tests.support.waiting import wait_until

LATE_S = 20.0


# ---- which limit holds ---------------------------------------------------------------------------


def test_kernels_wait_ten_minutes_and_tell_after_thirty_seconds() -> None:
    assert resolve(None, None).gpu == GpuLimits(600.0, 30.0)
    assert resolve(None, None).timeout_s == 30.0


@pytest.mark.parametrize(
    ("given", "environment", "timeout_s"),
    [
        ({"gpu_timeout_s": 7}, {"FASTCOLL_GPU_TIMEOUT_S": "8"}, 7),
        ({"gpu_timeout_s": timedelta(minutes=2), "timeout_s": 5}, {}, 120),
        ({"timeout_s": 5}, {"FASTCOLL_GPU_TIMEOUT_S": "8"}, 5),  # torch's own limit
        ({}, {"FASTCOLL_GPU_TIMEOUT_S": "8", "FASTCOLL_TIMEOUT_S": "9"}, 8),
        ({}, {"FASTCOLL_TIMEOUT_S": "9"}, 9),
    ],
)
def test_the_nearest_limit_holds(
    given: dict[str, Any],
    environment: dict[str, str],
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = resolve(given.pop("timeout_s", None), None, **given)
    assert settings.gpu.timeout_s == settings.gpu_limit_of(None) == timeout_s
    assert settings.gpu_limit_of(3) == 3


def test_a_new_limit_holds_in_kernels_too() -> None:
    settings = resolve(None, None, None, 50, 2)
    assert settings.for_part(None, None).gpu == GpuLimits(50, 2)
    assert settings.for_part(4, None).gpu == GpuLimits(4, 2)
    settings.set_limit(6)
    assert settings.gpu == GpuLimits(6, 2)


@pytest.mark.parametrize("name", ["gpu_timeout_s", "gpu_report_s"])
def test_a_limit_that_is_none_is_refused_by_its_name(name: str) -> None:
    for value in (0, -1, "soon", float("inf")):
        with pytest.raises(UsageError, match=f"{name} must be a positive number of seconds"):
            resolve(None, None, **{name: value})  # type: ignore[arg-type]


@needs_gpu_part
def test_ranks_with_different_limits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"one limit.*rank 0: 600 s, rank 1: 30 s.*gpu_timeout_s="):
        agree_terms([hello("a", timeout_s=600.0), hello("b", timeout_s=30.0)])
    agree_terms([hello("a", timeout_s=30.0), hello("b", timeout_s=30.0)])


# ---- a late rank ---------------------------------------------------------------------------------


def look_twice(rank: Rank) -> list[list[str]]:
    """Return the lines of the log at each look, when rank 1 is late for one call, then another."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastcoll").addHandler(handler)
    looks = []
    with group_on_fake_gpu(rank) as (group, core):
        group.all_reduce(torch.ones(3))
        side = group._gpus.group
        for slot in (0, 7 << 32 | 1, 7 << 32 | 1, 8 << 32 | 1):
            core.late_calls = [0, slot] if rank.rank == 0 else [0, 0]
            side.look()
            looks.append(list(lines))
            lines.clear()
    return looks


@needs_gpu_part
def test_a_late_rank_is_logged_once_for_each_call(own_pools: Pools) -> None:
    mine, other = own_pools(2).run(look_twice)
    assert [len(lines) for lines in mine] == [0, 1, 0, 1]
    assert [len(lines) for lines in other] == [0, 0, 0, 0]
    line = mine[1][0]
    assert "has waited 30 s for rank 1 (its last call: 1, all_reduce(" in line
    assert "Last started here: 1, all_reduce(" in line
    assert "After 600 s the group breaks" in line


# ---- the thread that looks -----------------------------------------------------------------------


class Group:
    """A group that counts the looks at it."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.looks: list[str] = []

    def look(self) -> None:
        self.looks.append(threading.current_thread().name)
        if self.is_broken:
            raise PeerLostError("rank 1 is gone")


@needs_gpu_part
def test_a_group_that_leaves_is_not_looked_at_any_more() -> None:
    """Its pages are unmapped next."""
    from fastcoll.gpu.watch import Watcher

    looks = threading.Event()
    is_over = threading.Event()

    class Slow(Group):
        def look(self) -> None:
            looks.set()
            time.sleep(0.3)
            is_over.set()

    watcher, slow = Watcher(), Slow()
    watcher.add(slow)
    assert looks.wait(LATE_S)
    watcher.remove(slow)
    assert is_over.is_set(), "the thread still looks"
    wait_until(lambda: watcher._thread is None)


@needs_gpu_part
def test_one_thread_watches_all_groups_and_ends_with_the_last() -> None:
    from fastcoll.gpu.watch import Watcher

    watcher = Watcher()
    groups = [Group(), Group(is_broken=True)]
    for group in groups:
        watcher.add(group)
    del group
    one, broken = (weakref.proxy(group) for group in groups)
    wait_until(lambda: len(one.looks) >= 2 and broken.looks)
    assert {*one.looks, *broken.looks} == {"fastcoll-gpus"}
    assert len(broken.looks) == 1, "a broken group is looked at once"
    assert len([t for t in threading.enumerate() if t.name == "fastcoll-gpus"]) == 1
    watcher.remove(groups[0])
    wait_until(lambda: watcher._thread is None)
    watcher.add(groups[0])
    before = len(one.looks)
    wait_until(lambda: len(one.looks) > before)
    groups.clear()  # a group that no one holds is not kept
    wait_until(lambda: watcher._thread is None)
