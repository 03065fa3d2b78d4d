# SPDX-License-Identifier: Apache-2.0
"""The backend "fastcoll" of torch.distributed.

Decides how a group is made when torch asks for one. `import fastcoll` registers the backend, and so
does torch where a program names it. It runs DDP, FSDP2 and DTensor. Must not know the verbs of the
groups.

The Python process group runs on every torch from 2.11 on and knows every verb. The C++ backend
(c10d_backend.cpp) is compiled against the installed torch, as its binary fits no other. It runs
calls whose plan is known, and sends and receives, and passes the rest on. Python can't have three
of its features: several devices in one group, torch's wrapper under TORCH_DISTRIBUTED_DEBUG=DETAIL,
a DDP bucket without the GIL. All ranks of a group use it or none, as that wrapper makes calls of
its own. Both make the same events of torch's profiler. A group that stands in for Gloo gives them
Gloo's names. PyTorch's own cases that pass on Gloo pass on both (tests/torch/torch_suite.py).

DDP's buckets are symmetric tensors. DDP asks a compiled backend for their memory if
DDP_DISABLE_COMM_MEM is 0. The default of torch is 1, so the first group sets it to 0 where it is
not set and there is no GPU. With GPUs NCCL would be asked, too. All ranks make the same buckets in
the same order, as a collective allocation needs. Ranks then reduce in place: no copy into staging
takes CPU time from the backward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import fastcoll_autoload
from fastcoll import env
from fastcoll.api.groups import adopt, existing_communicator
from fastcoll.calls.group import BaseGroup
from fastcoll.group.communicator import Communicator
from fastcoll.integrations import c10d_build
from fastcoll.integrations.torch_arguments import limit_by_torch, whole_milliseconds
from fastcoll.integrations.torch_base import NAME, BaseProcessGroup, connect_ranks
from fastcoll.integrations.torch_ddp import name_in_logs, serve_ddp
from fastcoll.integrations.torch_functional import serve_python_groups
from fastcoll.integrations.torch_group import FastcollProcessGroup
from fastcoll.integrations.torch_profile import ProfiledProcessGroup


@dataclass(frozen=True)
class Prepared:
    """A group that torch is about to make: its ranks are connected."""

    comm: BaseGroup  # the group that will carry out its calls
    # The compiled backend, if all ranks have it and it can serve such a group.
    compiled: ModuleType | None
    events: str = NAME  # whose names its calls have in a profile: NAME or GLOO


# By the group's name.
prepared: dict[str, Prepared] = {}


def _make(opts: Any, pg_options: object) -> FastcollProcessGroup | dist.Backend:
    """Make the group that torch asks for; called on its members. Collective."""
    del pg_options
    if (made := prepared.pop(opts.group_id, None)) is None:
        rank, world_size, limit_s = opts.group_rank, opts.group_size, limit_by_torch(opts.timeout)
        comm = connect_ranks(opts.store, rank, world_size, limit_s, opts.group_id)
        made = Prepared(comm, find_compiled(comm, limit_s))
    backend = _serve(opts.store, made, opts.global_ranks_in_group)
    adopt(made.comm)
    return backend


def make_backend(
    comm: BaseGroup, store: dist.Store, timeout_s: float, events: str = NAME
) -> FastcollProcessGroup | dist.Backend:
    """Return torch's side of a group: compiled where all ranks have that. Collective."""
    return _serve(store, Prepared(comm, find_compiled(comm, timeout_s), events))


def find_compiled(comm: BaseGroup, timeout_s: float) -> ModuleType | None:
    """Return the compiled backend, if all ranks of a group can have it. Collective.

    Raises:
        UsageError: FASTCOLL_TORCH_BACKEND has no such value; the group is closed.
    """
    try:
        env.TORCH_BACKEND.get()  # an error for every group, also where it decides nothing
        if isinstance(comm, Communicator):  # the compiled backend has the core of one node
            return _of_all_ranks(comm, timeout_s)
    except BaseException:
        comm.close()
        raise
    return None


