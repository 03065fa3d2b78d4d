# SPDX-License-Identifier: Apache-2.0
"""`fastcoll.launch`: a function run by several ranks, from a notebook, a prompt or a test.

Decides how a function reaches its ranks, and how their results and errors come back. A
function that no other process could import, as a notebook's, is carried by value (cloudpickle).
"""

import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError, UsageError
from fastcoll.ranks.output import Sink
from fastcoll.ranks.processes import Program, Ranks

T = TypeVar("T")
_MOST_RANKS = 1024  # a number beyond it is a mistake
_SIZE = struct.Struct("=Q")


def launch(
    function: Callable[..., T], *args: Any, ranks: int = 2, timeout_s: float | None = None
) -> list[T]:
    """Run a function on new ranks of this machine, and return what each of them returned.

    Each rank is a process on its share of the CPUs. It imports what the function needs and calls
    `function(*args)`. There `fastcoll.init()`, or the first collective, makes the group of all
    ranks. Their output comes line by line, with the rank before it. No process is left behind.

    Args:
        function: Any function, also of a notebook, or a lambda. It is pickled with what it refers
            to, as are `args`. `functools.partial` gives it arguments by name.
        *args: Its positional arguments, the same on every rank.
        ranks: How many, 1 to 1024.
        timeout_s: Limit of the whole run, in seconds; None: none.

    Returns:
        The results, by rank. They are copies, tensors too: nothing is shared with the ranks.

    Raises:
        Exception: The first exception that a rank raised. A note names the rank and has its
            traceback. The other ranks are ended.
        PeerLostError: A rank ended before it returned; `ranks` names it.
        CollectiveTimeout: The limit passed; `ranks` are those that had not returned.
        DriverError: The system did not let a rank start, as for want of descriptors or processes.
        UsageError: The function or an argument can't be pickled. Or `ranks` or `timeout_s` is out
            of range.
    """
    if not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"launch: ranks={ranks!r} must be a whole number from 1 to {_MOST_RANKS}")
    if timeout_s is not None and not timeout_s > 0:  # NaN, too
        raise UsageError(f"launch: timeout_s={timeout_s!r} must be a positive number of seconds")
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def take(rank: int, data: bytes) -> None:
        if (reply := _whole(data)) is not None:
            error, value = pickle.loads(reply)
            if error is None:
                results[rank] = value
            else:
                errors.append(_named(error, rank, ranks, trace=value))

    with _work_file(function, args) as fd:
        command = (sys.executable, "-m", "fastcoll.ranks.function_rank", str(fd))
        program = Program(command, ranks, _sinks(), passed_fds=(fd,), on_reply=take)
        with Ranks(program) as started:
            in_time = started.wait(limit_s=float("inf") if timeout_s is None else timeout_s)
    if errors:
        raise errors[0]
    if failure := started.first_failure():
        text = f"launch: {failure.describe(ranks)}; it had not returned"
        raise PeerLostError(text, [failure.rank])
    if not in_time:
        missing = [rank for rank in range(ranks) if rank not in results]
        late = f"launch: ranks {missing} of {ranks} had not returned after {timeout_s:g} s"
        raise CollectiveTimeout(f"{late}, and were ended", missing)
    return [results[rank] for rank in range(ranks)]


@contextlib.contextmanager
def _work_file(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[int]:
    """Yield a file without a name that holds the work, for the ranks to inherit."""
    import cloudpickle

    try:
        work = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(f"launch: the function and its arguments must pickle: {error}") from error
    fd = os.memfd_create("fastcoll-launch")
    with os.fdopen(fd, "wb") as file:
        pickle.dump((sys.path, str(Path.cwd()), work), file)
        file.flush()
        yield fd


def _sinks() -> tuple[Sink, Sink]:
    """Return writers to stdout and stderr as they are now: a notebook's cell, a test's capture."""

    def to(name: str) -> Sink:
        def write(text: bytes) -> None:
            stream = getattr(sys, name)
            stream.write(text.decode(errors="replace"))
            stream.flush()

        return write

    return to("stdout"), to("stderr")


def _named(error: BaseException, rank: int, world_size: int, trace: str) -> BaseException:
    error.add_note(f"on rank {rank} of {world_size}, started by fastcoll.launch:\n{trace}")
    return error


def send_reply(pipe: BinaryIO, reply: bytes) -> None:
    """Write a rank's reply, with its size before it."""
    pipe.write(_SIZE.pack(len(reply)))
    pipe.write(reply)


def _whole(data: bytes) -> memoryview | None:
    """Return the reply that a rank sent; None if the rank ended before it had sent all of it."""
    reply = memoryview(data)[_SIZE.size :]
    is_whole = len(data) >= _SIZE.size and len(reply) == _SIZE.unpack_from(data)[0]
    return reply if is_whole else None


def pack_error(error: BaseException, trace: str) -> bytes:
    """Return a rank's error as bytes; one that doesn't pickle becomes a FastcollError."""
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps((error, trace))
        if str(pickle.loads(packed)[0]) == str(error):
            return packed
    except Exception:  # whatever its class does in there
        pass
    return pickle.dumps((FastcollError(f"{type(error).__name__}: {error}"), trace))
