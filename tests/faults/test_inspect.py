# SPDX-License-Identifier: Apache-2.0
"""The flight recorder from outside: ranks that work, wait, are stopped, or never called."""

import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastcoll.calls import recorder
from fastcoll.calls.recorder import _region_links
from fastcoll.cli import app
from tests.support.harness import Attempt, Pool, Rank, attempt
from tests.support.waiting import wait_until

runner = CliRunner()


def get_stuck(rank: Rank) -> Attempt:
    """All come to 70 calls; then rank 1 stays away, ranks 0 and 2 wait for it."""
    for _ in range(69):
        rank.comm.all_reduce(torch.ones(3))
    rank.comm.broadcast(torch.ones(50_000), 2)
    if rank.rank == 1:
        time.sleep(60)
    return attempt(rank.comm.all_reduce, torch.ones(7), timeout_s=30)


def look(*arguments: str) -> dict[int, dict[str, Any]]:
    """Return what inspect says as JSON, by rank of group "world"."""
    result = runner.invoke(app, ["inspect", "--json", "-", *arguments])
    assert result.exit_code == 0, result.output
    ranks = json.loads(result.stdout)["ranks"]
    return {one["rank"]: one for one in ranks if one["group"] == "world"}


def of(pool: Pool) -> list[str]:
    return [text for pid in pool.pids for text in ("--pid", str(pid))]


def are_stuck(found: dict[int, dict[str, Any]]) -> bool:
    newest = [found[rank]["operations"][-1:] for rank in (0, 2)]
    return all(row and row[0]["call"] == 71 and row[0]["state"] == "waiting" for row in newest)


