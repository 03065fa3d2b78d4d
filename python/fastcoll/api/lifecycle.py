# SPDX-License-Identifier: Apache-2.0
"""How groups begin and end: init, new_group, shrink and destroy.

Decides how the default group is made. Must not know the use of the groups.
"""

from collections.abc import Mapping, Sequence

from torch.distributed import ProcessGroup, Store

from fastcoll.api.groups import (
    DEFAULT,
    GroupLike,
    communicator_of,
    default_group,
    default_of_torch,
    existing_communicator,
    forget_closed,
    group_of_launcher,
    makers,
    place_in_default,
    set_default,
    stand_in_for,
    state,
)
from fastcoll.api.making import connect, member
from fastcoll.bootstrap.exchange import StoreExchange
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.limits import Limit, group_limit_s, one_limit
from fastcoll.calls.pool import close_pool, end_pool
from fastcoll.calls.settings import Settings, resolve
from fastcoll.errors import UsageError
from fastcoll.group.communicator import close_all
from fastcoll_autoload.ends import at_the_end

# The arguments of `init` that a group keeps from its making.
_OF_MAKING = ("timeout_s", "numerics", "carrier", "gpu_timeout_s", "gpu_report_s")


def init(
    group: ProcessGroup | BaseGroup | None = None,
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: Limit = None,
    numerics: str | None = None,
    carrier: str | None = None,
    gpu_timeout_s: Limit = None,
    gpu_report_s: Limit = None,
) -> BaseGroup:
    """Make the default group. Collective: every rank must call this.

    Args:
        group: A torch process group of any backend whose ranks form the group, or a communicator
            that exists. None takes torch's default group if there is one, else the variables of
            `fastcoll run`, torchrun, mpirun or srun. Ranks of mpirun on several machines need
            MASTER_ADDR and MASTER_PORT, too.
        store: A torch.distributed store that all ranks can reach; with `rank` and `world_size`,
            in place of `group`.
        rank: This process's rank in the world of `store`.
        world_size: Number of ranks.
        timeout_s: Limit of every wait, in seconds or a timedelta; None takes FASTCOLL_TIMEOUT_S,
            else 30 s. A group that exists keeps its own: one of torch's has its `timeout=`.
        numerics: "same_bits" or "fast". None takes FASTCOLL_NUMERICS, else "same_bits"; between
            nodes "fast" for half and narrower types, whose same bits would cost bytes on the wire.
        carrier: The transport of bytes between nodes: "gloo", "mpi" (through mpi4py in processes
            that mpirun started), or another backend that is registered with torch.distributed.
            None takes FASTCOLL_CARRIER, else Gloo. Tensors on GPUs always go by NCCL. With "nccl"
            tensors on CPUs go by Gloo. Unknown names are refused on one node, too.
        gpu_timeout_s: Limit of waits in kernels, the same on all ranks. None takes a `timeout_s`
            that is given, FASTCOLL_GPU_TIMEOUT_S, FASTCOLL_TIMEOUT_S, else 10 minutes.
        gpu_report_s: After such a wait a line of the log names the late rank, once. None takes
            FASTCOLL_GPU_REPORT_S, else 30 s.

    Returns:
        The group, which is a context manager: leaving it closes it.

    Raises:
        UsageError: There is a default group already, nothing names the ranks, or a group that
            exists is given an argument that only making one takes. Or that group was destroyed.
        CollectiveTimeout: A rank did not come.
    """
    settings = resolve(timeout_s, numerics, carrier, gpu_timeout_s, gpu_report_s)
    values = (timeout_s, numerics, carrier, gpu_timeout_s, gpu_report_s)
    given = dict(zip(_OF_MAKING, values, strict=True))
    with makers.hold(DEFAULT, DEFAULT, settings.timeout_s):
        if state.default is not None:
            raise UsageError("fastcoll is initialised already; call fastcoll.destroy() first")
        is_by_store = store is not None or rank is not None or world_size is not None
        if is_by_store and not isinstance(group, BaseGroup):
            comm = _on_store(group, store, rank, world_size, settings)
        elif (asked := default_of_torch() if group is None else group) is not None:
            comm = _of_group(asked, settings, given)
        else:
            comm = group_of_launcher(settings)
        set_default(comm)
        return comm


