# SPDX-License-Identifier: Apache-2.0
"""Torch's futures: how one ends with an error.

Decides which exception Python and torch's C++ read from a future whose call failed. Must not know
calls.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class _Failure:
    """The value of a future whose call failed: nothing can be read from it.

    `Future.set_exception` leaves the error as a good value for torch's C++: DDP's reducer takes the
    first tensor out of it, and there is none. The reducer finds tensors by pickling the value, so
    the error is raised there.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


def _outcome(result: Callable[[], object]) -> object:
    try:
        return result()
    except Exception as error:
        return _Failure(error)


def _raise_failure(value: object) -> None:
    if isinstance(value, _Failure):
        raise value.error


def complete(future: torch.futures.Future[Any], result: Callable[[], object]) -> None:
    """Complete a future with the value that `result` returns, or the error that it raises.

    Python gets the error itself, torch's C++ a RuntimeError with its class and text.
    """
    future._set_unwrap_func(_raise_failure)
    future.set_result(_outcome(result))


def follow(
    first: torch.futures.Future[Any], result: Callable[[], object]
) -> torch.futures.Future[Any]:
    """Return a future that is completed as by `complete` once another one is done."""
    second: torch.futures.Future[Any] = first.then(lambda _: _outcome(result))
    second._set_unwrap_func(_raise_failure)
    return second
