# SPDX-License-Identifier: Apache-2.0
"""Finds the group of a call, or makes it at its first use.

Decides the meaning of `group=` and of ranks given with it, and which communicator stands for a
torch process group. Must not know the use of the groups.
"""

import os
import threading
import warnings
import weakref
from functools import partial
from typing import TypeAlias, TypeGuard

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from fastcoll import env
from fastcoll.api.making import connect, member
from fastcoll.bootstrap.exchange import StoreExchange, exchange_of
from fastcoll.bootstrap.forks import refuse_inherited
from fastcoll.bootstrap.launcher import connect_store
from fastcoll.bootstrap.makers import Makers
from fastcoll.calls.group import NON_MEMBER, BaseGroup
from fastcoll.calls.group_calls import AnyCall
from fastcoll.calls.limits import Limit
from fastcoll.calls.settings import Settings, resolve
from fastcoll.calls.work import Work, completed
from fastcoll.errors import UsageError
from fastcoll.group.communicator import Communicator
from fastcoll.launchers import Launch
from fastcoll.native import _C

GroupLike: TypeAlias = BaseGroup | ProcessGroup | int | None
DEFAULT = "the default group"
_CLOSED = (
    "the default group was closed, by destroy() or at the end of its `with`: call fastcoll.init() "
    "for another one, or name a group"
)
_NOT_INITIALISED = (
    "fastcoll is not initialised, and neither a launcher's variables nor torch.distributed tell "
    "it who its peers are: call fastcoll.init(store=..., rank=..., world_size=...), or "
    "torch.distributed.init_process_group() first, or start the program with `fastcoll run`, "
    "torchrun, mpirun or srun"
)


# Kept in a forked child, which has not the thread that the end of such a store waits for.
_stores: list[dict[Launch, Store]] = []


class _State:
    """The state of the module-level functions: the groups that exist.

    The lock is held for a look or an entry, never for a call that waits for another rank.
    """

    def __init__(self) -> None:
        self.forget_parent()
        os.register_at_fork(after_in_child=self.forget_parent)
        self.default: BaseGroup | None = None
        # Whether it was closed, and torch's default group of that time: a call makes no other one
        # then, unless torch has a new one.
        self.was_closed = False
        self.world_then: weakref.ref[ProcessGroup] | None = None
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
        # used its parent's connection would take the parent's answers.
        self.stores: dict[Launch, Store] = {}
        _stores.append(self.stores)


state = _State()
makers = Makers()


def set_default(comm: BaseGroup) -> None:
    """Make a group the default one, in C++ too."""
    with state.lock:
        state.default = comm
        state.was_closed = False
        comm.on_close = partial(_forget_default, comm)
        # The C++ functions know groups of one node; they pass the calls of others on.
        _C.set_default_group(comm if isinstance(comm, Communicator) else None)


def default_of_torch() -> ProcessGroup | None:
    """Return torch's default group, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def _launch() -> Launch:
    """Return this rank's place as its launcher tells it; UsageError where there is none."""
    if (launch := env.launch()) is None:
        told = env.explain_no_launch()
        raise UsageError(_NOT_INITIALISED + f" ({told})" * bool(told))
    return launch


def group_of_launcher(settings: Settings) -> BaseGroup:
    """Make a group of all ranks that a launcher has started. Collective."""
    launch = _launch()
    if launch not in state.stores:
        state.stores[launch] = connect_store(launch, settings.making_s)
    store = state.stores[launch]
    return member(connect(StoreExchange(store, launch.rank, launch.world_size), "world", settings))


def stand_in_for(
    group: ProcessGroup, settings: Settings | None = None, timeout_s: Limit = None
) -> BaseGroup:
    """Return the communicator that stands for a torch process group; made at its first use.

    `settings` are a new one's; None takes the environment's, and `timeout_s` for its making.
    """
    if (comm := existing_communicator(group)) is None:
        settings = settings or resolve(None, None).made_within(timeout_s)
        with makers.hold(group, group.group_name, settings.making_s):
            comm = existing_communicator(group)
            if comm is None:
                _require_living(group)
                comm = member(connect(exchange_of(group), group.group_name, settings))
                with state.lock:
                    state.by_process_group[group] = comm
    if isinstance(comm, Communicator):
        _C.set_stand_in(group, comm, _ranks_of(group))
    return comm


def _ranks_of(group: ProcessGroup) -> list[int]:
    """Return the global ranks of a torch process group.

    torch does not know a group that a program made on a store of its own. Such a group may be
    larger than the world, and its ranks are global.
    """
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return list(range(group.size()))


def existing_communicator(group: ProcessGroup) -> BaseGroup | None:
    """Return the communicator that stands for a torch process group already."""
    with state.lock:
        known = state.by_process_group.get(group), state.adopted.get(group.group_name)
    return next((comm for comm in known if comm is not None and not comm.closed), None)