def _on_store(
    group: object, store: Store | None, rank: int | None, world_size: int | None, settings: Settings
) -> BaseGroup:
    if group is not None or store is None or rank is None or world_size is None:
        raise UsageError("init() takes a group, or store, rank and world_size together")
    return member(connect(StoreExchange(store, rank, world_size), "world", settings))


def _of_group(group: object, settings: Settings, given: Mapping[str, object]) -> BaseGroup:
    """Return a communicator that exists, or the one that stands for a torch process group."""
    if isinstance(group, BaseGroup):
        if not group.is_member:
            raise UsageError(f'this rank is not in the group "{group.name}"')
        if group.closed:  # as the default group it could not be destroyed once more
            raise UsageError(f'group "{group.name}" was destroyed')
        _refuse_for(group, given)
        return group
    if not isinstance(group, ProcessGroup):
        raise UsageError(f"group must be a torch process group, not {type(group).__name__}")
    if (existing := existing_communicator(group)) is not None:
        _refuse_for(existing, given)
    return stand_in_for(group, settings)


def _refuse_for(group: BaseGroup, given: Mapping[str, object]) -> None:
    """Raise UsageError if something is given that a group has had since it was made."""
    if names := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f'the group "{group.name}" exists already and keeps what it was made with: give '
            f"{' and '.join(names)} to what makes it (init_process_group takes timeout=), or to "
            "new_group()"
        )


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    timeout: Limit = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    numerics: str | None = None,
) -> BaseGroup:
    """Make a group of some ranks of the default group. Collective over the default group.

    Args:
        ranks: Ranks of the default group, the same on every rank; they are numbered anew in
            ascending order. None takes all.
        timeout: Limit of its waits and of its making, a timedelta or seconds, as torch.distributed
            takes it; None takes the default group's.
        backend: None or "fastcoll", as fastcoll makes no other groups.
        timeout_s: The same as `timeout`, in seconds.
        numerics: None takes the default group's.

    Returns:
        The new group. A rank that is not in it gets one with `is_member` False, whose verbs do
        nothing. That equals torch's GroupMember.NON_GROUP_MEMBER, but is not that integer.

    Raises:
        UsageError: `ranks` are not ranks of the default group, or another backend is asked for.
        DesyncError: The ranks gave different `ranks`.
    """
    refuse_backend(backend, "new_group")
    limit = one_limit(timeout, timeout_s)
    group = default_group(limit).new_group(ranks, timeout_s=limit, numerics=numerics)
    if group.is_member:
        with state.lock:
            state.subgroups.add(group)
    return group