@pytest.mark.long
def test_a_stuck_job(fresh_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = fresh_pool(3)
    pool.start(get_stuck)
    wait_until(lambda: are_stuck(look(*of(pool))), 30)
    os.kill(pool.pids[0], signal.SIGSTOP)
    time.sleep(0.2)
    trace = tmp_path / "trace.json"
    found = look(*of(pool), "--trace", str(trace))
    table = runner.invoke(app, ["inspect", *of(pool)]).output
    listed = runner.invoke(app, ["inspect", "--json", "-"]).output
    os.kill(pool.pids[0], signal.SIGCONT)

    assert [found[rank]["pid"] for rank in range(3)] == pool.pids
    assert [found[rank]["is_stopped"] for rank in range(3)] == [True, False, False]
    for rank in range(3):
        calls = [one["call"] for one in found[rank]["operations"]]
        last = 71 if rank != 1 else 70
        assert calls == list(range(last - 63, last + 1))
        assert not found[rank]["is_broken"]
        *earlier, newest = found[rank]["operations"]
        assert all(one["state"] == "complete" for one in earlier)
        if rank == 1:
            assert newest["what"] == "broadcast(float32, numel=50000, src=2)"
            assert newest["state"] == "complete"
        else:
            assert newest["what"] == "all_reduce(SUM, float32, numel=7)"
            assert newest["state"] == "waiting"
            assert newest["message_bytes"] == 28

    waits = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    stuck = [event for event in waits if event["args"]["call"] == 71]
    assert {event["tid"] for event in stuck} == {0, 2}
    assert all(0.1e6 < event["dur"] < 60e6 for event in stuck)

    assert "stopped" in table
    assert "waiting" in table
    assert all(str(pid) in listed for pid in pool.pids)

    os.kill(pool.pids[1], signal.SIGKILL)
    for outcome in pool.collect(ranks=(0, 2)):
        assert outcome.value.kind == "PeerLostError"
    assert look("--pid", str(pool.pids[0]))[0]["is_broken"]


def test_what_can_not_be_inspected(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    silent = look("--pid", str(pool.pids[1]))
    assert silent[1]["operations"] == []
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        result = runner.invoke(app, ["inspect", "--pid", str(other.pid)])
        assert result.exit_code == 1
        assert "no group" in result.output
    finally:
        other.kill()
        other.communicate()
    result = runner.invoke(app, ["inspect", "--pid", str(other.pid)])
    assert result.exit_code == 1
    assert str(other.pid) in result.output


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m[red]w\u202e\x9b\r\nrow"
AS_SHOWN = r"\x1b]0;owned\x07\x1b[2J\x1b[31m[red]w\u202e\x9b\x0d\nrow"


def rename_group(rank: Rank) -> None:
    """Do as any process may in its own memory: write a group's name with a terminal's escapes."""
    [link] = _region_links(os.getpid())
    with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as region:
        at = region.find(b"world\0")
        name = HOSTILE.encode()
        region[at : at + len(name)] = name


def test_a_group_that_closes_while_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_region_links", lambda _: [Path("/proc/self/fd/99999")])
    assert recorder.read_process(os.getpid()) == []


def test_what_another_process_wrote_is_shown_as_text(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(1)
    pool.run(rename_group)
    [pid] = pool.pids
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = runner.invoke(app, ["inspect", "--pid", str(pid)], env=terminal).output
    assert AS_SHOWN in re.sub("\x1b\\[[0-9;]*m", "", shown)  # less the table's own colours
    for sequence in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b", "\r"):
        assert sequence not in shown
    told = json.loads(runner.invoke(app, ["inspect", "--json", "-", "--pid", str(pid)]).stdout)
    assert told["ranks"][0]["group"] == AS_SHOWN


def metrics_of(text: str) -> dict[str, dict[str, float]]:
    """The samples of Prometheus's text, by name and rank; each name has its help and type first.

    A rank of a sample with a verb is such as "0 all_reduce".
    """
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if told := re.fullmatch(r"# (HELP|TYPE) (\w+) (.+)", line):
            assert told[2] not in found or told[1] == "TYPE"
            found.setdefault(told[2], {})
            continue
        labels = r'group="[^"\n]*",rank="(\d+)",pid="\d+"(?:,verb="(\w+)")?'
        sample = re.fullmatch(rf"(\w+)\{{{labels}\}} (\S+)", line)
        assert sample, line
        found[sample[1]][" ".join(filter(None, sample.group(2, 3)))] = float(sample[4])
    return found


def test_metrics_of_a_stuck_job(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3)
    pool.start(get_stuck)
    wait_until(lambda: are_stuck(look(*of(pool))), 30)
    found = metrics_of(runner.invoke(app, ["inspect", "--metrics", *of(pool)]).stdout)
    calls = found["fastcoll_calls_total"]
    assert [calls[f"{rank} all_reduce"] for rank in range(3)] == [70, 69, 70]
    assert [calls[f"{rank} broadcast"] for rank in range(3)] == [1, 1, 1]
    num_bytes = found["fastcoll_message_bytes_total"]
    assert (num_bytes["0 all_reduce"], num_bytes["1 broadcast"]) == (69 * 12 + 28, 200_000)
    waiting = found["fastcoll_waiting_seconds"]
    assert min(waiting["0"], waiting["2"]) > 0 == waiting["1"]
    assert set(found["fastcoll_broken"].values()) == set(found["fastcoll_stopped"].values()) == {0}


def test_metrics_without_a_rank_are_no_failure_of_the_collector() -> None:
    result = runner.invoke(app, ["inspect", "--metrics", "--pid", str(os.getpid())])
    assert result.exit_code == 0
    assert metrics_of(result.stdout).keys() >= {"fastcoll_calls_total"}


def test_a_process_that_is_not_there_is_told_in_words() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    result = runner.invoke(app, ["inspect", "--pid", str(gone.pid)])
    assert result.exit_code == 1
    assert f"there is no process {gone.pid}" in result.output
    assert "Errno" not in result.output


@pytest.mark.long
def test_watching_goes_on_until_it_is_interrupted(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(1)
    # A shell's background job ignores the signal, and so would all that it starts.
    command = [shutil.which("env") or "env", "--default-signal=INT", sys.executable, "-m"]
    command += ["fastcoll", "inspect", "--watch", "0.1", *of(pool)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        shown = ""
        while shown.count("fastcoll inspect") < 2:
            shown += one.stdout.readline()
        one.send_signal(signal.SIGINT)
        rest, complaint = one.communicate(timeout=30)
    assert one.returncode == 130
    assert "never called anything" in shown + rest
    assert "Traceback" not in complaint
