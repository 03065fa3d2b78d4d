# SPDX-License-Identifier: Apache-2.0
"""Whose group a call means, and how that group comes to be.

Decides the default group, its making from torchrun's environment, and which communicator stands
for a torch process group. Must not know what the groups are used for.
"""

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from fastcoll import env
from fastcoll.api.making import connect, member
from fastcoll.bootstrap.exchange import StoreExchange, exchange_of
from fastcoll.bootstrap.forks import refuse_inherited
from fastcoll.bootstrap.launcher import connect_store
from fastcoll.bootstrap.makers import Makers
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.limits import group_limit_s
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.pool import close_pool
from fastcoll.calls.settings import Settings, resolve
from fastcoll.calls.tensors import Call
from fastcoll.calls.work import Work
from fastcoll.errors import UsageError
from fastcoll.group.communicator import Communicator, close_all
from fastcoll.native import _C

GroupLike: TypeAlias = BaseGroup | ProcessGroup | int | None
Limit: TypeAlias = float | timedelta | None
_DEFAULT = "the default group"
_MEMBER_OF_NOTHING = dist.GroupMember.NON_GROUP_MEMBER
_NOT_INITIALISED = (
    "fastcoll is not initialised, and neither torchrun's environment nor torch.distributed tells "
    "it who its peers are: call fastcoll.init(store=..., rank=..., world_size=...), or "
    "torch.distributed.init_process_group() first, or start the program with torchrun"
)


# Kept in a forked child, which has not the thread that the end of such a store waits for.
_stores: list[dict[env.Launch, Store]] = []


class _State:
    """What the module-level functions remember.

    The lock is held for a look or an entry, never for a call that waits for another rank.
    """

    def __init__(self) -> None:
        self.forget_parent()
        os.register_at_fork(after_in_child=self.forget_parent)
        self.default: BaseGroup | None = None
        self.subgroups: weakref.WeakSet[BaseGroup] = weakref.WeakSet()
        self.by_process_group: weakref.WeakKeyDictionary[ProcessGroup, BaseGroup] = (
            weakref.WeakKeyDictionary()
        )
        # Communicators that are torch groups themselves, by the groups' names.
        self.adopted: weakref.WeakValueDictionary[str, BaseGroup] = weakref.WeakValueDictionary()

    def forget_parent(self) -> None:
        """Begin anew in a forked child: a thread that it has not may hold its parent's lock."""
        self.lock = threading.RLock()
        # Kept: the server of torch's store lives as long as its object. By process, as a child that
        # asked over its parent's connection would take the parent's answers.
        self.stores: dict[env.Launch, Store] = {}
        _stores.append(self.stores)


_state = _State()
_makers = Makers()


# ---- groups --------------------------------------------------------------------------------------


def init(
    group: ProcessGroup | BaseGroup | None = None,
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
    numerics: str | None = None,
    carrier: str | None = None,
) -> BaseGroup:
    """Make the default group. Collective: every rank must call this.

    Args:
        group: A torch process group of any backend whose ranks form the group, or a communicator
            that exists. None takes torch's default group if there is one, else torchrun's
            environment.
        store: A torch.distributed store that all ranks can reach; with `rank` and `world_size`,
            in place of `group`.
        rank: This process's rank in the world of `store`.
        world_size: Number of ranks.
        timeout_s: Limit of every wait; None takes FASTCOLL_TIMEOUT_S, else 30 s. A group that
            exists keeps its own: one of `init_process_group("fastcoll")` has torch's (`timeout=`,
            30 minutes).
        numerics: "same_bits" or "fast"; None takes FASTCOLL_NUMERICS, else "same_bits"; but between
            nodes "fast" for half and narrower types, whose bits would cost bytes on the wire.
        carrier: What moves bytes between nodes, if there are several: "gloo"; "mpi", through
            mpi4py in processes that mpirun started; or another backend that is registered with
            torch.distributed. None takes FASTCOLL_CARRIER, else Gloo. Tensors on GPUs go by NCCL
            whatever is named; with "nccl" those on CPUs go by Gloo. Unknown names are refused on
            one node, too.

    Returns:
        The group, which is a context manager: leaving it closes it.

    Raises:
        UsageError: There is a default group already, nothing tells who the ranks are, or a group
            that exists is given what only making one takes.
        UnsupportedError: There are more than 64 ranks on one node.
        CollectiveTimeout: A rank did not come.
    """
    settings = resolve(timeout_s, numerics, carrier)
    given = {"timeout_s": timeout_s, "numerics": numerics, "carrier": carrier}
    with _makers.hold(_DEFAULT, _DEFAULT, settings.timeout_s):
        if _state.default is not None:
            raise UsageError("fastcoll is initialised already; call fastcoll.destroy() first")
        comm: BaseGroup
        if isinstance(group, BaseGroup):
            _refuse_for(group, given)
            comm = group
        elif store is not None or rank is not None or world_size is not None:
            if group is not None or store is None or rank is None or world_size is None:
                raise UsageError("init() takes a group, or store, rank and world_size together")
            comm = member(connect(StoreExchange(store, rank, world_size), "world", settings))
        elif group is not None and not isinstance(group, ProcessGroup):
            raise UsageError(f"group must be a torch process group, not {type(group).__name__}")
        elif (group := group or _default_of_torch()) is not None:
            if (existing := standing_for(group)) is not None:
                _refuse_for(existing, given)
            comm = _of_process_group(group, settings)
        else:
            comm = _of_launcher(settings)
        _set_default(comm)
        return comm