def shrink(
    group: ProcessGroup | BaseGroup | None = None, *, timeout_s: float | None = None
) -> BaseGroup:
    """Make a new group of the ranks that are left of a broken one. Collective over those.

    For use after PeerLostError, CollectiveTimeout, DesyncError or an abort. Every rank that is left
    calls this and gets the same new group. Its ranks are numbered anew in their old order. It
    shares no memory with the old group. If nothing broke the old group yet, this call ends it for
    all ranks, and all ranks must make the call.

    The old group is closed, also if this raises. Its symmetric tensors keep their values and become
    ordinary tensors, in memory that no other rank reaches any more. Outputs of the call that failed
    are undefined. If the old group was the default, the new one becomes the default.

    A rank that dies while the others agree may still be counted in. Then the new group's first
    call raises PeerLostError, and shrink() helps again.

    Over several nodes the ranks of each node agree first. Then the nodes agree over the store,
    which must have survived. A node with a rank that the error named, and without any rank that
    calls this, is waited for 5 s at most. Between these two steps the first surviving rank of a
    node speaks for its node. If it dies or stops there, the other ranks of its node raise
    PeerLostError or CollectiveTimeout, and have no group any more.

    Args:
        group: The broken group; None takes the default one.
        timeout_s: Limit of the wait for a rank that lives and does not come, such as a stopped one.
            Such a rank is left out. The shortest limit of all ranks counts; None takes the group's.

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
    was_default = old is state.default
    with makers.hold(DEFAULT if was_default else old, old.name, group_limit_s(timeout_s)):
        new: BaseGroup = old.shrink(timeout_s=timeout_s)
        if was_default:
            set_default(new)
        else:
            with state.lock:
                state.subgroups.add(new)
        return new


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Limit = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
) -> None:
    """Make the default group, with torch.distributed's arguments. Collective; see `init`.

    Args:
        backend: None or "fastcoll", as fastcoll makes no other groups.
        init_method: None or "env://", as torchrun sets the environment; else give a store.
        timeout: Limit of every wait, a timedelta or seconds; None takes FASTCOLL_TIMEOUT_S, else
            30 s, where torch.distributed takes 30 minutes.
        world_size: Number of ranks, with `store`.
        rank: This process's rank, with `store`.
        store: A store that all ranks can reach; None takes torchrun's.
        group_name: Ignored, as by torch.distributed.
        pg_options: Ignored: they are those of other backends.
        device_id: Ignored: a group takes tensors on CPUs and on GPUs.

    Raises:
        UsageError: There is a default group already, nothing names the ranks, or another backend
            or another `init_method` is asked for.
        CollectiveTimeout: A rank did not come.
    """
    del group_name, pg_options, device_id
    refuse_backend(backend, "init_process_group")
    if init_method not in (None, "env://"):
        raise UsageError(
            f"init_process_group takes no init_method={init_method!r}: start the program with "
            "torchrun, or give store=, rank= and world_size="
        )
    if store is None:
        init(timeout_s=timeout)
    else:
        init(store=store, rank=rank, world_size=world_size, timeout_s=timeout)


def refuse_backend(backend: str | None, function: str) -> None:
    """Raise UsageError for a backend that is not fastcoll's."""
    if backend not in (None, "fastcoll"):
        raise UsageError(
            f"{function} makes groups of fastcoll only, not of backend={backend!r}: leave it out, "
            'or write "fastcoll". torch.distributed makes those of other backends'
        )


def destroy_process_group(group: ProcessGroup | BaseGroup | int | None = None) -> None:
    """Close a group; None closes all of them, as `destroy` does. Not collective."""
    if group is None:
        destroy()
    elif isinstance(group, ProcessGroup):
        if (existing := existing_communicator(group)) is not None:
            existing.close()
    elif (comm := communicator_of(group)) is not None:
        comm.close()


def is_initialized() -> bool:
    """Return whether there is a default group; a call without a group makes it."""
    return state.default is not None


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank in a group; -1 if it is not in it. Not collective.

    The default group need not be made yet: then its launcher, or torch.distributed, tells the rank.

    Raises:
        UsageError: Nothing names the ranks, or the default group was closed.
    """
    return _place(group)[0]


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of a group's ranks; -1 if this one is not in it. See `get_rank`."""
    return _place(group)[1]


def _place(group: GroupLike) -> tuple[int, int]:
    if group is None:
        return place_in_default()
    if isinstance(group, ProcessGroup):
        return group.rank(), group.size()
    comm = communicator_of(group)
    return (-1, -1) if comm is None else (comm.rank, comm.world_size)


def destroy() -> None:
    """Close the default group, its subgroups and the groups of torch process groups.

    Calls that were queued are completed first. Where there is none of them this does nothing. Once
    the default group was closed, calls without a group are errors until `init()` makes another one,
    or until torch.distributed has a new default group.
    """
    with state.lock:
        groups = [*state.subgroups, *state.by_process_group.values()]
        if state.default is not None:
            groups.append(state.default)
    try:
        for group in groups:  # without the lock: queued calls may wait for peers
            group.close()
    finally:
        forget_closed()
    close_pool()


# The pool ends first: its calls need the groups.
at_the_end.extend([close_all, end_pool])
