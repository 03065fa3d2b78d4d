# SPDX-License-Identifier: Apache-2.0
"""The limit of a wait: the call's own, else the group's, else FASTCOLL_TIMEOUT_S, else 30 s.

A kernel waits while another rank compiles or writes a checkpoint, so GPUs have limits of their own.
Decides which limit holds, and the longest one. Must not know the waits.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import inf, nan
from typing import TypeAlias

from fastcoll import env
from fastcoll.errors import UsageError

Limit: TypeAlias = float | timedelta | None
# Eleven days: sockets and stores can still take that in their units. Longer limits become this.
MOST_S = 1e6
GROUP_LIMIT = -1.0  # tells the C++ core to use the group's own limit


@dataclass(frozen=True)
class GpuLimits:
    """The limits of waits in kernels."""

    timeout_s: float  # a longer wait breaks the group
    report_s: float  # after so long the late rank is named in the log


def gpu_limits(timeout_s: Limit, gpu_timeout_s: Limit, gpu_report_s: Limit) -> GpuLimits:
    """Return the limits of a group on GPUs.

    The timeout is the first that is given of these: `gpu_timeout_s`, `timeout_s`,
    FASTCOLL_GPU_TIMEOUT_S, FASTCOLL_TIMEOUT_S. Else it is 10 minutes.

    Raises:
        UsageError: One is not a positive number of seconds.
    """
    limit = timeout_s if gpu_timeout_s is None else gpu_timeout_s
    if limit is None:
        only_usual = env.TIMEOUT_S.is_set() and not env.GPU_TIMEOUT_S.is_set()
        limit = (env.TIMEOUT_S if only_usual else env.GPU_TIMEOUT_S).get()
    name = "timeout_s" if gpu_timeout_s is None else "gpu_timeout_s"
    report = env.GPU_REPORT_S.get() if gpu_report_s is None else gpu_report_s
    return GpuLimits(_checked(limit, name), _checked(report, "gpu_report_s"))


def group_limit_s(timeout_s: Limit) -> float:
    """Return the limit of a group.

    Raises:
        UsageError: It is not a positive number of seconds.
    """
    return _checked(env.TIMEOUT_S.get() if timeout_s is None else timeout_s)


def call_limit_s(timeout_s: Limit) -> float:
    """Return the limit of one call, as the C++ core takes it.

    Raises:
        UsageError: It is not a positive number of seconds.
    """
    return GROUP_LIMIT if timeout_s is None else _checked(timeout_s)


def one_limit(timeout: Limit, timeout_s: Limit) -> Limit:
    """Return the limit that is given by torch's name or by ours.

    Raises:
        UsageError: It is given by both.
    """
    if timeout is not None and timeout_s is not None:
        raise UsageError("give timeout or timeout_s, not both")
    return timeout_s if timeout is None else timeout


def seconds(time: object) -> float:
    """Return a number of seconds, or a timedelta's; NaN of anything else, True and "3" among it."""
    if isinstance(time, timedelta):
        return time.total_seconds()
    try:
        return nan if isinstance(time, str | bool) else float(time)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return nan


def _checked(timeout_s: float | timedelta, name: str = "timeout_s") -> float:
    value = seconds(timeout_s)
    if not 0 < value < inf:
        raise UsageError(f"{name} must be a positive number of seconds, not {timeout_s!r}")
    return min(value, MOST_S)