def _refuse_for(group: BaseGroup, given: Mapping[str, object]) -> None:
    """Raise UsageError if something is given that a group has had since it was made."""
    if names := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f'the group "{group.name}" exists already and keeps what it was made with: give '
            f"{' and '.join(names)} to what makes it (init_process_group takes timeout=), or to "
            "new_group()"
        )


def _set_default(comm: BaseGroup) -> None:
    with _state.lock:
        _state.default = comm
        comm.on_close = partial(_forget_default, comm)
        # The C++ functions know groups of one node; they pass the calls of others on.
        _C.set_default_group(comm if isinstance(comm, Communicator) else None)


def _default_of_torch() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _of_launcher(settings: Settings) -> BaseGroup:
    launch = env.launch()
    if launch is None:
        raise UsageError(_NOT_INITIALISED)
    if launch not in _state.stores:
        _state.stores[launch] = connect_store(launch, settings.making_s)
    store = _state.stores[launch]
    return member(connect(StoreExchange(store, launch.rank, launch.world_size), "world", settings))


def _of_process_group(
    group: ProcessGroup, settings: Settings | None = None, timeout_s: Limit = None
) -> BaseGroup:
    """Return the communicator that stands for a torch process group; made at its first use.

    `settings` are a new one's; None takes the environment's, and `timeout_s` for its making.
    """
    if (comm := standing_for(group)) is None:
        settings = settings or resolve(None, None).made_within(timeout_s)
        with _makers.hold(group, group.group_name, settings.making_s):
            comm = standing_for(group)
            if comm is None:
                _require_living(group)
                comm = member(connect(exchange_of(group), group.group_name, settings))
                with _state.lock:
                    _state.by_process_group[group] = comm
    if isinstance(comm, Communicator):
        _C.set_stand_in(group, comm, dist.get_process_group_ranks(group))
    return comm


def standing_for(group: ProcessGroup) -> BaseGroup | None:
    """Return the communicator that stands for a torch process group already."""
    with _state.lock:
        known = _state.adopted.get(group.group_name), _state.by_process_group.get(group)
    return next((comm for comm in known if comm is not None and not comm.closed), None)


def _require_living(group: ProcessGroup) -> None:
    """Raise UsageError if a process group is one of a parent, or of fastcoll's own and closed."""
    refuse_inherited(group)
    with _state.lock:
        adopted = _state.adopted.get(group.group_name)
    if adopted is not None and ":fastcoll" in dist.get_backend_config(group):
        raise UsageError(f'group "{group.group_name}" was destroyed')


def adopt(comm: BaseGroup) -> None:
    """Let `comm` stand for the torch process group of its name, which is made of it."""
    with _state.lock:
        _state.adopted[comm.name] = comm


def _forget_default(comm: BaseGroup) -> None:
    with _state.lock:
        if _state.default is comm:
            _state.default = None
            _C.set_default_group(None)


def default_group(timeout_s: Limit = None) -> BaseGroup:
    """Return the default group; made at its first use, within a limit in seconds."""
    if (comm := _state.default) is not None and not _makers.is_busy(_DEFAULT):
        return comm
    settings = resolve(None, None).made_within(timeout_s)
    with _makers.hold(_DEFAULT, _DEFAULT, settings.making_s):
        if (comm := _state.default) is None:
            world = _default_of_torch()
            comm = _of_launcher(settings) if world is None else _of_process_group(world, settings)
            _set_default(comm)
        return comm


def communicator_of(group: object, timeout_s: Limit = None) -> BaseGroup | None:
    """Return the communicator that `group=` means, or None if this rank is not in it.

    `timeout_s` is the limit of the call that needs it, which holds if it has to be made, too.
    """
    if group is None:
        return default_group(timeout_s)
    if isinstance(group, BaseGroup):
        return group
    if isinstance(group, ProcessGroup):
        return _of_process_group(group, timeout_s=timeout_s)
    if group == _MEMBER_OF_NOTHING:
        return None
    raise UsageError(
        f"group must be a Communicator or a torch process group, not {type(group).__name__}"
    )


def member_of(
    group: GroupLike, verb: str, *, timeout_s: Limit = None, stacklevel: int = 3
) -> BaseGroup | None:
    """Return the communicator that `group` means; None and a warning if this rank is not in it.

    The warning is shown at the program's call: `stacklevel` counts the functions up to there.
    """
    comm = communicator_of(group, timeout_s)
    if comm is None:
        warnings.warn(f"{verb}: this rank is not in the group", stacklevel=stacklevel)
    return comm


