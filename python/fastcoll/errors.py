# SPDX-License-Identifier: Apache-2.0
"""The errors of fastcoll: one class per kind of failure, raised by Python and by C++ alike.

Decides the names and the fields of each error. Knows nothing of groups, tensors or torch; the
C++ extension finds these classes by name.
"""

from collections.abc import Iterable

from fastcoll.text import printable_lines


class FastcollError(RuntimeError):
    """Base of every error that fastcoll raises on purpose.

    A text may quote other processes, so it holds printable characters and line ends only.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable_lines(one) if isinstance(one, str) else one for one in args))


class UsageError(FastcollError):
    """The call is wrong in itself; nothing was published and the group stays usable."""


class UnsupportedError(FastcollError):
    """The call has no meaning or no implementation here; the text names calls that work."""


class DesyncError(FastcollError):
    """The ranks of a group made calls that do not match; the text shows both sides."""


class DriverError(FastcollError):
    """The operating system or a device driver refused something that must work."""


class _RankError(FastcollError):
    """An error about certain ranks of the group."""

    ranks: tuple[int, ...]

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        return (type(self), (str(self), self.ranks))


class CollectiveTimeout(_RankError):
    """A wait ran out of its limit; `ranks` holds the group ranks that did not come."""


class PeerLostError(_RankError):
    """A peer process died or left; `ranks` holds its group rank."""


class AbortedError(_RankError):
    """A rank ended the group with `abort`; `ranks` holds it, the text its reason."""


__all__ = [
    "AbortedError",
    "CollectiveTimeout",
    "DesyncError",
    "DriverError",
    "FastcollError",
    "PeerLostError",
    "UnsupportedError",
    "UsageError",
]
