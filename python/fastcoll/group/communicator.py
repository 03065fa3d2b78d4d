# SPDX-License-Identifier: Apache-2.0
"""One group of ranks: from a user's call to what runs.

Decides whether a call runs at once or in the queue, on CPUs or on a GPU, and how a group comes and
goes. Must not know torchrun, default groups or torch's process groups, nor how plans are chosen.
"""

import operator
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

import numpy as np
import torch
from torch.distributed import Store

from fastcoll.bootstrap import single_copy
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import BytesExchange, Exchange, StoreExchange
from fastcoll.bootstrap.farewell import KINDS
from fastcoll.bootstrap.identity import shared_cpus
from fastcoll.bootstrap.join import Peers, checked_members
from fastcoll.bootstrap.shrink import shrink
from fastcoll.calls.arrays import Array, ArrayView, count_writes
from fastcoll.calls.limits import call_limit_s, group_limit_s
from fastcoll.calls.lists import ListCall, ListOperands, check_list
from fastcoll.calls.objects import ObjectMethods
from fastcoll.calls.parts import PartsCall, PartsOperands, check_parts
from fastcoll.calls.settings import Settings, resolve
from fastcoll.calls.sites import at_call_site, tracing
from fastcoll.calls.tensors import Call, Operands, check
from fastcoll.calls.transfers import Transfers
from fastcoll.calls.work import CallQueue, Work
from fastcoll.choose.planner import Planner
from fastcoll.choose.tuning import Tuning
from fastcoll.errors import FastcollError, UnsupportedError, UsageError
from fastcoll.group.gpu_side import CheckedCall, GpuSide
from fastcoll.machine import gpu
from fastcoll.memory.heap import MOST_BYTES, SymmetricHeap
from fastcoll.memory.region import create_arena, create_region, require_descriptors, require_room
from fastcoll.memory.symmetric import tensor_on
from fastcoll.native import _C
from fastcoll.text import say
from fastcoll.types import FROM_TORCH, SingleCopy, Verb

# Makes a group of one node or of several from an exchange, a name, settings, members and a table.
Make = Callable[[Exchange, str, Settings, Sequence[int], Tuning | None], Any]
_living: weakref.WeakSet["Communicator"] = weakref.WeakSet()

if TYPE_CHECKING:
    from fastcoll.gpu.group import DeviceGroup


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


