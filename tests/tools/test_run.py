# SPDX-License-Identifier: Apache-2.0
"""`fastcoll run`: output, failures and ends of the ranks of a program; nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fastcoll.cli import app
from fastcoll.machine import cpu
from fastcoll.ranks import shares
from fastcoll.ranks.output import Lines
from fastcoll.ranks.processes import Failure, Program, Ranks
from fastcoll.ranks.shares import Share, share_cpus
from fastcoll_model.builders.sockets import runs_of
from tests.support.harness import LATE_S
from tests.support.waiting import wait_until

runner = CliRunner()
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a program's text by `fastcoll run`; it has the imports, and its rank."""

    def start(text: str, *options: str, arguments: tuple[str, ...] = ()) -> Result:
        return runner.invoke(app, ["run", *options, program(tmp_path, text), *arguments])

    return start


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    head = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
    path.write_text(head + textwrap.dedent(text))
    return str(path)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_rank_has_its_place_and_the_programs_arguments(run: Run) -> None:
    text = """
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    print(sys.argv[1:], *(os.environ[name] for name in names))
    print("an end", file=sys.stderr, end="")
    """
    result = run(text, "-n", "3", arguments=("--ranks", "9", "-h"))
    assert result.exit_code == 0, result.output
    arguments = "['--ranks', '9', '-h']"
    expected = [f"[{rank}] {arguments} 3 {rank} 127.0.0.1 1" for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == expected
    assert sorted(result.stderr.splitlines()) == [f"[{rank}] an end" for rank in range(3)]


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-"])
def test_closed_streams_do_no_harm(tmp_path: Path, streams: str) -> None:
    text = f"print(1); print(2, file=sys.stderr); open('{tmp_path}/' + str(rank), 'w')"
    path = program(tmp_path, text)
    command = [sys.executable, "-m", "fastcoll", "run", path]
    done = subprocess.run(["sh", "-c", f'exec "$@" {streams}', "-", *command], check=False)
    assert done.returncode == 0
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_a_setting_of_the_user_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    result = run("print(os.environ['OMP_NUM_THREADS'])", "-n", "1")
    assert result.stdout == "[0] 5\n"


def test_a_module_runs_as_python_m_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "print(__name__, __spec__.name)")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["run", "-n", "1", "-m", "program"])
    assert result.stdout == "[0] __main__ program\n"


def test_the_first_failure_ends_the_others(run: Run) -> None:
    text = """
    if rank == 1:
        sys.exit("no data here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("was told to end"))
    print("waits")
    time.sleep(600)
    """
    start = time.monotonic()
    result = run(text, "-n", "3")
    assert time.monotonic() - start < LATE_S
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error: rank 1 of 3 ended with exit code 1: no data here"
    )


def test_of_failures_at_once_the_first_is_none_that_another_rank_caused() -> None:
    ranks = Ranks(Program((), 2))
    assert ranks.first_failure() is None
    ranks.failures = [Failure(0, 1, "fastcoll.errors.PeerLostError: ..."), Failure(1, 1, "no data")]
    assert ranks.first_failure() == ranks.failures[1]


def test_a_rank_that_raised_and_goes_on_is_named_with_the_peer_that_missed_it(run: Run) -> None:
    text = """
    import threading
    if rank == 1:
        threading.Thread(target=time.sleep, args=(600,)).start()
        print(os.getpid(), flush=True)
        raise ValueError("no data here")
    sys.stderr.write("fastcoll.errors.CollectiveTimeout: waited for rank 1")
    time.sleep(1)
    sys.exit(1)
    """
    result = run(text)
    assert result.exit_code == 1
    last = " ".join(result.stderr.split("error: ")[-1].split())
    assert last == (
        "rank 0 of 2 ended with exit code 1: fastcoll.errors.CollectiveTimeout: waited for rank 1; "
        "rank 1, which had not ended, raised ValueError: no data here"
    )


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_rank_that_a_signal_killed_is_named(run: Run, name: str) -> None:
    result = run(f"os.kill(os.getpid(), signal.{name}) if rank else time.sleep(600)")
    assert result.exit_code == 128 + getattr(signal, name)
    assert f"rank 1 of 2 was killed by {name}" in result.stderr


def test_ranks_that_do_not_listen_end_with_their_children(run: Run) -> None:
    text = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid)
    if rank == 1:
        os._exit(2)
    while True:
        time.sleep(1)
    """
    start = time.monotonic()
    result = run(text)
    assert time.monotonic() - start < LATE_S
    assert result.exit_code == 2
    pids = [int(word) for word in re.sub(r"\[\d\]", "", result.stdout).split()]
    assert len(pids) == 4 or "[1]" in result.stdout
    wait_until(lambda: not any(map(is_alive, pids)))


def test_others_go_on_where_they_may(run: Run) -> None:
    result = run("sys.exit(4) if rank else time.sleep(1)\nprint('done')", "--keep-going")
    assert (result.exit_code, result.stdout) == (4, "[0] done\n")


def test_a_program_that_is_not_there_is_told_before_any_rank_starts() -> None:
    result = runner.invoke(app, ["run", "no_such.py"])
    assert result.exit_code == 2
    assert "no file no_such.py" in result.output


@contextmanager
def running(folder: Path, text: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], list]]:
    """Run a program whose ranks print their process; yield the launcher and these."""
    command = [sys.executable, "-m", "fastcoll", "run", *options, program(folder, text)]
    # In the background of a shell the tests ignore Ctrl-C, and the launcher would, too.
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear
    ) as one:
        assert one.stdout is not None
        pids = [int(one.stdout.readline().split()[1]) for _ in range(2)]
        try:
            yield one, pids
        finally:
            one.kill()


SLEEPS = """
try:
    print(os.getpid(), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.long
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_ranks(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    with running(tmp_path, SLEEPS) as (launcher, pids):
        launcher.send_signal(signum)
        output, _ = launcher.communicate(timeout=LATE_S)
        assert launcher.returncode == code, output
        assert output.count("interrupted") == (2 if signum == signal.SIGINT else 0)
        assert "Traceback" not in output
        assert not any(map(is_alive, pids))


@pytest.mark.long
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, "print(os.getpid())\ntime.sleep(600)") as (launcher, pids):
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.long
def test_ranks_find_each_other_and_torchs_own_groups_too(run: Run) -> None:
    text = """
    import torch, torch.distributed as dist, fastcoll
    t = torch.ones(3)
    fastcoll.all_reduce(t)
    fastcoll.destroy()
    dist.init_process_group("gloo")
    dist.all_reduce(t)
    print(t.tolist())
    dist.destroy_process_group()
    """
    result = run(text)
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] [4.0, 4.0, 4.0]" for rank in (0, 1)]