def _require_living(group: ProcessGroup) -> None:
    """Raise UsageError if a process group is one of a parent, or of fastcoll's own and closed."""
    refuse_inherited(group)
    with state.lock:
        adopted = state.adopted.get(group.group_name)
    if adopted is not None and ":fastcoll" in dist.get_backend_config(group):
        raise UsageError(f'group "{group.group_name}" was destroyed')


def adopt(comm: BaseGroup, group: ProcessGroup | None = None) -> None:
    """Let `comm` stand for a torch process group that is made of it; None: for that of its name."""
    with state.lock:
        if group is None:
            state.adopted[comm.name] = comm
        else:
            state.by_process_group[group] = comm


def _forget_default(comm: BaseGroup) -> None:
    with state.lock:
        if state.default is comm:
            state.default = None
            state.was_closed = True
            world = default_of_torch()
            state.world_then = None if world is None else weakref.ref(world)
            _C.set_default_group(None)


def forget_closed() -> None:
    """Drop the groups that were closed; those that could not be are for another `destroy`."""
    with state.lock:
        for group in [one for one in state.subgroups if one.closed]:
            state.subgroups.discard(group)
        for key in [key for key, one in state.by_process_group.items() if one.closed]:
            del state.by_process_group[key]


def default_group(timeout_s: Limit = None) -> BaseGroup:
    """Return the default group; made at its first use, within a limit in seconds."""
    if (comm := state.default) is not None and not makers.is_busy(DEFAULT):
        return comm
    settings = resolve(None, None).made_within(timeout_s)
    with makers.hold(DEFAULT, DEFAULT, settings.making_s):
        if (comm := state.default) is None:
            world = _require_not_closed()
            comm = group_of_launcher(settings) if world is None else stand_in_for(world, settings)
            set_default(comm)
        return comm


def _require_not_closed() -> ProcessGroup | None:
    """Return torch's default group; UsageError once ours was closed, unless torch's is new."""
    world = default_of_torch()
    old = state.world_then and state.world_then()
    if state.was_closed and (world is None or world is old):
        raise UsageError(_CLOSED)
    return world


def place_in_default() -> tuple[int, int]:
    """Return this rank and the number of ranks of the default group, without making it.

    Raises:
        UsageError: Nothing names the ranks, or the group was destroyed.
    """
    if (comm := state.default) is not None:
        return comm.rank, comm.world_size
    if (world := _require_not_closed()) is not None:
        return world.rank(), world.size()
    launch = _launch()
    return launch.rank, launch.world_size


def communicator_of(group: object, timeout_s: Limit = None) -> BaseGroup | None:
    """Return the communicator that `group=` means, or None if this rank is not in it.

    `timeout_s` is the limit of the call that needs it, which holds if it has to be made, too.
    """
    if group is None:
        return default_group(timeout_s)
    if isinstance(group, BaseGroup):
        return group if group.is_member else None
    if isinstance(group, ProcessGroup):
        return stand_in_for(group, timeout_s=timeout_s)
    if group == NON_MEMBER:  # torch's own
        return None
    raise UsageError(
        f"group must be a fastcoll.Group or a torch process group, not {type(group).__name__}"
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
    """Return the group rank for a rank argument, which is global with a torch process group.

    Args:
        group: The call's argument `group`.
        rank: The call's argument `name`, or None.
        name: "src" or "dst".
        group_rank: The call's argument `group_src` or `group_dst`: a group rank for any group.
        default: The group rank where neither is given.
    """
    if group_rank is not None:
        if rank is not None:
            raise UsageError(f"give {name} or group_{name}, not both")
        return group_rank
    if rank is None:
        if default is None:
            raise UsageError(f"{name} is missing: which rank?")
        rank = default
    if not _is_torchs(group):
        return rank
    ranks = _ranks_of(group)
    if rank not in ranks:
        raise UsageError(f"{name}={rank}: the group has the global ranks {ranks}")
    return ranks.index(rank)


def source_in(group: GroupLike, src: int | None, group_src: int | None = None) -> int | None:
    """Return the group rank of a sender; None is any sender."""
    return None if src is None and group_src is None else rank_in(group, src, "src", group_src)


def named_rank(group: GroupLike, rank: int) -> int:
    """Convert a group rank to a global rank if `group` is a torch process group."""
    return _ranks_of(group)[rank] if _is_torchs(group) else rank


def _is_torchs(group: GroupLike) -> TypeGuard[ProcessGroup]:
    # Ours first: torch's own check may import a module, which an ending interpreter can't.
    ours = group is None or isinstance(group, BaseGroup)
    return not ours and isinstance(group, ProcessGroup)


def nothing(async_op: bool) -> Work | None:
    """Return the result of a call on a rank that is not in its group: a Work is complete."""
    return completed([]) if async_op else None


def issue(group: GroupLike, call: AnyCall, name: str = "") -> Work | None:
    """Start a call in the group that it means, or nothing if this rank is not in that group.

    `name`: the function that was called, if it is not named like the verb.
    """
    comm = member_of(group, name or call.verb.name, timeout_s=call.timeout_s, stacklevel=4)
    return nothing(call.async_op) if comm is None else comm.issue(call)
