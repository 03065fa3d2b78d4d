# SPDX-License-Identifier: Apache-2.0
"""The errors of the model. `fastcoll` turns them into its own where a group's call meets one."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean WORD?" if one of the known words is near, else ""."""
    near = difflib.get_close_matches(word.lower(), known, 1)
    return f", did you mean {near[0]}?" if near else ""


class ModelError(ValueError):
    """An input of the model is wrong, or the model cannot price it."""


class NotRunnableError(ModelError):
    """A schedule is right on paper, and this machine's executor cannot run it."""
