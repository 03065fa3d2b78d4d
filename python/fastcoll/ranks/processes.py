# SPDX-License-Identifier: Apache-2.0
"""The processes of the ranks of one program, from their start to their end.

Decides which failure was first, how the other ranks are told to end, and how long they may take.
Each rank has a session of its own, so that its children end with it. Knows no program.
"""

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Self

from torch.distributed import TCPStore

from fastcoll import env
from fastcoll.errors import DriverError
from fastcoll.native import _C
from fastcoll.ranks.output import Lines, Sink
from fastcoll.ranks.shares import Share, share_cpus
from fastcoll.text import open_standard_streams

# How long ranks that were told to end may take.
GRACE_S = 3.0
# How often it is looked whether a rank has ended, whose output may not say so.
_LOOK_S = 0.2
_READ_BYTES = 1 << 16
# Torch's store takes them. Without them its client tries for five minutes, or the process aborts.
_STORE_DESCRIPTORS = 12
_SHIM = str(Path(__file__).with_name("shim.py"))
_OF_OTHERS = ("CollectiveTimeout", "PeerLostError")  # errors that another rank causes
_SIGNALS = {one.value: one.name for one in signal.Signals}


@dataclass(frozen=True)
class Failure:
    """A rank that failed; `words` is the last line that it wrote to stderr."""

    rank: int
    code: int
    words: str = ""

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell has it: 128 and the signal of a rank that was killed."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self, world_size: int) -> str:
        """Return a sentence for the user."""
        text = f"rank {self.rank} of {world_size} "
        if self.code >= 0:
            text += f"ended with exit code {self.code}"
        else:
            text += f"was killed by {_SIGNALS.get(-self.code, f'signal {-self.code}')}"
        if self.code == -signal.SIGKILL:
            text += ", as by the kernel where memory runs out"
        return f"{text}: {self.words}" if self.words else text


@dataclass(frozen=True)
class Program:
    """A program to start as ranks."""

    command: Sequence[str]  # the command of every rank; its first word is a path
    world_size: int  # number of ranks
    # Where the lines of stdout and stderr go; None: the ranks write to this process's own.
    sinks: tuple[Sink, Sink] | None = None
    bind: bool = True  # whether each rank stays on its share of the CPUs
    # The content of a nameless file for the ranks. Its number ends their command; None: no file.
    work: bytes | None = None
    # Takes a rank and all that it wrote to a pipe; whether that tells no failure. The pipe's number
    # stands behind that of the work. A rank that wrote nothing has failed. None: no such pipe.
    on_reply: Callable[[int, bytes], bool] | None = None


@dataclass
class _Rank:
    """One rank's process, and its streams that are still open."""

    rank: int
    process: subprocess.Popen[bytes]
    words: Lines | None = None
    reply: "_Reply | None" = None
    streams: list[IO[bytes]] = field(default_factory=list)