def rank_in(
    group: GroupLike,
    rank: int | None,
    name: str,
    group_rank: int | None = None,
    default: int | None = None,
) -> int:
    """Return the group rank that is meant: torch process groups are given global ranks.

    Args:
        group: What the call was given.
        rank: What it was given as `name`, or None.
        name: What is said of it.
        group_rank: What it was given as `group_`name: a rank of the group, whatever that is.
        default: What is meant where neither is given.
    """
    if group_rank is not None:
        if rank is not None:
            raise UsageError(f"give {name} or group_{name}, not both")
        return group_rank
    if rank is None:
        if default is None:
            raise UsageError(f"{name} is missing: which rank?")
        rank = default
    if not isinstance(group, ProcessGroup):
        return rank
    try:
        return dist.get_group_rank(group, rank)
    except ValueError as error:
        raise UsageError(f"{name}={rank}: {error}") from None


def source_in(group: GroupLike, src: int | None, group_src: int | None = None) -> int | None:
    """Return the same of a sender; None is any."""
    return None if src is None and group_src is None else rank_in(group, src, "src", group_src)


def named_rank(group: GroupLike, rank: int) -> int:
    """Return what a rank of the group is called where the group was given so."""
    return dist.get_global_rank(group, rank) if isinstance(group, ProcessGroup) else rank


def issue(group: GroupLike, call: Call | PartsCall) -> Work | None:
    """Start a call in the group that it means; None if this rank is not in that group."""
    comm = member_of(group, call.verb.name, timeout_s=call.timeout_s, stacklevel=4)
    return None if comm is None else comm.issue(call)


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    timeout_s: float | None = None,
    numerics: str | None = None,
) -> BaseGroup | int:
    """Make a group of some ranks of the default group. Collective over the default group.

    Args:
        ranks: Ranks of the default group, the same on every rank; they are numbered anew in
            ascending order. None takes all.
        timeout_s: Limit of its waits and of its making; None takes the default group's.
        numerics: None takes the default group's.

    Returns:
        The new group; on ranks that are not in it torch's GroupMember.NON_GROUP_MEMBER, with
        which the verbs do nothing.
    """
    comm: BaseGroup | None = default_group(timeout_s).new_group(
        ranks, timeout_s=timeout_s, numerics=numerics
    )
    if comm is None:
        return int(_MEMBER_OF_NOTHING)
    with _state.lock:
        _state.subgroups.add(comm)
    return comm


def shrink(
    group: ProcessGroup | BaseGroup | None = None, *, timeout_s: float | None = None
) -> BaseGroup:
    """Make a new group of the ranks that are left of a broken one. Collective over those.

    For after PeerLostError, CollectiveTimeout, DesyncError or an abort: every rank that is left
    calls this and gets the same new group, in which the ranks are numbered anew in their old
    order. It shares no memory with the old one. A group that nothing broke yet is ended for all
    ranks, who are to come too.

    The old group is closed, also if this raises. Its symmetric tensors keep their values, in memory
    that no other rank reaches any more, and are ordinary tensors from then on; outputs of the call
    that failed are undefined. Of the default group the new one becomes the default.

    A rank that dies while the others agree may still be counted in: then the new group's first
    call raises PeerLostError, and shrink() helps again.

    Over several nodes the ranks of each node agree first, then the nodes over the store, which must
    have survived. A node of which the error named a rank, and from which nobody comes, is waited
    for 5 s at most. Between these two steps a node stands or falls with the first of its ranks that
    are left: if that one dies or stops there, the others of its node raise PeerLostError or
    CollectiveTimeout, and have no group any more.

    Args:
        group: The broken group; None takes the default one.
        timeout_s: How long to wait for a rank that lives and does not come, such as a stopped one:
            it is left out. The shortest limit of all ranks counts; None takes the group's.

    Returns:
        The new group, with the old one's limit and numerics.

    Raises:
        PeerLostError: The others went on without this rank, as it came too late.
        CollectiveTimeout: Over several nodes: the store does not answer, or a rank died meanwhile.
        DriverError: This process may not open more files; the others go on without it.
        UsageError: The group was destroyed.
    """
    old = communicator_of(group)
    if old is None:
        raise UsageError("this rank is not in the group that is to be shrunk")
    was_default = old is _state.default
    with _makers.hold(_DEFAULT if was_default else old, old.name, group_limit_s(timeout_s)):
        new: BaseGroup = old.shrink(timeout_s=timeout_s)
        if was_default:
            _set_default(new)
        else:
            with _state.lock:
                _state.subgroups.add(new)
        return new


def destroy() -> None:
    """Close the default group, its subgroups and what stands for torch process groups.

    Calls that were queued are completed first. Where there is none of them this does nothing.
    """
    with _state.lock:
        groups = [*_state.subgroups, *_state.by_process_group.values()]
        _state.subgroups.clear()
        _state.by_process_group.clear()
        if _state.default is not None:
            groups.append(_state.default)
    for group in groups:  # without the lock: what was queued may wait for peers
        group.close()
    close_pool()


atexit.register(close_all)
