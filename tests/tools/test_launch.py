# SPDX-License-Identifier: Apache-2.0
"""`fastcoll.launch`: a function on several ranks, its results, and the first failure."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from tests.support.harness import LATE_S


def add_up(value: float) -> tuple[int, torch.Tensor]:
    group = fastcoll.init()
    tensor = torch.full((3,), value + group.rank)
    fastcoll.all_reduce(tensor)
    print("summed")
    return group.rank, tensor


def test_every_ranks_result_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    results = fastcoll.launch(add_up, 1.0, ranks=3)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(tensor.tolist() == [6.0] * 3 for _, tensor in results)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}] summed" for rank in range(3)]


def fail_on(bad: int, what: str) -> int:
    rank = int(os.environ["RANK"])
    if rank != bad:
        fastcoll.barrier()
    elif what == "raises":
        raise ValueError("no data here")
    elif what == "cannot be pickled":
        raise type("Odd", (Exception,), {"__reduce__": lambda self: self.args[1]})("odd", 1)
    elif what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exits":
        sys.exit(0)
    return rank


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("raises", ValueError, "no data here"),
        ("cannot be pickled", fastcoll.FastcollError, "odd"),
        ("is killed", fastcoll.PeerLostError, "rank 1 of 2 was killed by SIGKILL"),
        ("exits", fastcoll.PeerLostError, "rank 1 of 2 ended with exit code 0"),
    ],
)
def test_the_first_failure_is_raised_with_its_rank(what: str, kind: type, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        fastcoll.launch(fail_on, 1, what)
    assert time.monotonic() - start < 3 * LATE_S  # torch is imported on each rank
    if what in ("raises", "cannot be pickled"):
        [note] = caught.value.__notes__
        assert note.startswith("on rank 1 of 2, started by fastcoll.launch:\nTraceback")
        assert "in fail_on" in note
    else:
        assert caught.value.ranks == (1,)


def test_ranks_that_do_not_return_are_named_at_the_limit() -> None:
    with pytest.raises(fastcoll.CollectiveTimeout, match="had not returned after 1 s") as caught:
        fastcoll.launch(time.sleep, 600, timeout_s=1)
    assert caught.value.ranks == (0, 1)


def leave_a_thread(bad: int | None) -> None:
    """Return, or raise, with a thread that keeps the process."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    if bad == int(os.environ["RANK"]):
        raise ValueError("no data here")


@pytest.mark.long
def test_ranks_that_returned_and_go_on_are_named_at_the_limit() -> None:
    text = r"ranks \[0, 1\] of 2 had returned, but .* as for a thread that is no daemon"
    with pytest.raises(fastcoll.CollectiveTimeout, match=text) as caught:
        fastcoll.launch(leave_a_thread, None, timeout_s=LATE_S)
    assert caught.value.ranks == (0, 1)


@pytest.mark.long
def test_a_rank_that_raised_and_goes_on_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="no data here"):
        fastcoll.launch(leave_a_thread, 1, timeout_s=6 * LATE_S)
    assert time.monotonic() - start < 3 * LATE_S


def lose_a_peer(began: str) -> None:
    """Rank 0 raises what rank 1 causes before that one raises: it had closed its group."""
    if os.environ["RANK"] == "0":
        threading.Thread(target=time.sleep, args=(2.5,)).start()
        Path(began).touch()
        raise fastcoll.PeerLostError("rank 1 left", [1])
    while not Path(began).exists():
        time.sleep(0.01)
    time.sleep(0.1)
    raise ValueError("no data here")


def test_an_error_that_no_other_rank_caused_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data here"):
        fastcoll.launch(lose_a_peer, str(tmp_path / "began"))


class Unreadable:
    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_a_result_that_cannot_be_read_again_is_told_with_its_rank() -> None:
    with pytest.raises(fastcoll.UsageError, match=r"rank 0 of 1 returned .* invalid literal"):
        fastcoll.launch(Unreadable, ranks=1)


def end_in_a_reply(is_killed: bool, began: str) -> None:
    """Rank 1 ends when it has sent a part of its reply: it is killed, or as rank 0 raises."""
    if os.environ["RANK"] == "1":
        os.write(int(sys.argv[-1]), pickle.dumps((None, bytes(1 << 10)))[: 1 << 9])
        Path(began).touch()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
    elif not is_killed:
        while not Path(began).exists():
            time.sleep(0.01)
        raise ValueError("no data here")
    time.sleep(600)


