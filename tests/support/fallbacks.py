# SPDX-License-Identifier: Apache-2.0
"""Calls that C++ passes on to Python: noted, or refused, for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fastcoll import _C
from fastcoll.api import VERBS


class Passed(Exception):
    """A call was passed on to Python."""


@contextlib.contextmanager
def _replaced(verbs: tuple[str, ...], by: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    chosen = verbs or tuple(VERBS)
    try:
        for verb in chosen:
            _C.set_fallback(verb, by(verb))
        yield
    finally:
        for verb in chosen:
            _C.set_fallback(verb, VERBS[verb])


@contextlib.contextmanager
def noting(*verbs: str) -> Iterator[list[tuple[str, Any]]]:
    """Collect the verb and first argument of calls that are passed on; by default of all verbs."""
    found: list[tuple[str, Any]] = []

    def noted(verb: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.append((verb, args[0] if args else None))
            return VERBS[verb](*args, **options)

        return call

    with _replaced(verbs, noted):
        yield found


@contextlib.contextmanager
def refusing(*verbs: str) -> Iterator[None]:
    """Raise Passed where a call would be passed on; by default of all verbs."""

    def refuse(verb: str) -> Callable[..., Any]:
        def call(*_args: Any, **_options: Any) -> None:
            raise Passed(verb)

        return call

    with _replaced(verbs, refuse):
        yield
