# SPDX-License-Identifier: Apache-2.0
"""The functions of the module that move Python objects, and the barrier that names missing ranks.

Decides the group of a call and its ranks; the rest is in the group's methods.
"""

from datetime import timedelta
from typing import Any

from fastcoll.api.groups import GroupLike, member_of, named_rank, rank_in, source_in


def all_gather_object(
    object_list: list[Any], obj: Any, group: GroupLike = None, weights_only: bool = False
) -> None:
    """Gather a picklable object from every rank, on every rank. Collective.

    Args:
        object_list: The output: a list of as many elements as the group has ranks.
        obj: This rank's object.
        group: A Group or a torch process group; None is the default group.
        weights_only: Pack with `torch.save` and unpack with `torch.load(weights_only=True)`, which
            refuses objects that could run code. False is `pickle`, which accepts them. The same on
            all ranks.

    Raises:
        pickle.UnpicklingError: With `weights_only`, an object is of a kind that torch refuses.
        UsageError: The ranks differ in `weights_only`.
    """
    comm = member_of(group, "all_gather_object")
    if comm is not None:
        comm.all_gather_object(object_list, obj, weights_only=weights_only)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    *,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Copy one rank's list of picklable objects to all others. Collective.

    Args:
        object_list: The list to send on rank `src`. On the others, a list of that length, whose
            elements are replaced.
        src: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_src` is given.
        group: A Group or a torch process group; None is the default group.
        device: Ignored; objects are always on the CPU.
        group_src: In place of `src`: a rank in the group, also for a torch process group.
        weights_only: See `all_gather_object`, also for the errors.
    """
    del device
    comm = member_of(group, "broadcast_object_list")
    if comm is not None:
        comm.broadcast_object_list(
            object_list, rank_in(group, src, "src", group_src, default=0), weights_only=weights_only
        )


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gather a picklable object from every rank, on rank `dst`. Collective.

    Args:
        obj: This rank's object.
        object_gather_list: On rank `dst`, the output; None on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_dst` is given.
        group: A Group or a torch process group; None is the default group.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.
        weights_only: See `all_gather_object`, also for the errors.
    """
    comm = member_of(group, "gather_object")
    if comm is not None:
        comm.gather_object(
            obj,
            object_gather_list,
            rank_in(group, dst, "dst", group_dst, default=0),
            weights_only=weights_only,
        )


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Give every rank its object of a list on rank `src`. Collective.

    Args:
        scatter_object_output_list: Its first element becomes this rank's object.
        scatter_object_input_list: On rank `src`, an object for each rank; None on the others.
        src: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_src` is given.
        group: A Group or a torch process group; None is the default group.
        group_src: In place of `src`: a rank in the group, also for a torch process group.
        weights_only: See `all_gather_object`, also for the errors.
    """
    comm = member_of(group, "scatter_object_list")
    if comm is not None:
        comm.scatter_object_list(
            scatter_object_output_list,
            scatter_object_input_list,
            rank_in(group, src, "src", group_src, default=0),
            weights_only=weights_only,
        )


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: object = None,
    *,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send a list of picklable objects to another rank, as `send` does with tag 0.

    Args:
        object_list: The objects to send.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        group: A Group or a torch process group; None is the default group.
        device: Ignored; objects are always on the CPU.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.
        use_batch: Changes nothing: it is how NCCL connects.
        weights_only: See `all_gather_object`, also for the errors.
    """
    del device, use_batch
    comm = member_of(group, "send_object_list")
    if comm is not None:
        comm.send_object_list(
            object_list, rank_in(group, dst, "dst", group_dst), weights_only=weights_only
        )


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: object = None,
    *,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receive a list of objects from another rank, as `recv` does with tag 0.

    Args:
        object_list: The output, a list of the length that is sent; its elements are replaced.
        src: Rank in the group; the global rank if `group` is a torch process group; None is
            the first sender.
        group: A Group or a torch process group; None is the default group.
        device: Ignored; objects are always on the CPU.
        group_src: In place of `src`: a rank in the group, also for a torch process group.
        use_batch: Changes nothing: it is how NCCL connects.
        weights_only: See `all_gather_object`, also for the errors.

    Returns:
        The rank that sent them; -1 if this rank is not in the group.
    """
    del device, use_batch
    comm = member_of(group, "recv_object_list")
    if comm is None:
        return -1
    return named_rank(
        group,
        comm.recv_object_list(
            object_list, source_in(group, src, group_src), weights_only=weights_only
        ),
    )


def monitored_barrier(
    group: GroupLike = None, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank makes this call; the error names all missing ranks. Collective.

    Args:
        group: A Group or a torch process group; None is the default group.
        timeout: Limit in seconds; None takes the group's.
        wait_all_ranks: Changes nothing: missing ranks are always named together.

    Raises:
        CollectiveTimeout: Ranks are missing; `ranks` holds them.
    """
    comm = member_of(group, "monitored_barrier", timeout_s=timeout)
    if comm is not None:
        comm.monitored_barrier(timeout, wait_all_ranks)
