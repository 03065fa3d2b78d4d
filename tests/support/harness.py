# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests: processes that stay alive and run functions the tests send them.

Decides how ranks are started, given work, watched against a deadline and ended. Every process is a
child of this session, is ended by its own handle and is reaped. Must know nothing of the functions,
and imports the library in the ranks only.

A function for the ranks is module-level and takes a `Rank` first. `Pool.run` wants every rank to
return; `Pool.outcomes` is for tests in which ranks raise or die.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

DEADLINE_S = 60.0
# Inside the deadline: a rank that waits for ever is the library's to report first.
TIMEOUT_S = 20.0
# The delay that a loaded machine may have in an immediate step. It is below the timeout that a
# wait would take otherwise.
LATE_S = 10.0
# The end of each error that ends a group.
OVER = ". Use of this group is over: call fastcoll.shrink() or fastcoll.destroy()"
# Ranks are forked from a process that has imported these and has no thread; 0.05 s instead of the
# 2 s of a fresh interpreter. Behind fastcoll stands what most ranks import soon.
PRELOAD = ["torch", "numpy", "torch.distributed", "pytest", "tests.support.harness", "fastcoll"]
PRELOAD += ["fastcoll.nodes.group", "numpy.random", "tests.support.perform", "tests.support.faults"]

_context = multiprocessing.get_context("forkserver")
_pool_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the ranks of a pool come up.

    Attributes:
        init: Call fastcoll.init; otherwise `Rank.comm` is None.
        timeout_s: The argument of init; None leaves it to the environment.
        env: Variables to set in the ranks, before the library is used.
        nodes: The name of each rank's node, by rank; none: the one that the library finds.
        prepare: Called on each rank first, with its number.
    """

    init: bool = True
    timeout_s: float | None = TIMEOUT_S
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nodes: Sequence[str] = ()
    prepare: Callable[[int], None] | None = None


@dataclasses.dataclass
class Rank:
    """The rank that a function runs on."""

    rank: int
    world_size: int
    store: Any = None
    comm: Any = None

    def tell(self, event: str) -> None:
        """Tell all ranks, and the test, that an event has happened."""
        self.store.set(event, "")

    def wait_for(self, event: str) -> None:
        """Wait until the event was told."""
        self.store.wait([event], datetime.timedelta(seconds=DEADLINE_S))

    def hasty_group(self, limit_s: float) -> Any:
        """Make a group of all ranks with a short timeout; init itself may take longer."""
        group = self.comm.new_group(timeout_s=TIMEOUT_S)
        group.set_timeout(limit_s)
        self.comm.barrier()  # no rank is late in its first call
        return group


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one rank's part: a value, an error, or the exit of the process."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None

    def describe(self) -> str:
        if self.exit_code is not None:
            return f"rank {self.rank} ended with exit code {self.exit_code}\n{self.trace}"
        return f"rank {self.rank}: {self.trace or f'returned {self.value!r}'}"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of a call that may fail: the error's class, text and `ranks`, and its time."""

    kind: str
    text: str
    seconds: float
    ranks: tuple[int, ...] = ()


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Attempt:
    """Call something on a rank; an error is reported, not raised. `kind` is "" without one."""
    start = time.monotonic()
    try:
        function(*args, **options)
    except BaseException as error:
        took_s = time.monotonic() - start
        ranks = tuple(getattr(error, "ranks", ()))
        return Attempt(type(error).__name__, str(error), took_s, ranks)
    return Attempt("", "", time.monotonic() - start)


class RankFailure(AssertionError):
    """A rank failed, crashed or hung; the text says which, and where it was."""


class RemoteError(Exception):
    """An error that could not be sent as it is; the text has its type and message."""


@functools.cache
def _store_server() -> Any:
    """Start the session's store; it outlives every rank, so no rank's death takes it along."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _sendable(error: BaseException) -> BaseException:
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:
        pass
    return RemoteError(f"{type(error).__name__}: {error}")


def _be_there(me: Rank) -> None:
    pass


def make_group(me: Rank, timeout_s: float | None = TIMEOUT_S) -> None:
    import fastcoll

    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    me.comm = fastcoll.init(store=me.store, rank=me.rank, world_size=me.world_size, **limit)


def be_patient() -> None:
    """Wait longer for the store of a loaded machine, in tests that cut no link to it."""
    from fastcoll.nodes.verdict.board import Board

    Board.ANSWER_S = LATE_S


def rank_main(conn: Any, me: Rank, log: str, store: tuple[str, int, str], setup: Setup) -> None:
    """Run the pool's functions until it sends no more."""
    # All output of a rank goes to its log, which is shown when the rank fails.
    with open(log, "a") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(setup.env)
    if setup.prepare is not None:
        setup.prepare(me.rank)
    if setup.nodes:
        os.environ["FASTCOLL_NODE_ID"] = setup.nodes[me.rank]
        be_patient()
    import torch
    import torch.distributed as dist

    gc.freeze()  # else each garbage collection looks through all of torch
    torch.set_num_threads(1)
    address, port, prefix = store
    me.store = dist.PrefixStore(prefix, dist.TCPStore(address, port, is_master=False))

    function, args = _be_there, ()
    while function is not None:
        try:
            outcome = Outcome(me.rank, function(me, *args))
        except BaseException as error:
            outcome = Outcome(me.rank, error=_sendable(error), trace=traceback.format_exc())
        conn.send(outcome)
        try:
            function, *args = conn.recv()
        except (EOFError, KeyboardInterrupt):
            return


