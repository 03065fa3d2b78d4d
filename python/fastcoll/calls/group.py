# SPDX-License-Identifier: Apache-2.0
"""A group of ranks, of one node or of several: the groups made of it, and its end.

Decides how parts and survivors of a group become groups. Must not know how a call is carried out.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

import torch

from fastcoll.bootstrap.exchange import BytesExchange, Exchange
from fastcoll.bootstrap.join import checked_members
from fastcoll.calls.limits import group_limit_s
from fastcoll.calls.objects import ObjectMethods
from fastcoll.calls.settings import Settings

# Makes a group of either kind from an exchange, a name, settings, members, and the group that they
# are members of, if there is one. None is returned to ranks that are not members.
MakeGroup: TypeAlias = Callable[
    [Exchange, str, Settings, Sequence[int], "BaseGroup | None"], "BaseGroup | None"
]


class BaseGroup(ObjectMethods):
    """A group of ranks; a base of `Communicator` and `HierarchicalCommunicator`.

    Attributes:
        on_close: Called once the group is closed.
    """

    make: ClassVar[MakeGroup]  # set by api/making.py, which knows both kinds

    on_close: Callable[[], None] | None = None
    _settings: Settings
    _num_groups = 0
    _num_shrinks = 0  # from the first group to this one
    _closed = False

    # ---- memory and peers ------------------------------------------------------------------------

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """See `fastcoll.empty`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error that broke the group, if one has; does not wait for a GPU."""
        raise NotImplementedError

    def peer_is_gone(self, peer: int) -> bool:
        """Return whether a rank's process is known to have ended or left."""
        raise NotImplementedError

    # ---- further groups --------------------------------------------------------------------------

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        numerics: str | None = None,
    ) -> "BaseGroup | None":
        """Make a group of some ranks of this one. Collective over all ranks of this group.

        Args:
            ranks: Ranks of this group, the same on every rank; they are numbered anew in
                ascending order. None takes all.
            timeout_s: Limit of its waits and of its making; None takes this group's.
            numerics: None takes this group's.

        Returns:
            The new group, or None on ranks that are not in it.

        Raises:
            UsageError: `ranks` are not ranks of this group.
            DesyncError: The ranks gave different `ranks`.
        """
        members = checked_members(ranks, self.world_size)
        settings = self._settings.but(timeout_s, numerics)
        self._num_groups += 1
        name = f"{self.name}/{self._num_groups}"
        return type(self).make(self._exchange(), name, settings, members, self)

    def _exchange(self) -> BytesExchange:
        """Return the exchange over which the ranks make a new group."""
        raise NotImplementedError

    def shrink(self, *, timeout_s: float | None = None) -> "BaseGroup":
        """See `fastcoll.shrink`; this group is closed, also if this raises."""
        limit_s = self._settings.limit_of(timeout_s)
        try:
            # All ranks have to leave the calls of this group, also if nothing broke it so far.
            self.abort("it calls shrink()")
            self._queue.join()
            return self._of_survivors(limit_s)
        finally:
            self.close()

    def _of_survivors(self, limit_s: float) -> "BaseGroup":
        """Return a group of the ranks that are left. Collective over those."""
        raise NotImplementedError

    def _name_after_shrink(self) -> str:
        stem = self.name.removesuffix(f":{self._num_shrinks}")
        return f"{stem}:{self._num_shrinks + 1}"

    # ---- life ------------------------------------------------------------------------------------

    def abort(self, reason: str | None = None) -> None:
        """End the group from any thread, with one verdict for all ranks."""
        raise NotImplementedError

    def set_timeout(self, timeout_s: float | timedelta) -> None:
        """Set the limit of calls that give none, from the next one on. Not collective.

        Args:
            timeout_s: Seconds, or a timedelta.

        Raises:
            UsageError: It is not a positive number of seconds, or the group was closed.
        """
        limit_s = group_limit_s(timeout_s)
        self.set_limit(limit_s)
        self._settings.timeout_s = limit_s

    def set_limit(self, limit_s: float) -> None:
        """Set the limit where calls are carried out; UsageError if the group was closed."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether the group was closed."""
        return self._closed

    def close(self) -> None:
        """Leave the group; calls that were queued are completed first. Not collective."""
        raise NotImplementedError

    def destroy(self) -> None:
        """See `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f'<fastcoll.{type(self).__name__} "{self.name}" rank {self.rank} of '
            f"{self.world_size}{self._where()}{state}>"
        )

    def _where(self) -> str:
        """Return where the ranks are, for `repr`."""
        return ""
