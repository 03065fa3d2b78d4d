# SPDX-License-Identifier: Apache-2.0
"""The list of verbs, and the decorator that puts a function on it.

A verb is declared once, as a Python function: its name, arguments, defaults, types and docstring
are the specification. `scripts/verbs.py` writes the table of C++ and the methods of groups from it.
The public name is a C function, so that a call with a known plan needs no Python. Every other call
goes on to the declared function. Filling the table of C++ at import costs 10 ns a call.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from fastcoll.native import _C

Function = TypeVar("Function", bound=Callable[..., Any])

# The declared functions by name.
VERBS: dict[str, Callable[..., Any]] = {}


def verb(function: Function) -> Function:
    """Declare a verb; return the C function of its name."""
    name = function.__name__
    VERBS[name] = function
    _C.set_fallback(name, function)
    return cast(Function, getattr(_C, name))