class Pool:
    """One group of rank processes; usable until something goes wrong or it is closed."""

    def __init__(self, world_size: int, setup: Setup | None = None) -> None:
        import torch.distributed as dist

        setup = setup or Setup()
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="fastcoll-tests-")
        self._logs = [Path(self._directory.name, f"rank{rank}.log") for rank in range(world_size)]
        server = self.store_server()
        store = (server.host, server.port, f"pool{next(_pool_numbers)}")
        self._store = dist.PrefixStore(store[2], server)
        self._conns: list[Any] = []
        self.processes: list[Any] = []
        self.is_open = True
        self.start_ranks(
            [
                (Rank(rank, world_size), str(log), store, setup)
                for rank, log in enumerate(self._logs)
            ]
        )
        # All are there before one waits for another: a process may be late by more than its limit.
        self.finish()
        if setup.init:
            self.run(make_group, setup.timeout_s)

    def store_server(self) -> Any:
        """Return the store that the ranks meet at."""
        return _store_server()

    def start_ranks(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Start a process and a connection for each rank; `rank_main` is given both."""
        _context.set_forkserver_preload(PRELOAD)
        for rank_arguments in arguments:
            ours, theirs = _context.Pipe()
            # Not daemonic: a rank may have children of its own.
            process = _context.Process(target=rank_main, args=(theirs, *rank_arguments))
            process.start()
            theirs.close()
            self._conns.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def tell(self, event: str) -> None:
        """See `Rank.tell`."""
        self._store.set(event, "")

    def wait_for(self, event: str) -> None:
        """See `Rank.wait_for`."""
        self._store.wait([event], datetime.timedelta(seconds=DEADLINE_S))

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Send the ranks work; `finish` or `outcomes` collects the results."""
        for conn in self._conns:
            # A rank that died meanwhile is reported when the outcomes are collected.
            with contextlib.suppress(BrokenPipeError):
                conn.send((function, *args))

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> Any:
        """Run on every rank and return the values in rank order; any failure ends the pool."""
        self.start(function, *args)
        return self.finish(deadline_s)

    def finish(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Collect the results of `start`; any failure ends the pool."""
        outcomes = self.collect(deadline_s)
        failed = [outcome.describe() for outcome in outcomes if not outcome.ok]
        if failed:
            self.close()
            raise RankFailure("\n".join([f"{len(failed)} ranks failed", *failed[:4]]))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """Run on every rank and return the outcome of each, for tests of failures."""
        self.start(function, *args)
        return self.collect(deadline_s)

    def collect(
        self, deadline_s: float = DEADLINE_S, ranks: Collection[int] | None = None
    ) -> list[Outcome]:
        """Wait for the outcomes of some ranks (default: all); a hang ends the pool."""
        try:
            return self._collect(deadline_s, ranks)
        except BaseException:
            # Left open, it would answer the next test with the results of this one.
            self.close(grace_s=0.2)
            raise

    def _collect(self, deadline_s: float, ranks: Collection[int] | None) -> list[Outcome]:
        missing = set(range(self.world_size)) if ranks is None else set(ranks)
        found: dict[int, Outcome] = {}
        end = time.monotonic() + deadline_s
        while missing:
            conns = {self._conns[rank]: rank for rank in missing}
            ready = multiprocessing.connection.wait(list(conns), max(0.0, end - time.monotonic()))
            if not ready:
                self._hang(sorted(missing), found, deadline_s)
            for conn in ready:
                rank = conns[conn]
                found[rank] = self._receive(rank)
                missing.discard(rank)
        return [found[rank] for rank in sorted(found)]

    def _receive(self, rank: int) -> Outcome:
        try:
            return self._conns[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(10)
            log = self._logs[rank].read_text(errors="replace")[-4000:]
            return Outcome(rank, exit_code=process.exitcode, trace=log)

    def _hang(self, missing: Sequence[int], found: dict[int, Outcome], deadline_s: float) -> None:
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGCONT)
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [
            f"rank {rank} hangs at\n{self._logs[rank].read_text()[-4000:]}" for rank in missing
        ]
        rest = [found[rank].describe() for rank in sorted(found)]
        raise RankFailure("\n".join([f"no answer after {deadline_s:g} s", *stacks, *rest]))

    def close(self, grace_s: float = 5.0) -> None:
        """End the ranks: ask, after a while kill; always reap."""
        if not self.is_open:
            return
        self.is_open = False
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send((None,))
            conn.close()
        end = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.join(10)
        self._directory.cleanup()


class Pools:
    """Pools by their setup, started on demand and again when broken.

    An idle rank keeps the memory of its largest call, up to 0.6 GB. So all Pools of this process
    together keep MAX_IDLE_RANKS: the pool that was used longest ago is closed first.
    """

    MAX_IDLE_RANKS = 24
    _by_use: ClassVar[list[Pool]] = []

    def __init__(self, start: Callable[[Any], Pool] = Pool) -> None:
        self._start = start
        self._pools: dict[Any, Pool] = {}

    def __call__(self, kind: Any) -> Pool:
        if kind not in self._pools or not self._pools[kind].is_open:
            self._pools[kind] = self._start(kind)
        self._close_others(self._pools[kind])
        return self._pools[kind]

    def _close_others(self, used: Pool) -> None:
        idle = [pool for pool in self._by_use if pool.is_open and pool is not used]
        while sum(pool.world_size for pool in idle) > self.MAX_IDLE_RANKS:
            idle.pop(0).close()
        self._by_use[:] = [*idle, used]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
