# SPDX-License-Identifier: Apache-2.0
"""FASTCOLL_DUMP_DIR: every error comes in time, whatever lies in the folder or reads stderr."""

import errno
import fcntl
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcoll.calls import dumps
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

STEM = f"fastcoll-{platform.node()}"


def lose_rank_1(rank: Rank) -> list[Attempt]:
    rank.comm.all_reduce(torch.ones(3))
    if rank.rank == 1:
        os._exit(3)
    return [attempt(rank.comm.all_reduce, torch.ones(4)), attempt(rank.comm.barrier)]


def name_of(pid: int, rank: int) -> str:
    return f"{STEM}-{pid}-world-rank{rank}.json"


def assert_whole(path: Path, pool: Pool, rank: int, reason: str) -> None:
    report = json.loads(path.read_text())
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert stat.S_ISREG(path.lstat().st_mode)
    assert report["reason"] == reason
    assert (report["host"], report["group"], report["rank"]) == (platform.node(), "world", rank)
    [status] = report["ranks"]
    assert status["pid"] == pool.pids[rank]
    assert status["is_broken"]
    states = [(one["call"], one["state"]) for one in status["operations"]]
    assert states[0] == (1, "complete")
    assert all(state != "complete" for _, state in states[1:])


def test_an_error_is_written_down(fresh_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = fresh_pool(3, Setup(env={"FASTCOLL_DUMP_DIR": str(tmp_path)}))
    outcomes = pool.outcomes(lose_rank_1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {name_of(pool.pids[rank], rank) for rank in (0, 2)}
    for rank in (0, 2):
        first, second = outcomes[rank].value
        assert first.text == second.text
        assert_whole(tmp_path / name_of(pool.pids[rank], rank), pool, rank, first.text)


def plant(kind: str, path: Path, elsewhere: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        elsewhere.write_text('{"reason": "mine"}')
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    else:
        text = {"half": '{"reason": "the disk was fu', "list": "[]", "deep": "[" * 200_000}
        path.write_text(text[kind])


def content(path: Path) -> object:
    """Tell what a planted thing is, without opening a FIFO."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return path.readlink(), path.read_text()
    return stat.S_IFMT(mode), path.read_text() if stat.S_ISREG(mode) else ""


def old_name(pid: int) -> str:
    return f"fastcoll-{pid}.json"


@pytest.mark.parametrize("kind", ["fifo", "symlink", "folder", "half", "list", "deep"])
def test_what_lies_in_the_way_is_left_alone(
    fresh_pool: Callable[..., Pool], tmp_path: Path, kind: str
) -> None:
    """At every name that the ranks would take first, and at the name of earlier releases."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    pool = fresh_pool(3, Setup(env={"FASTCOLL_DUMP_DIR": str(folder)}))
    names = [name_of(pool.pids[rank], rank) for rank in (0, 2)]
    planted = [name.replace(".json", end) for name in names for end in (".json", ".part")]
    planted += [old_name(pool.pids[rank]) for rank in (0, 2)]
    for number, name in enumerate(planted):
        plant(kind, folder / name, tmp_path / str(number))
    before = {name: content(folder / name) for name in planted}

    outcomes = pool.outcomes(lose_rank_1, deadline_s=2 * LATE_S)
    assert {name: content(folder / name) for name in planted} == before
    for rank, name in zip((0, 2), names, strict=True):
        first = outcomes[rank].value[0]
        assert first.kind == "PeerLostError"
        assert_whole(folder / name.replace(".json", "-2.json"), pool, rank, first.text)
    assert len(list(folder.iterdir())) == len(planted) + 2


def fill(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (65536, 1):
        try:
            while True:
                os.write(descriptor, b"." * size)
        except BlockingIOError:
            pass
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def lose_rank_1_unheard(rank: Rank) -> list[Attempt]:
    """Nobody reads this rank's stderr, which is full."""
    _reader, writer = os.pipe()
    fill(writer)
    sys.stderr = os.fdopen(writer, "w", buffering=1)
    try:
        return lose_rank_1(rank)
    finally:
        sys.stderr = sys.__stderr__


def lose_rank_1_beside_a_slow_folder(rank: Rank) -> list[Attempt]:
    """Every file of the folder takes longer to make than the test has time."""

    def never(*_: object) -> Any:
        time.sleep(10 * LATE_S)

    dumps._create = never
    return lose_rank_1(rank)


@pytest.mark.parametrize(
    ("program", "folder"),
    [
        (lose_rank_1, "missing"),
        (lose_rank_1_unheard, "missing"),
        (lose_rank_1_beside_a_slow_folder, "."),
    ],
)
def test_what_can_not_be_written_holds_up_no_error(
    fresh_pool: Callable[..., Pool], tmp_path: Path, program: Any, folder: str
) -> None:
    pool = fresh_pool(3, Setup(env={"FASTCOLL_DUMP_DIR": str(tmp_path / folder)}))
    outcomes = pool.outcomes(program, deadline_s=2 * LATE_S)
    assert outcomes[0].value[0].kind == outcomes[2].value[0].kind == "PeerLostError"


def lose_rank_1_without_links(rank: Rank) -> list[Attempt]:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EPERM, "Operation not permitted")

    os.link = refuse
    return lose_rank_1(rank)


def test_a_file_system_without_links_gets_the_file(
    fresh_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_pool(3, Setup(env={"FASTCOLL_DUMP_DIR": str(tmp_path)}))
    outcomes = pool.outcomes(lose_rank_1_without_links)
    assert len(list(tmp_path.iterdir())) == 2
    for rank in (0, 2):
        text = outcomes[rank].value[0].text
        assert_whole(tmp_path / name_of(pool.pids[rank], rank), pool, rank, text)


def break_two_groups(rank: Rank) -> list[tuple[str, Attempt]]:
    groups = [rank.hasty_group(0.5) for _ in range(2)]
    attempts = []
    for group in groups:
        if rank.rank == 1:
            rank.wait_for(f"rank 0 lost {group.name}")
        attempts.append((group.name, attempt(group.barrier)))
        rank.tell(f"rank {rank.rank} lost {group.name}")
    return attempts


def test_each_group_has_its_own_file(fresh_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = fresh_pool(2, Setup(env={"FASTCOLL_DUMP_DIR": str(tmp_path)}))
    rows = pool.run(break_two_groups)
    for rank, row in enumerate(rows):
        for group, one in row:
            name = f"{STEM}-{pool.pids[rank]}-{group.replace('/', '_')}-rank{rank}.json"
            assert json.loads((tmp_path / name).read_text())["reason"] == one.text
    assert len(list(tmp_path.iterdir())) == 4