def _serve(
    store: dist.Store, made: Prepared, global_ranks: Sequence[int] | None = None
) -> FastcollProcessGroup | dist.Backend:
    """Return what torch gets of a group; torch names no ranks of its default group."""
    comm, compiled = made.comm, made.compiled
    kind = ProfiledProcessGroup if compiled is None else FastcollProcessGroup
    group = kind(comm, store, made.events)
    group.is_default = global_ranks is not None and not global_ranks
    group.global_ranks = global_ranks or ()
    if compiled is None:
        serve_python_groups()
        return group
    backend: dist.Backend = compiled.FastcollBackend(group, comm, comm.rank, comm.world_size)
    if torch.cuda.device_count() == 0:  # else the setting holds for NCCL, too, which is torch's
        env.allow_ddp_comm_memory()
    return backend


def process_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, name: str = "own store"
) -> ProcessGroup:
    """Make a torch process group on a store of one's own, beside torch's world. Collective.

    torch.distributed need not be initialised, and the group may have more ranks than its world. The
    functions of torch.distributed and of fastcoll take it as `group=`. It has CPU tensors, and CUDA
    tensors where torch has CUDA. Its `shutdown()` ends it.

    Args:
        store: Where the ranks meet. It must reach all of them and is kept by the group. A second
            group on one store needs a `PrefixStore` of its own.
        rank: This process's rank in the group.
        size: The number of ranks.
        timeout: Limit of the making, and of calls that give none.
        name: The group's name in errors, the same on all ranks.

    Returns:
        A process group of torch, whether or not the compiled backend serves it.

    Raises:
        UsageError: `rank` is no rank of a group of `size`.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died on the way.
    """
    limit_s = timeout.total_seconds()
    comm = connect_ranks(store, rank, size, limit_s, name)
    backend = make_backend(comm, store, limit_s)
    if isinstance(backend, ProcessGroup):
        group: Any = backend
    else:
        group = ProcessGroup(store, rank, size)
        custom = ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.version.cuda else ("cpu",):
            group._register_backend(torch.device(device), custom, backend)
        group._set_default_backend(custom)
    group._set_group_name(name)
    adopt(comm, group)
    return cast(ProcessGroup, group)


def _make_part(
    whole: BaseProcessGroup, store: dist.Store, rank: int, world_size: int, *terms: Any
) -> FastcollProcessGroup | dist.Backend:
    """Make a part of a group, for torch's `split_group`: as its whole is. Collective.

    The setting may have changed since, and C++ can't take a part that is Python's.
    """
    name, limit_s = terms
    comm = connect_ranks(store, rank, world_size, limit_s, name)
    adopt(comm)
    if isinstance(whole, ProfiledProcessGroup):  # not the half of a compiled one
        return ProfiledProcessGroup(comm, store, whole.events)
    return _serve(store, Prepared(comm, c10d_build.loaded(), whole.events))


BaseProcessGroup.make_part = _make_part
BaseProcessGroup.make_backend = staticmethod(make_backend)


def _of_all_ranks(comm: Communicator, timeout_s: float) -> ModuleType | None:
    """Return the compiled backend if every rank of a group has it, else None. Collective.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks the calls of a compiled backend by calls of
    its own, which all ranks must make. The limit adds the time that a peer may take to compile. A
    peer that is gone meanwhile is noticed, as by any call.
    """
    module = c10d_build.load()
    mine, all_have = np.array([module is not None], np.int64), np.empty(comm.world_size, np.int64)
    comm.all_gather_into_tensor(all_have, mine, timeout_s=timeout_s + c10d_build.LIMIT_S)
    if not all_have.all() and comm.rank == all_have.argmin():  # one rank is enough to say it
        c10d_build.report_failure()
    return module if all_have.all() else None


def register() -> None:
    """Make "fastcoll" a backend of torch.distributed; once is enough."""
    if NAME.upper() not in dist.Backend._plugins:
        # torch's ShardedTensor makes tensors on the last of the devices.
        devices = ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=devices)
        _extend_monitored_barrier()
        _records_itself()
        serve_ddp()
        _follow_torchs_timeouts()
        _count_calls()
        _take_shrunk_groups()
        _end_batches_that_fail()
        fastcoll_autoload.autoload()  # where torch is told to load nothing
    name_in_logs()


def make_default() -> None:
    """Let torch.distributed take fastcoll for CPUs where a program names no backend.

    For `init_process_group()` and `init_device_mesh("cpu", ...)` without a backend; on a machine
    with an accelerator torch takes that one's. Call it on all ranks, before they make a group.
    """
    dist.Backend.default_device_backend_map["cpu"] = NAME


