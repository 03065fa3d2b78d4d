# SPDX-License-Identifier: Apache-2.0
"""The texts of docs/errors.md are those that ranks get."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcoll.native import _C
from tests.support.harness import Attempt, Pool, Rank, attempt

ERRORS = Path(__file__).parents[2] / "docs/errors.md"
PAGE = ERRORS.read_text()
TEXTS = dict(re.findall(r"^## ([^\n]*)\n\n```text\n(.*?)\n```", PAGE, re.S | re.M))


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)


def usage(rank: Rank, group: Any) -> Attempt:
    return attempt(group.broadcast, torch.ones(4), 5)


def unsupported(rank: Rank, group: Any) -> Attempt:
    numbers = torch.ones(3, dtype=torch.complex64)
    return attempt(group.all_reduce, numbers, torch.distributed.ReduceOp.MAX)


def desync(rank: Rank, group: Any) -> Attempt:
    return attempt(group.all_reduce, torch.ones(3 + rank.rank))


def driver(rank: Rank, group: Any) -> Attempt:
    return attempt(group.empty, 1 << 44)


def abort(rank: Rank, group: Any) -> Attempt:
    if rank.rank == 1:
        group.abort("the loss is NaN")
    return attempt(group.barrier)


def fork(rank: Rank, group: Any) -> Attempt:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, attempt(group.barrier).text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return Attempt("UsageError", os.read(ours, 4096).decode(), 0.0)


def late(rank: Rank, group: Any) -> Attempt:
    if rank.rank == 1:
        rank.wait_for("rank 0 has waited")
        return Attempt("", "", 0.0)
    one = attempt(group.all_reduce, torch.ones(4), timeout_s=0.3)
    rank.tell("rank 0 has waited")
    return one


def killed(rank: Rank, group: Any) -> Attempt:
    if rank.rank == 1:
        rank.wait_for("rank 0 is there")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.tell("rank 0 is there")
    return attempt(group.barrier)


CASES: dict[str, Callable[[Rank, Any], Attempt]] = {
    "UsageError": usage,
    "UnsupportedError": unsupported,
    "DesyncError": desync,
    "CollectiveTimeout": late,
    "AbortedError": abort,
    "DriverError": driver,
    "fork": fork,
    "PeerLostError": killed,  # the last one: it costs a rank
}


def run_all(rank: Rank) -> dict[str, Attempt]:
    """Run each case in a group of its own."""
    found = {}
    for name, case in CASES.items():
        group = rank.comm.new_group()
        found[name] = case(rank, group)
        group.close()
    return found


def test_the_page_has_the_texts(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(run_all)
    [found] = [one.value for one in pool.collect(ranks=[0])]
    assert set(TEXTS) == set(CASES)
    for title, text in TEXTS.items():
        assert found[title].kind == ("UsageError" if title == "fork" else title), found[title]
        assert without_numbers(text) in without_numbers(found[title].text), found[title].text


@pytest.mark.parametrize("page", ["errors.md", "faq.md"])
def test_the_memory_of_a_group_is_what_the_pages_say(page: str) -> None:
    [told] = re.findall(r"\b(\d\.\d\d) MiB", ERRORS.with_name(page).read_text())
    assert told == f"{_C.region_bytes() / 2**20:.2f}"
