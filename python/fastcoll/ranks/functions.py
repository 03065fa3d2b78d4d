# SPDX-License-Identifier: Apache-2.0
"""`fastcoll.launch`: a function run by several ranks, from a notebook, a prompt or a test.

Decides how a function reaches its ranks, and how their results and errors come back. A
function that no other process could import, as a notebook's, is carried by value (cloudpickle).
"""

import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError, UsageError
from fastcoll.ranks.output import Sink
from fastcoll.ranks.processes import Program, Ranks
from fastcoll.text import error_in_words

T = TypeVar("T")
_MOST_RANKS = 1024  # a number beyond it is a mistake
_MOST_S = 1e9  # a longer limit is this one
_SIZE = struct.Struct("=Q")


def launch(
    function: Callable[..., T],
    *args: Any,
    ranks: int = 2,
    timeout_s: float | timedelta | None = None,
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
        CollectiveTimeout: The limit passed; `ranks` are those that had not returned. If all had,
            they are those whose processes went on, as for a thread that is no daemon.
        DriverError: The system did not let a rank start, as for want of descriptors or processes.
        UsageError: The function, an argument or a result can't be pickled and read again. Or an
            argument of `launch` itself is none that it takes.
    """
    limit_s = _checked(function, ranks, timeout_s)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def take(rank: int, data: bytes) -> bool:
        if (reply := _whole(data)) is None:
            return True
        error, value = _read(reply, rank, ranks)
        if error is None:
            results[rank] = value
            return True
        errors.append(error)
        return False

    program = Program(_command(), ranks, _sinks(), work=_pack_work(function, args), on_reply=take)
    with Ranks(program) as started:
        in_time = started.wait(limit_s=limit_s)
        living = started.living()
    if errors:  # of several at once one that no other rank caused
        raise min(errors, key=lambda one: isinstance(one, PeerLostError))
    if failure := started.first_failure():
        text = f"launch: {failure.describe(ranks)}; it had not returned"
        raise PeerLostError(text, [failure.rank])
    if not in_time:
        raise _late([rank for rank in range(ranks) if rank not in results], living, ranks, limit_s)
    return [results[rank] for rank in range(ranks)]


def _command() -> list[str]:
    """Return a rank's command. It has this process's flags, and by the work its sys.path."""
    # The function by which multiprocessing starts its children; Python documents no other.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, str(Path(__file__).with_name("function_rank.py"))]


def _checked(function: object, ranks: Any, timeout_s: Any) -> float:
    """Return the limit in seconds, if these arguments have a meaning."""
    if not callable(function):
        raise UsageError(
            f"launch: {function!r} can't be called; pass a function, and its arguments behind it"
        )
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "launch: this process's working directory was removed, and Python can't import torch "
            "in such a one; go to another by os.chdir()"
        ) from None
    is_whole = isinstance(ranks, Integral) and not isinstance(ranks, bool)
    if not is_whole or not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"launch: ranks={ranks!r} must be a whole number from 1 to {_MOST_RANKS}")
    if timeout_s is None:
        return float("inf")
    limit = timeout_s.total_seconds() if isinstance(timeout_s, timedelta) else timeout_s
    is_number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not is_number or not limit > 0:  # NaN, too
        raise UsageError(f"launch: timeout_s={timeout_s!r} must be a positive number of seconds")
    return float(min(limit, _MOST_S))


def _late(missing: list[int], living: list[int], ranks: int, limit_s: float) -> CollectiveTimeout:
    """Return the error of a limit that has passed."""
    if missing:
        late = f"ranks {missing} of {ranks} had not returned after {limit_s:g} s"
    else:
        late = (
            f"ranks {living} of {ranks} had returned, but their processes still ran after "
            f"{limit_s:g} s, as for a thread that is no daemon"
        )
    return CollectiveTimeout(f"launch: {late}; they were ended", missing or living)


def _read(reply: memoryview, rank: int, ranks: int) -> tuple[BaseException | None, Any]:
    """Return a rank's error, or None and its result."""
    try:
        error, value = pickle.loads(reply)
    except Exception as problem:  # whatever the result's class does in there
        text = f"launch: what rank {rank} of {ranks} returned can't be unpickled here"
        refused = UsageError(f"{text}: {error_in_words(problem)}")
        refused.__cause__ = problem
        return refused, None
    return error and _named(error, rank, ranks, trace=value), value


def _pack_work(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return what a rank needs to call the function."""
    import cloudpickle

    try:
        work = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(f"launch: the function and its arguments must pickle: {error}") from error
    return pickle.dumps((sys.path, work))


def _sinks() -> tuple[Sink, Sink]:
    """Return writers to stdout and stderr as they are now: a notebook's cell, a test's capture."""

    def to(name: str) -> Sink:
        def write(data: bytes) -> None:
            stream = getattr(sys, name)
            if stream is None:  # it was closed as this process started
                return
            text = data.decode(errors="replace")
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
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