def _extend_monitored_barrier() -> None:
    """Let dist.monitored_barrier take groups of this backend; torch refuses all but Gloo's."""
    torchs = dist.monitored_barrier

    @wraps(torchs)
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        ours = dist.group.WORLD if group is None else group
        if isinstance(ours, ProcessGroup) and dist.get_backend(ours) == NAME:
            limit = timeout if timeout is None else whole_milliseconds(timeout)
            ours.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            torchs(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _follow_torchs_timeouts() -> None:
    """Let `_set_pg_timeout` reach fastcoll: torch knows Gloo's and NCCL's backends only.

    A Communicator that stands for a group of another backend gets the new limit, too.
    """
    torchs = dist.distributed_c10d._set_pg_timeout

    @wraps(torchs)
    def set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
        asked = dist.group.WORLD if group is None else group
        if not isinstance(asked, ProcessGroup):
            torchs(timeout, group)
            return
        backends: list[Any] = [asked._get_backend(device) for device in asked._device_types]
        ours = [backend for backend in backends if backend.name() == NAME]
        for backend in ours:
            backend.set_timeout(timeout)
        if (comm := existing_communicator(asked)) is not None:
            comm.set_timeout(timeout)
        if len(ours) < len(backends) or not backends:
            torchs(timeout, group)

    dist.distributed_c10d._set_pg_timeout = set_pg_timeout


def _count_calls() -> None:
    """Let a compiled group tell its sequence number: torch asks its own backends only."""
    for method in ("_set_sequence_number_for_group", "_get_sequence_number_for_group"):
        if torchs := getattr(ProcessGroup, method, None):  # torch 2.14 has no "_set"
            setattr(ProcessGroup, method, _prefer_fastcoll(method, torchs))


def _prefer_fastcoll(method: str, torchs: Any) -> Any:
    @wraps(torchs)
    def ask(self: ProcessGroup) -> Any:
        backends: list[Any] = [self._get_backend(device) for device in self._device_types]
        if backends and all(backend.name() == NAME for backend in backends):
            return getattr(backends[0], method)()
        return torchs(self)

    return ask


def _take_shrunk_groups() -> None:
    """Let `dist.shrink_group` return a Python group; torch wraps a compiled backend itself."""
    c10d: Any = dist.distributed_c10d
    torchs = c10d._create_shrunk_process_group

    @wraps(torchs)
    def create(
        backend: object, ranks: list[int], metadata: dict[str, Any], is_default: bool
    ) -> Any:
        if isinstance(backend, FastcollProcessGroup):
            backend._set_group_name(metadata["new_group_name"])
            backend._set_group_desc("default:shrunken" if is_default else "shrunk")
            group = backend
        else:
            group = torchs(backend, ranks, metadata, is_default)
        if (comm := getattr(backend, "communicator", None)) is not None:
            adopt(comm, group)
        return group

    c10d._create_shrunk_process_group = create


def _end_batches_that_fail() -> None:
    """Let a batch end in which a call raises: torch leaves it open, and later calls do nothing.

    Gloo has no batches of sends and receives, so its programs go on after such an error.
    """
    c10d: Any = dist.distributed_c10d
    torchs = c10d._coalescing_manager

    @contextmanager
    @wraps(torchs)
    def coalescing_manager(
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[Any]:
        asked: Any = group or dist.group.WORLD
        with torchs(asked, device, *args, **kwargs) as batch:
            try:
                yield batch
            except BaseException:
                c10d._world.pg_coalesce_state.pop(asked, None)
                # Else the group would keep the tensors of its later calls.
                if device is not None and asked._get_backend(device).name() == NAME:
                    asked._end_coalescing(device)
                raise

    setattr(dist, "_coalescing_manager", coalescing_manager)  # noqa: B010
    c10d._coalescing_manager = coalescing_manager


def _records_itself() -> None:
    """Keep torch's flight recorder off: fastcoll has its own, and a group of it can't take torch's.

    From torch 2.15 on it is attached to every group whose backend is not listed here.
    """
    listed: set[str] | None = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if listed is not None:
        listed.add(NAME)