@pytest.mark.parametrize(
    ("is_killed", "kind", "text"),
    [(True, fastcoll.PeerLostError, "was killed by SIGKILL"), (False, ValueError, "no data here")],
)
def test_a_reply_that_breaks_off_is_none(
    tmp_path: Path, is_killed: bool, kind: type, text: str
) -> None:
    with pytest.raises(kind, match=text):
        fastcoll.launch(end_in_a_reply, is_killed, str(tmp_path / "began"))


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_launch_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a rank raises, nor where the kernel refuses to start one."""
    fastcoll.launch(int, ranks=1)  # torch's store keeps a pipe from the first time on
    start = subprocess.Popen
    starts = iter([start, start, None, start, None])  # None: refused

    def popen(*args: Any, **options: Any) -> Any:
        if (begin := next(starts)) is None:
            raise BlockingIOError("no process for a rank")
        return begin(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    before, kept = open_fds(), []
    for kind in (ValueError, fastcoll.DriverError, fastcoll.DriverError):
        with pytest.raises(kind) as caught:
            fastcoll.launch(int, "no number")
        kept.append(caught)  # an error's traceback holds all that the launch had
        assert open_fds() == before, kind


@pytest.mark.parametrize("ranks", [0, 1025, "2", 2.0, True])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: Any) -> None:
    with pytest.raises(fastcoll.UsageError, match="1 to 1024"):
        fastcoll.launch(time.sleep, 0, ranks=ranks)


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), "x", True, timedelta(-1)])
def test_a_limit_that_is_none_is_refused(limit_s: Any) -> None:
    with pytest.raises(fastcoll.UsageError, match="a positive number of seconds"):
        fastcoll.launch(time.sleep, 0, timeout_s=limit_s)


def test_what_cannot_be_called_is_refused() -> None:
    function: Any = 3
    with pytest.raises(fastcoll.UsageError, match="3 can't be called; pass a function"):
        fastcoll.launch(function)


def test_numbers_of_other_kinds_are_taken() -> None:
    ranks: Any = np.int64(1)
    assert fastcoll.launch(int, "7", ranks=ranks, timeout_s=timedelta.max) == [7]


def test_an_argument_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(fastcoll.UsageError, match="pickle"):
        fastcoll.launch(print, sys.stdout)


NOTEBOOK = """
import fastcoll, torch
factor = 10
def work(x, plus):
    t = torch.ones(1) * x
    fastcoll.all_reduce(t)
    return t.item() * factor + plus
from functools import partial
print(fastcoll.launch(partial(work, plus=1), 2))
"""


@pytest.mark.long
def test_a_function_that_no_file_holds_is_sent_by_value(tmp_path: Path) -> None:
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=NOTEBOOK, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout == "[41.0, 41.0]\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_keywords_come_by_partial() -> None:
    assert fastcoll.launch(partial(int, base=16), "ff", ranks=1) == [255]


# A program that launches ranks. It may have no stdout, so its exit code tells how it went.
ODD = """
import os, sys
{before}
import fastcoll

def place():
    sys.stdout.buffer.write(b"\\xc3\\xa9\\n")
    return __debug__, fastcoll.__file__

if __name__ == "__main__":
    {here}
    same = fastcoll.launch(place, timeout_s=60) == [(__debug__, fastcoll.__file__)] * 2
    os._exit(7 if same else 5)
"""
GONE = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"


def start_odd(tmp_path: Path, *flags: str, **texts: str) -> subprocess.Popen[str]:
    """Start a program that launches ranks, by other means than this process's."""
    path = tmp_path / "odd.py"
    path.write_text(ODD.format(**{"before": "", "here": "pass"} | texts))
    command = ["sh", "-c", f'exec "$@" {texts.get("streams", "")}', "-", sys.executable, *flags]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    environment["PYTHONPATH"] = texts.get("path", SOURCES)
    return subprocess.Popen(
        [*command, str(path)], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )


SOURCES = str(Path(fastcoll.__file__).parents[1])


@pytest.mark.long
@pytest.mark.parametrize("streams", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(tmp_path: Path, streams: str) -> None:
    with start_odd(tmp_path, streams=streams) as started:
        _, said = started.communicate()
    assert started.returncode == 7, said


@pytest.mark.long
def test_ranks_have_their_parents_flags_and_path(tmp_path: Path) -> None:
    """No character of the output is left out, either: stdout takes ASCII alone."""
    before = f"sys.path.insert(0, {SOURCES!r})"
    other = tmp_path / "other" / "fastcoll"  # the environment's, which the program overrides
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('another fastcoll')")
    with start_odd(tmp_path, "-O", before=before, path=str(other.parent)) as started:
        _, said = started.communicate()
    assert started.returncode == 7, said


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    with start_odd(tmp_path, here=GONE) as started:
        _, said = started.communicate()
    assert "UsageError: launch: this process's working directory was removed" in said
