# SPDX-License-Identifier: Apache-2.0
"""How a group behaves where a call does not say otherwise.

Decides which setting holds: the one given, else the environment's, else the default. Must not
know who asks.
"""

from dataclasses import dataclass
from typing import cast

from fastcoll import env
from fastcoll.errors import UsageError
from fastcoll.reliability.limits import group_limit_s
from fastcoll.types import Numerics


@dataclass(frozen=True)
class Settings:
    """The settings of one group."""

    timeout_s: float
    numerics: Numerics

    def but(self, timeout_s: float | None, numerics: str | None) -> "Settings":
        """Return these settings with what is given in place of what they say."""
        return Settings(
            self.timeout_s if timeout_s is None else group_limit_s(timeout_s),
            self.numerics if numerics is None else checked_numerics(numerics),
        )


def resolve(timeout_s: float | None, numerics: str | None) -> Settings:
    """Return the settings of a new group.

    Raises:
        UsageError: One of them, or its variable, makes no sense.
    """
    return Settings(
        group_limit_s(timeout_s),
        checked_numerics(env.NUMERICS.get() if numerics is None else numerics),
    )


def checked_numerics(text: str) -> Numerics:
    """Return `text` if it names a numerics, else raise UsageError."""
    if text not in ("same_bits", "fast"):
        raise UsageError(f'numerics must be "same_bits" or "fast", not {text!r}')
    return cast(Numerics, text)