def test_lines_are_whole_whatever_comes_at_once() -> None:
    said: list[bytes] = []
    lines = Lines(b"[0] ", said.append)
    for data in (b"a", b"b\nc\r", b"\n", b"10%\r20%", b"\r", b"30%\n\n", b"end"):
        lines.feed(data)
    lines.finish()
    assert b"".join(said) == b"[0] ab\n[0] c\r\n[0] 10%\r[0] 20%\r[0] 30%\n[0] \n[0] end\n"
    assert lines.last == b"end\n"
    lines.feed(b"x" * 100_000)
    assert said[-1] == b"[0] " + b"x" * 100_000 + b"\n"


@pytest.mark.parametrize(
    ("cores", "quota", "num_ranks", "expected"),
    [
        # Two threads a core: whole cores, of which there is a thread for each.
        ([(0, 4), (1, 5), (2, 6), (3, 7)], 8, 2, [Share((0, 1, 4, 5), 2), Share((2, 3, 6, 7), 2)]),
        ([(0, 2), (1, 3)], 4, 4, [Share((cpu,), 1) for cpu in (0, 2, 1, 3)]),
        ([(0,), (1,), (2,)], 3, 2, [Share((0,), 1), Share((1, 2), 2)]),
        ([(0,), (1,)], 2, 3, [Share((), 1)] * 3),
        # A container that may keep two of eight busy.
        ([(cpu,) for cpu in range(8)], 2, 2, [Share((0, 1, 2, 3), 1), Share((4, 5, 6, 7), 1)]),
        ([(cpu,) for cpu in range(8)], 2, 4, [Share((), 1)] * 4),
    ],
)
def test_cores_are_shared_out(
    cores: list[tuple[int, ...]],
    quota: int,
    num_ranks: int,
    expected: list[Share],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "affinity", lambda: {cpu for core in cores for cpu in core})
    monkeypatch.setattr(shares, "cores", lambda cpus: cores)
    monkeypatch.setattr(shares, "cpu_quota", lambda: quota)
    assert share_cpus(num_ranks) == expected


@pytest.mark.parametrize("numbering", [{0: "0-3", 1: "4-7"}, {0: "0,2,4,6", 1: "1,3,5,7"}])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_neighbouring_ranks_share_a_socket(
    numbering: dict[int, str], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the kernel numbers CPUs: the chain of sockets (docs/sockets.md) needs long runs."""
    monkeypatch.setattr(shares, "affinity", lambda: set(range(8)))
    monkeypatch.setattr(shares, "cpu_quota", lambda: 8)
    monkeypatch.setattr(cpu, "numa_nodes", lambda: numbering)
    monkeypatch.setattr(cpu, "read_text", lambda path: "")  # a thread a core
    first = set(cpu._cpus_in(numbering[0]))
    sockets = [{int(c not in first) for c in share.cpus} for share in share_cpus(num_ranks)]
    assert all(len(nodes) == 1 for nodes in sockets)
    assert runs_of([nodes.pop() for nodes in sockets]) == [
        range(num_ranks // 2),
        range(num_ranks // 2, num_ranks),
    ]


def test_ranks_stay_on_their_share(run: Run) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one CPU for two ranks")
    text = "print(sorted(os.sched_getaffinity(0)))"
    bound, free = run(text).stdout, run(text, "--no-bind").stdout
    found = [set(eval(line[4:])) for line in bound.splitlines()]
    assert not found[0] & found[1]
    assert {line[4:] for line in free.splitlines()} == {str(sorted(os.sched_getaffinity(0)))}


# The second word is the limit; more ranks are asked for than it lets start.
REFUSED = """
import errno, os, resource, sys
import fastcoll
from fastcoll.cli import main
from fastcoll.ranks.processes import subprocess

how, what = sys.argv[1:3]
if what == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
elif what == "a store's descriptors":
    number = os.dup(0)  # the next one that is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (number + 7, number + 7))
else:
    def refuse(*arguments, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    subprocess.Popen = refuse
if how == "run":
    sys.argv = ["fastcoll", "run", "-n", "24", "-m", "this"]
    main()
try:
    fastcoll.launch(os.getpid, ranks=24)
except fastcoll.DriverError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.parametrize("how", ["run", "launch"])
@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("descriptors", "raise it with ulimit -n"),
        ("a store's descriptors", "raise it with ulimit -n"),
        ("processes", "look at ulimit -u"),
    ],
)
def test_who_may_not_start_so_many_ranks_is_told_the_limit(how: str, what: str, hint: str) -> None:
    command = [sys.executable, "-c", REFUSED, how, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2), done.stderr
    said = " ".join(done.stderr.split())
    assert "error: the 24 ranks can't be started" in said and hint in said, said
    assert "Traceback" not in done.stderr, done.stderr