class Communicator(_C.Group, ObjectMethods):
    """A group of ranks of one node. Make one with `fastcoll.init` or `new_group`.

    The verbs take the arguments of the functions of the same name, without `group`. A
    communicator is a context manager: leaving it closes it.
    """

    make: ClassVar[Make]  # set by api/making.py, which knows both kinds of group

    def __init__(
        self,
        name: str,
        settings: Settings,
        peers: Peers,
        tuned: Tuning,
        region_fds: list[int],
        may_copy: tuple[SingleCopy, str] | None = None,
    ) -> None:
        """Take over the connections and regions of connected ranks.

        Whether they may copy out of each other's private memory is tried, unless `may_copy` tells.
        """
        mesh = peers.mesh
        num_cpus = shared_cpus(peers.hellos)
        super().__init__(
            mesh.rank,
            mesh.world_size,
            name,
            region_fds,
            mesh.socket_fds,
            mesh.pidfds,
            settings.timeout_s,
            num_cpus,
            mesh.pids,
            tracing(),
        )
        try:
            self.single_copy, self.single_copy_report = may_copy or single_copy.agree(
                super().try_single_copy
            )
        except BaseException:
            super().close()
            raise
        self.on_close: Callable[[], None] | None = None
        self._settings = settings
        self._mesh = mesh
        self._hellos = peers.hellos
        self.planner = Planner(self, settings, tuned, num_cpus, self.single_copy)
        self._queue = CallQueue(self)
        self._gpus = GpuSide(self, settings, self.planner)
        self._transfers = Transfers(self, self._gpus.transfer)
        self._heap = SymmetricHeap(self, mesh.rank, mesh.world_size)
        self._num_exchanges = 0
        self._num_groups = 0
        self._num_shrinks = 0  # from the first group to this one
        self._closed = False
        _living.add(self)

    # ---- calls -----------------------------------------------------------------------------------

    def issue(self, call: Call | PartsCall | ListCall) -> Work | None:
        """Check, plan and start a call; every call that is not on the C++ fast path comes here."""
        return self.issue_all((call,), call.async_op)

    def issue_all(
        self, calls: Iterable[Call | PartsCall | ListCall], async_op: bool
    ) -> Work | None:
        """Check and plan several calls, then start them as one: all of them, or none at all."""
        runs: list[Callable[[], None]] = []
        outputs: list[Array] = []
        on_gpus: list[CheckedCall] = []
        written: list[ArrayView] = []
        for call in calls:
            for operands in self._checked(call):
                written += operands.written()
                if not isinstance(operands, ListOperands) and operands.device >= 0:
                    on_gpus.append((call, operands))
                    continue
                limit_s = call_limit_s(call.timeout_s)
                plan = self.planner.plan(call, operands)
                runs.append(partial(operands.carry_out, self, plan, limit_s))
                if not isinstance(operands, ListOperands):
                    outputs += operands.outputs()
            if isinstance(call, ListCall):
                outputs += call.outputs
        if on_gpus and runs:
            raise UsageError("tensors on CPUs and on GPUs in one list: make two calls of them")
        count_writes(written)
        if on_gpus:
            return self._gpus.issue(on_gpus, async_op)
        run = runs[0] if len(runs) == 1 else partial(_run_all, runs)
        if self.traces:
            run = at_call_site(run)
        if not async_op and self._queue.idle():
            run()
            return None
        self.refuse_handler()  # whose wait would be one for itself
        work = self._queue.submit(run, outputs)
        if async_op:
            return work
        work.wait()
        return None

    def _checked(
        self, call: Call | PartsCall | ListCall
    ) -> Sequence[Operands | PartsOperands | ListOperands]:
        if isinstance(call, Call):
            return [check(call, self.rank, self.world_size)]
        if isinstance(call, PartsCall):
            return [check_parts(call, self.rank, self.world_size)]
        return check_list(call, self.rank, self.world_size)

    def check(self) -> None:
        """Raise what broke the group, if anything has; does not wait for a GPU."""
        if self._gpus.group is not None:
            self._gpus.group.check()
        else:
            super().check()

    def check_host(self) -> None:
        """Raise what broke the group on its CPUs; part of the GPU side's interface."""
        super().check()

    @property
    def tuning(self) -> str:
        """By which tuning table the group chooses its algorithms; or why by the model alone."""
        return self.planner.tuning.reason

    def gpu_report(self) -> str:
        """Return how the ranks reach each other's GPUs, or that no call was made there yet."""
        return self._gpus.report()

    @property
    def device_group(self) -> "DeviceGroup | None":
        """The group's side on its GPUs; None before its first call there."""
        return self._gpus.group

    # ---- symmetric tensors -----------------------------------------------------------------------

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """See `fastcoll.empty`."""
        extents: Sequence[Any] = size
        if len(size) == 1 and not isinstance(size[0], SupportsIndex):
            extents = size[0]
        try:
            shape = [operator.index(extent) for extent in extents]
        except TypeError:
            raise UsageError(f"a shape consists of integers, not {extents!r}") from None
        dtype = dtype or torch.get_default_dtype()
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype, not {dtype!r}")
        if dtype not in FROM_TORCH:
            raise UnsupportedError(f"symmetric tensors of {dtype} are not supported")
        if any(size < 0 for size in shape):
            raise UsageError(f"shape {tuple(shape)} has a negative size")
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > MOST_BYTES:
            raise UsageError(f"shape {tuple(shape)} of {dtype} has {num_bytes} bytes, far too many")
        place = torch.device(device or "cpu")
        if place.type == "cuda":
            gpu.require()
            index = torch.cuda.current_device() if place.index is None else place.index
            return self._gpus.on(index).empty(shape, dtype)
        if place.type != "cpu":
            raise UnsupportedError(f"symmetric tensors lie on CPUs or CUDA devices, not on {place}")
        block = self._heap.allocate(num_bytes)
        return tensor_on(block, shape, dtype, self, self._heap.release)

    def gather_words(self, words: list[int], limit_s: float | None = None) -> list[list[int]]:
        """Gather integers from all ranks. Collective; part of the heap's interface."""
        rows = np.empty((self.world_size, len(words)), dtype=np.int64)
        mine = np.array(words, np.int64)
        self.issue(Call(verb=Verb.all_gather, input=mine, output=rows, timeout_s=limit_s))
        result: list[list[int]] = rows.tolist()
        return result

    def add_shared_arena(self, num_bytes: int) -> int:
        """Add an arena and return its address. Collective; part of the heap's interface.

        Raises:
            DriverError: A rank has no room for it; the group can still be used.
        """
        require_room(num_bytes, self.world_size, self.gather_bytes)

        def make() -> int:
            self.check_host()  # who comes late would find what the others sent, and they gave up
            return create_arena(num_bytes)

        try:
            fds = self._exchange_fds(make)
            arena_idx = self.add_arena(fds, num_bytes)
        except BaseException as error:
            # The others may have got theirs: the heaps are not in step any more.
            text = f"the symmetric heap could not grow: {error}"
            if kind := KINDS.get(type(error)):  # one of them is to blame: the verdict names it
                self.fail(kind, text, getattr(error, "ranks", ()))
            self.poison(text)
            raise
        return self.arena_ptr(arena_idx)

    def exchange_fds(self, fd: int) -> list[int]:
        """Give every rank a copy of `fd` and return everybody's, by rank. Collective.

        Raises:
            DriverError: A rank has no room for them; on all of them. The group can still be used.
        """
        try:
            require_descriptors(self.world_size, self.gather_bytes)
        except BaseException:
            os.close(fd)
            raise
        return self._exchange_fds(lambda: fd)

    def _exchange_fds(self, make: Callable[[], int]) -> list[int]:
        self._num_exchanges += 1
        deadline = Deadline(self._settings.timeout_s)
        return self._mesh.exchange_fds(make, self._num_exchanges, deadline)

    @property
    def socket_fds(self) -> list[int]:
        """The sockets to the other ranks, by rank; -1 for this one."""
        return self._mesh.socket_fds

    # ---- life ------------------------------------------------------------------------------------

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float | None = None,
        numerics: str | None = None,
        name: str = "world",
    ) -> Any:
        """Make a group beside the default one, as `fastcoll.init` would. Collective."""
        exchange = StoreExchange(store, rank, world_size, name)
        return cls.make(exchange, name, resolve(timeout_s, numerics), (), None)

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        numerics: str | None = None,
    ) -> Any:
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
        exchange = BytesExchange(self, is_gone=self.peer_is_gone)
        name = f"{self.name}/{self._num_groups}"
        return type(self).make(exchange, name, settings, members, self.planner.tuning)

    def shrink(self, *, timeout_s: float | None = None) -> "Communicator":
        """See `fastcoll.shrink`; this group is closed, whatever comes of it."""
        limit_s = self._settings.timeout_s if timeout_s is None else group_limit_s(timeout_s)
        try:
            # Everybody is to leave the calls of this group, also of one that nothing broke so far.
            self.abort("it calls shrink()")
            self._queue.join()
            found = shrink(self._mesh, self, lambda: create_region(self.world_size), limit_s)
            peers = Peers(found.mesh, [self._hellos[rank] for rank in found.ranks])
            stem = self.name.removesuffix(f":{self._num_shrinks}")
            name = f"{stem}:{self._num_shrinks + 1}"
            # Without trying: what was agreed on holds, even if one of them dies on the way.
            may_copy = (self.single_copy, self.single_copy_report)
            group = Communicator(
                name, self._settings, peers, self.planner.tuning, found.region_fds, may_copy
            )
            group._num_shrinks = self._num_shrinks + 1
            return group
        finally:
            self.close()

    def abort(self, reason: str | None = None) -> None:
        """End the group from any thread or signal handler, with one verdict for all ranks.

        Not collective. Whoever waits in a call of the group, in this process and in every other,
        raises AbortedError with the reason within milliseconds, and so does every later call.
        A group that has a verdict already keeps it. The group is still to be closed.

        Raises:
            UsageError: The group was closed.
        """
        super().abort(reason or "no reason given")
        self._gpus.stop()

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

    @property
    def closed(self) -> bool:
        """Whether the group was closed."""
        return self._closed

    def close(self) -> None:
        """Leave the group; calls that were queued are completed first.

        Not collective, but peers that still wait for this rank raise PeerLostError. Symmetric
        tensors stay readable here.
        """
        if self._closed:
            return
        self.refuse_handler()
        self._queue.join()
        self._closed = True
        _living.discard(self)
        try:
            self._gpus.close()
        finally:
            super().close()
        if self.on_close is not None:
            self.on_close()

    destroy = close

    def forget_queue(self) -> None:
        """Start with an empty queue; for a forked child, which may only close the group."""
        self._queue = CallQueue(self)

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
        return f'<fastcoll.Communicator "{self.name}" rank {self.rank} of {self.world_size}{state}>'


def close_all() -> None:
    """Close every group of this process; what is broken already does not matter."""
    for group in list(_living):
        try:
            group.close()
        except FastcollError as error:
            say(f"closing {group!r}: {error}")


def _forget_queues() -> None:
    """Drop what a forked child inherited of its parent's queues, whose threads it has not."""
    for group in list(_living):
        group.forget_queue()


os.register_at_fork(after_in_child=_forget_queues)
