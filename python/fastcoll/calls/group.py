# SPDX-License-Identifier: Apache-2.0
"""A group of ranks, of one node or of several: the groups made of it, and its end.

Decides how parts and survivors of a group become groups. Must not know how a call is carried out.
"""

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import torch
import torch.distributed as dist

from fastcoll.bootstrap.exchange import BytesExchange, Exchange
from fastcoll.bootstrap.join import checked_members
from fastcoll.calls.limits import Limit, group_limit_s, one_limit
from fastcoll.calls.objects import ObjectMethods
from fastcoll.calls.recorder import VerbStats
from fastcoll.calls.settings import Settings
from fastcoll.errors import UsageError

# Makes a group of either kind from an exchange, a name, settings, members, and the group that they
# are members of, if there is one. None is returned to ranks that are not members.
MakeGroup: TypeAlias = Callable[
    [Exchange, str, Settings, Sequence[int], "BaseGroup | None"], "BaseGroup | None"
]

# torch.distributed returns it to ranks that are not in a group.
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


class BaseGroup(ObjectMethods):
    """A group of ranks, of one node or of several: `fastcoll.Group`.

    `init` and `new_group` make one. Its methods are the functions of the module, less `group`.

    Attributes:
        is_member: Whether this rank is in the group; False of what `new_group` returns elsewhere.
        on_close: Called once the group is closed.
    """

    is_member = True  # whether this rank is in the group
    make: ClassVar[MakeGroup]  # set by api/making.py, which knows both kinds

    on_close: Callable[[], None] | None = None
    _settings: Settings
    _num_groups = 0
    _num_shrinks = 0  # from the first group to this one
    _closed = False

    @property
    def timeout_s(self) -> float:
        """The limit of calls that give none, in seconds."""
        return self._settings.timeout_s

    # ---- memory and peers ------------------------------------------------------------------------

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """See `fastcoll.empty`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error that broke the group, if one has; does not wait for a GPU."""
        raise NotImplementedError

    def stats(self) -> dict[str, VerbStats]:
        """Return this rank's calls, bytes and seconds of waiting, by verb. Not collective.

        Calls on CPU tensors are counted: by C++, in memory that `fastcoll inspect --metrics` reads
        from outside. Sends, receives and calls on GPUs are not. Over several nodes the seconds are
        not known, and `inspect` shows the calls by which a node's ranks do their share.

        Raises:
            UsageError: The group was closed.
        """
        raise NotImplementedError

    def peer_is_gone(self, peer: int) -> bool:
        """Return whether a rank's process is known to have ended or left."""
        raise NotImplementedError

    # ---- further groups --------------------------------------------------------------------------

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout: Limit = None,
        timeout_s: Limit = None,
        numerics: str | None = None,
    ) -> "BaseGroup":
        """Make a group of some ranks of this one. Collective over all ranks of this group.

        Args:
            ranks: Ranks of this group, the same on every rank; they are numbered anew in
                ascending order. None takes all.
            timeout: Limit of its waits and of its making, a timedelta or seconds; None takes this
                group's.
            timeout_s: The same, in seconds.
            numerics: None takes this group's.

        Returns:
            The new group; see `fastcoll.new_group` for the ranks that are not in it.

        Raises:
            UsageError: `ranks` are not ranks of this group.
            DesyncError: The ranks gave different `ranks`.
        """
        members = checked_members(ranks, self.world_size)
        settings = self._settings.for_part(one_limit(timeout, timeout_s), numerics)
        self._num_groups += 1
        name = f"{self.name}/{self._num_groups}"
        made = type(self).make(self._exchange(), name, settings, members, self)
        return NonMember(name) if made is None else made

    def _exchange(self) -> BytesExchange:
        """Return the exchange over which the ranks make a new group."""
        raise NotImplementedError

    def shrink(self, *, timeout_s: float | None = None) -> "BaseGroup":
        """See `fastcoll.shrink`; this group is closed, also if this raises."""
        limit_s = self._settings.limit_of(timeout_s)
        made = None
        try:
            # All ranks have to leave the calls of this group, also if nothing broke it so far.
            self.abort("it calls shrink()")
            self._queue.join()
            made = self._of_survivors(limit_s)
        finally:
            try:
                self.close()
            except BaseException:
                if made is not None:
                    made.close()  # the others hear that this rank is gone
                raise
        return made

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
        self._settings.set_limit(limit_s)

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


class NonMember(BaseGroup):
    """A group as a rank has it that is not in it: calls warn and do nothing, as torch's do.

    Equal to torch's GroupMember.NON_GROUP_MEMBER, and taken by torch.distributed's functions.
    """

    is_member = False
    _closed = True

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The group's name, the same on all ranks."""
        return self._name

    @property
    def rank(self) -> int:
        """-1, as torch.distributed.get_rank() has it."""
        return -1

    @property
    def world_size(self) -> int:
        """-1, as torch.distributed.get_world_size() has it."""
        return -1

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, int) and other == NON_MEMBER)

    def __hash__(self) -> int:
        return hash(NON_MEMBER)

    def __repr__(self) -> str:
        return f'<fastcoll.Group "{self.name}", of which this rank is no member>'

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing here to look at or to end."""

    check = abort = set_limit = set_timeout = close = _ignore

    def stats(self) -> dict[str, VerbStats]:
        """Nothing: no call was made."""
        return {}

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(f'this rank is not in the group "{self.name}"')

    empty = new_group = shrink = _refuse  # of which a rank needs the result
    timeout_s = property(_refuse)


def _nothing(verb: str, result: int | None = None) -> Callable[..., int | None]:
    """Return a method that warns and does nothing."""

    def method(self: NonMember, *args: Any, **kwargs: Any) -> int | None:
        warnings.warn(f"{verb}: this rank is not in the group", stacklevel=2)
        return result

    return method


for _verb in vars(ObjectMethods):
    if not _verb.startswith("_"):
        setattr(NonMember, _verb, _nothing(_verb, -1 if _verb.startswith("recv") else None))