class Ranks:
    """The ranks of a program. A context manager: none of them is left behind its `with`."""

    def __init__(self, program: Program) -> None:
        self.failures: list[Failure] = []  # the ranks that failed by themselves, in that order
        self._program = program
        self._alive: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._end_at = self._kill_at = float("inf")
        self._is_ending = self._is_mute = False
        self._raised: list[str] = []  # of ranks that went on all the same, as others failed
        self._store: TCPStore | None = None
        self._held = contextlib.ExitStack()  # the file of the work

    def __enter__(self) -> Self:
        try:
            open_standard_streams()
            work_fd = self._write_work()
            self._store, port = _serve_store()
            for rank, share in enumerate(share_cpus(self._program.world_size)):
                self._start(rank, share, port, work_fd)
        except OSError as error:
            self._close()
            raise self._refused(error) from error
        except BaseException:
            self._close()
            raise
        return self

    def _refused(self, error: OSError) -> DriverError:
        """Return the error of a rank that the system did not let start; it names the limit."""
        ranks = self._program.world_size
        is_full = error.errno == errno.EAGAIN  # fork knows more limits than one
        where = " (look at ulimit -u and at pids.max of the control group)" if is_full else ""
        why = f"{error}{where or _C.limit_behind(error.errno or 0)}"
        return DriverError(f"the {ranks} ranks can't be started: {why}; fewer ranks need less")

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        is_ctrl_c = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._is_mute = kind is not None and issubclass(kind, OSError)  # nobody reads our output
        try:
            self.end(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
            while self._alive:
                self._turn()
        finally:
            self._close()

    def wait(self, keep_going: bool = False, limit_s: float = float("inf")) -> bool:
        """Wait until all ranks have ended; a failure ends the others, unless `keep_going`.

        Returns:
            Whether they ended within the limit.
        """
        end = time.monotonic() + limit_s
        while self._alive:
            self._turn()
            now = time.monotonic()
            if (self.failures or now > self._end_at) and not keep_going:
                self.end(signal.SIGTERM)
            if now > end:
                return False
        return True

    def living(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return sorted(one.rank for one in self._alive)

    def end(self, signum: signal.Signals) -> None:
        """Tell the ranks that are left to end; those that don't follow are killed."""
        if not self._is_ending:
            self._is_ending = True
            for one in self._alive:
                if one.words and (raised := one.words.raised.decode(errors="replace").strip()):
                    self._raised.append(f"rank {one.rank}, which had not ended, raised {raised}")
            self._kill_at = time.monotonic() + GRACE_S
            self._signal(signum)

    def first_failure(self) -> Failure | None:
        """Return the failure that came first; of several at once one that no other rank caused."""
        first = min(self.failures, key=lambda one: "PeerLostError" in one.words, default=None)
        if first and any(name in first.words for name in _OF_OTHERS):
            return replace(first, words="; ".join((first.words, *self._raised)))
        return first

    def _write_work(self) -> tuple[int, ...]:
        """Return the descriptor of the file that has the work, if there is any."""
        if self._program.work is None:
            return ()
        file = self._held.enter_context(os.fdopen(os.memfd_create("fastcoll-launch"), "wb"))
        file.write(self._program.work)
        file.flush()
        return (file.fileno(),)

    def _start(self, rank: int, share: Share, port: int, work_fd: tuple[int, ...]) -> None:
        program = self._program
        cpus = ",".join(map(str, share.cpus)) if program.bind else ""
        command = [sys.executable, "-IS", _SHIM, str(os.getpid()), cpus or "-", *program.command]
        pipe: tuple[int, ...] = os.pipe() if program.on_reply is not None else ()
        command += map(str, (*work_fd, *pipe[1:]))
        output = None if program.sinks is None else subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                # A terminal's input can't be shared, nor read from another session.
                stdin=None if rank == 0 and not os.isatty(0) else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env.for_rank(rank, program.world_size, port, share.num_threads),
                pass_fds=[*work_fd, *pipe[1:]],
                start_new_session=True,
            )
        except BaseException:
            for end in pipe:
                os.close(end)
            raise
        one = _Rank(rank, process)
        self._alive.append(one)
        if program.on_reply is not None:
            reply_fd, write_fd = pipe
            os.close(write_fd)
            one.reply = _Reply(partial(self._take_reply, rank))
            self._read(one, os.fdopen(reply_fd, "rb"), one.reply)
        if program.sinks is not None:
            for stream, sink in zip((process.stdout, process.stderr), program.sinks, strict=True):
                assert stream is not None
                one.words = Lines(b"[%d] " % rank, partial(self._say, sink))
                self._read(one, stream, one.words)

    def _take_reply(self, rank: int, data: bytes) -> None:
        assert self._program.on_reply is not None
        if not self._program.on_reply(rank, data):  # a thread of its may keep it from ending
            self._end_at = min(self._end_at, time.monotonic() + GRACE_S)

    def _say(self, sink: Sink, text: bytes) -> None:
        if not self._is_mute:
            sink(text)

    def _read(self, one: _Rank, stream: IO[bytes], reader: "Lines | _Reply") -> None:
        os.set_blocking(stream.fileno(), False)
        one.streams.append(stream)
        self._selector.register(stream, selectors.EVENT_READ, reader)

    def _turn(self) -> None:
        """Pass on what the ranks have written, and look for some that have ended."""
        for key, _ in self._selector.select(_LOOK_S):
            self._take(key)
        over = [one for one in self._alive if _has_ended(one.process)]
        for one in over:
            self._finish(one)
        if time.monotonic() > self._kill_at:
            self._signal(signal.SIGKILL)

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Read a stream once; whether there may be more."""
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            key.data.feed(data)
            return True
        self._selector.unregister(key.fileobj)
        key.data.finish()
        return False

    def _finish(self, one: _Rank) -> None:
        """Take the last words of a rank that has ended, end its children and note its failure."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        for stream in one.streams:
            key = self._selector.get_map().get(stream)
            while key is not None and self._take(key):
                pass
            if stream in self._selector.get_map():  # a child in another session holds it
                self._selector.unregister(stream)
                if key is not None:
                    key.data.finish()
            stream.close()
        self._alive.remove(one)
        code = one.process.wait()
        if (code or (one.reply and not one.reply.parts)) and not self._is_ending:
            words = one.words.last.decode(errors="replace").strip() if one.words else ""
            self.failures.append(Failure(one.rank, code, words))

    def _signal(self, signum: signal.Signals) -> None:
        for one in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signum)

    def _close(self) -> None:
        """Kill the ranks that are left, and give back their streams and their store."""
        self._kill()
        self._selector.close()
        self._held.close()
        self._store = None  # not only with an error's traceback, which has this object

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for one in self._alive:
            one.process.wait()
            for stream in one.streams:
                stream.close()
        self._alive.clear()


class _Reply:
    """Collects what a rank writes to its pipe, up to the end."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self.parts: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self.parts.append(data)

    def finish(self) -> None:
        self._take(b"".join(self.parts))


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; its number stays taken until it is waited for."""
    seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return seen is not None


def _serve_store() -> tuple[TCPStore, int]:
    """Return the store in which the ranks meet, which this machine alone can reach; its port."""
    with contextlib.ExitStack() as spare:
        for _ in range(_STORE_DESCRIPTORS):
            spare.enter_context(Path(os.devnull).open())
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # closed by the store
    )
    return store, port
