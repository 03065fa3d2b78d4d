# SPDX-License-Identifier: Apache-2.0
"""How a group behaves where a call does not say otherwise.

Decides which setting holds: the one given, else the environment's, else the default. Must not
know the callers.
"""

from dataclasses import dataclass, field, replace
from typing import cast

from fastcoll import env
from fastcoll.bootstrap.identity import Terms
from fastcoll.calls.limits import GpuLimits, Limit, gpu_limits, group_limit_s
from fastcoll.errors import UsageError
from fastcoll.types import Numerics


@dataclass
class Settings:
    """The settings of one group."""

    timeout_s: float  # the limit of waits, in seconds; a group's `set_timeout` changes it
    making_s: float  # limit of the group's making, in seconds: a first call may bring its own
    numerics: Numerics  # the numerics of calls that give none, on CPUs
    # The numerics between nodes; None: "same_bits" where it costs no bytes.
    numerics_between: Numerics | None = None
    carrier: str = "gloo"
    gpu: GpuLimits = field(default_factory=lambda: gpu_limits(None, None, None))
    # As `numerics`, on GPUs; between nodes "fast" holds there, too.
    numerics_on_gpus: Numerics = "same_bits"

    def limit_of(self, timeout_s: Limit) -> float:
        """Return the limit of a call that gives this one, in seconds.

        Raises:
            UsageError: It is not a positive number of seconds.
        """
        return self.timeout_s if timeout_s is None else group_limit_s(timeout_s)

    def gpu_limit_of(self, timeout_s: Limit) -> float:
        """Return the limit of a call on GPUs that gives this one, in seconds.

        Raises:
            UsageError: It is not a positive number of seconds.
        """
        return self.gpu.timeout_s if timeout_s is None else group_limit_s(timeout_s)

    def numerics_of(self, asked: str | None, *, on_gpus: bool = False) -> Numerics:
        """Return the numerics of a call that gives these, or None.

        Raises:
            UsageError: They are none.
        """
        if asked is not None:
            return checked_numerics(asked)
        return self.numerics_on_gpus if on_gpus else self.numerics

    def set_limit(self, limit_s: float) -> None:
        """Set the limit of waits, in kernels too."""
        self.timeout_s = limit_s
        self.gpu = replace(self.gpu, timeout_s=limit_s)

    def for_part(self, timeout_s: Limit, numerics: str | None) -> "Settings":
        """Return the settings of a part of this group, with some of them replaced."""
        limit_s = self.limit_of(timeout_s)
        # A part of a group is made by calls of the whole one, whose limit holds, too.
        result = replace(self, making_s=min(limit_s, self.timeout_s))
        if timeout_s is not None:
            result.set_limit(limit_s)
        if numerics is not None:
            asked = checked_numerics(numerics)
            result = replace(result, numerics=asked, numerics_between=asked, numerics_on_gpus=asked)
        return result

    def made_within(self, timeout_s: Limit) -> "Settings":
        """Return these settings for a group that is made at a call with this limit, if any."""
        return self if timeout_s is None else replace(self, making_s=group_limit_s(timeout_s))

    def terms(self, carrier: str) -> Terms:
        """Return the settings that all ranks must share; `carrier`: this rank's, in words."""
        between = self.numerics_between or "numerics by dtype"
        numerics: str = self.numerics
        if self.numerics_on_gpus != numerics:
            numerics += f", {self.numerics_on_gpus} on GPUs"
        return Terms(numerics, f"{carrier} with {between}")


def resolve(
    timeout_s: Limit,
    numerics: str | None,
    carrier: str | None = None,
    gpu_timeout_s: Limit = None,
    gpu_report_s: Limit = None,
    default_on_gpus: Numerics = "same_bits",
) -> Settings:
    """Return the settings of a new group.

    `default_on_gpus` holds where neither `numerics` nor FASTCOLL_NUMERICS is given.

    Raises:
        UsageError: One of them, or its variable, makes no sense.
    """
    asked = env.NUMERICS.get() if numerics is None else numerics
    if carrier is not None and not isinstance(carrier, str):
        raise UsageError(f"carrier must be a name, not {carrier!r}")
    is_default = numerics is None and not env.NUMERICS.is_set()
    limit_s = group_limit_s(timeout_s)
    return Settings(
        limit_s,
        limit_s,
        checked_numerics(asked),
        None if is_default else checked_numerics(asked),
        env.CARRIER.get() if carrier is None else carrier,
        gpu_limits(timeout_s, gpu_timeout_s, gpu_report_s),
        default_on_gpus if is_default else checked_numerics(asked),
    )


def checked_numerics(text: str) -> Numerics:
    """Return `text` if it names a numerics, else raise UsageError."""
    if text not in ("same_bits", "fast"):
        raise UsageError(f'numerics must be "same_bits" or "fast", not {text!r}')
    return cast(Numerics, text)
