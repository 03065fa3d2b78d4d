# SPDX-License-Identifier: Apache-2.0
"""The limit of a wait: the call's own, else the group's, else FASTCOLL_TIMEOUT_S, else 30 s.

Decides which one holds, and what the longest is. Must not know who waits.
"""

from fastcoll import env
from fastcoll.errors import UsageError

# Eleven days: what sockets and stores can still be told in their units. Longer is as good as that.
MOST_S = 1e6
GROUP_LIMIT = -1.0  # tells the C++ core to use the group's own limit


def group_limit_s(timeout_s: float | None) -> float:
    """Return the limit of a new group.

    Raises:
        UsageError: It is not a positive number of seconds.
    """
    return _checked(env.TIMEOUT_S.get() if timeout_s is None else timeout_s)


def call_limit_s(timeout_s: float | None) -> float:
    """Return the limit of one call, as the C++ core takes it.

    Raises:
        UsageError: It is not a positive number of seconds.
    """
    return GROUP_LIMIT if timeout_s is None else _checked(timeout_s)


def _checked(timeout_s: float) -> float:
    try:
        value = -1.0 if isinstance(timeout_s, str | bool) else float(timeout_s)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    return min(value, MOST_S)
