# SPDX-License-Identifier: Apache-2.0
"""A group of the ranks of one node: from a checked call to a running one.

Decides how a call on CPUs starts, which part allocates symmetric memory, and how a group is made
and closed. Must not know torchrun, default groups or torch's process groups, nor how plans are
chosen.
"""

import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.distributed import Store

from fastcoll import env
from fastcoll.bootstrap import single_copy
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import BytesExchange, StoreExchange
from fastcoll.bootstrap.farewell import KINDS
from fastcoll.bootstrap.identity import shared_cpus
from fastcoll.bootstrap.join import Peers
from fastcoll.bootstrap.os_errors import REFUSALS, as_driver_error, explain
from fastcoll.bootstrap.shrink import shrink
from fastcoll.calls.giving_up import give_up
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.group_calls import AnyOperands, CheckedCall, GpuCall
from fastcoll.calls.limits import call_limit_s
from fastcoll.calls.pool import before_end
from fastcoll.calls.recorder import VerbStats, stats_of
from fastcoll.calls.settings import Settings, resolve
from fastcoll.calls.sites import tracing
from fastcoll.calls.tensors import checked_rank
from fastcoll.calls.transfer_work import LAST_SENDS_S, Transfers
from fastcoll.calls.work import CallQueue, Work
from fastcoll.choose.planner import Planner
from fastcoll.choose.tuning import Tuning
from fastcoll.errors import DriverError, FastcollError, UnsupportedError, UsageError
from fastcoll.group.gpu_side import GpuSide
from fastcoll.machine import gpu
from fastcoll.memory.heap import MOST_BYTES, SymmetricHeap
from fastcoll.memory.region import create_arena, create_region, require_descriptors, require_room
from fastcoll.memory.symmetric import device_of, tensor_on
from fastcoll.native import _C
from fastcoll.text import say, say_once
from fastcoll.types import FROM_TORCH, Numerics, SingleCopy, Verb

_SHORT_WAITS = (
    "the ranks compute with more OpenMP threads than their {cpus} CPUs; the threads that wait for "
    "work now sleep soon (FASTCOLL_OPENMP_WAITS=keep lets them spin). A smaller OMP_NUM_THREADS is "
    "quicker still"
)
_living: weakref.WeakSet["Communicator"] = weakref.WeakSet()

if TYPE_CHECKING:
    from fastcoll.gpu.group import DeviceGroup


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


class Communicator(_C.Group, BaseGroup):
    """A group of ranks of one node. Make one with `fastcoll.init` or `new_group`.

    The verbs take the arguments of the functions of the same name, without `group`. A
    communicator is a context manager: leaving it closes it.
    """

    @as_driver_error("making a group")
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

        Without `may_copy` the ranks try whether they can copy out of each other's private memory.
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
        mesh.pidfds = super()._pidfds  # those given are closed, where another group has such
        try:
            self.single_copy, self.single_copy_report = may_copy or single_copy.agree(
                super().try_single_copy
            )
            if env.OPENMP_WAITS.get() == "short" and super()._shorten_openmp_waits():
                say_once(_SHORT_WAITS.format(cpus=num_cpus), logging.INFO)
            self._settings = settings
            self._mesh = mesh
            self._hellos = peers.hellos
            self.planner = Planner(self, settings, tuned, num_cpus, self.single_copy)
            self._queue = CallQueue(self)
            self._gpus = GpuSide(self, settings, self.planner)
            self._transfers = Transfers(self, self._gpus.transfer)
            self._heap = SymmetricHeap(self, mesh.rank, mesh.world_size)
            self._num_exchanges = 0
            _living.add(self)
        except BaseException as error:
            if isinstance(error, REFUSALS):  # the peers have the group, or soon will
                refused = f"rank {mesh.rank} gave up: {explain(error)}"
                with suppress(FastcollError):  # it throws the verdict
                    super().fail(KINDS[DriverError], refused, [])
            super().close()
            raise

    # ---- calls -----------------------------------------------------------------------------------

    def _prepared(self, calls: Sequence[CheckedCall]) -> Callable[[], None]:
        runs: list[Callable[[], None]] = []
        for call, operands in calls:
            limit_s = call_limit_s(call.timeout_s)
            plan = self.planner.plan(call, operands)
            runs.append(partial(self._carry_out, operands, plan, limit_s))
        return runs[0] if len(runs) == 1 else partial(_run_all, runs)

    def _carry_out(self, operands: AnyOperands, plan: _C.Plan, limit_s: float) -> None:
        try:
            operands.carry_out(self, plan, limit_s)
        except BaseException as error:
            give_up(self, f"{Verb(plan.verb).name}({operands.dtype.name})", error)
            raise

    def _issue_on_gpus(self, calls: Sequence[GpuCall], async_op: bool) -> Work | None:
        return self._gpus.issue(calls, async_op)

    def stats(self) -> dict[str, VerbStats]:
        return stats_of(super().counts())

    def check(self) -> None:
        if self._gpus.group is not None:
            self._gpus.group.check()
        else:
            super().check()

    def check_host(self) -> None:
        """Raise the error that broke the group on its CPUs; part of the GPU side's interface."""
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

    def peer_is_gone(self, peer: int) -> bool:
        return super().peer_is_gone(checked_rank(peer, "peer", self.world_size))

    # ---- symmetric tensors -----------------------------------------------------------------------

    def empty(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        extents: Sequence[Any] = size
        if len(size) == 1 and not isinstance(size[0], SupportsIndex):
            extents = size[0]
        try:
            shape = [operator.index(extent) for extent in extents]
        except TypeError:
            raise UsageError(f"a shape consists of integers, not {extents!r}") from None
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype, not {dtype!r}")
        if dtype not in FROM_TORCH:
            raise UnsupportedError(f"symmetric tensors of {dtype} are not supported")
        if any(size < 0 for size in shape):
            raise UsageError(f"shape {tuple(shape)} has a negative size")
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > MOST_BYTES:
            raise UsageError(f"shape {tuple(shape)} of {dtype} has {num_bytes} bytes, far too many")
        place = device_of(device)
        if place.type == "cuda":
            gpu.require()
            index = torch.cuda.current_device() if place.index is None else place.index
            return self._gpus.on(index).empty(shape, dtype)
        if place.type != "cpu":
            raise UnsupportedError(f"symmetric tensors lie on CPUs or CUDA devices, not on {place}")
        block = self._heap.allocate(num_bytes)
        return tensor_on(block, shape, dtype, self, self._heap.release)

    def add_shared_arena(self, num_bytes: int) -> int:
        """Add an arena and return its address. Collective; part of the heap's interface.

        Raises:
            DriverError: A rank has no room for it; the group can still be used.
        """
        require_room(num_bytes, self.world_size, self.gather_bytes)

        def make() -> int:
            self.check_host()  # a late rank would find the others' messages, and they gave up
            return create_arena(num_bytes)

        try:
            fds = self._exchange_fds(make)
            arena_idx = self.add_arena(fds, num_bytes)
        except BaseException as error:
            # Some ranks may have allocated: the heaps have diverged.
            text = f"the symmetric heap could not grow: {error}"
            if kind := KINDS.get(type(error)):  # one of them is to blame: the verdict names it
                self.fail(kind, text, getattr(error, "ranks", ()))
            self.poison(text)
            raise
        return self.arena_ptr(arena_idx)

    def exchange_fds(self, fd: int) -> list[int]:
        """Give every rank a copy of `fd` and return those of all ranks, by rank. Collective.

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
        default_on_gpus: Numerics = "same_bits",
    ) -> BaseGroup:
        """Make a group beside the default one, as `fastcoll.init` would. Collective.

        On GPUs `default_on_gpus` holds where neither `numerics` nor FASTCOLL_NUMERICS is given.
        """
        exchange = StoreExchange(store, rank, world_size, name)
        settings = resolve(timeout_s, numerics, default_on_gpus=default_on_gpus)
        group = cls.make(exchange, name, settings, (), None)
        assert group is not None  # all ranks are members
        return group

    def _exchange(self) -> BytesExchange:
        return BytesExchange(self)

    def _of_survivors(self, limit_s: float) -> "Communicator":
        found = shrink(self._mesh, self, lambda: create_region(self.world_size), limit_s)
        peers = Peers(found.mesh, [self._hellos[rank] for rank in found.ranks])
        # Without trying: the old agreement holds, even if one of them dies on the way.
        may_copy = (self.single_copy, self.single_copy_report)
        group = Communicator(
            self._name_after_shrink(),
            self._settings,
            peers,
            self.planner.tuning,
            found.region_fds,
            may_copy,
        )
        group._num_shrinks = self._num_shrinks + 1
        return group

    def abort(self, reason: str | None = None) -> None:
        """End the group from any thread or signal handler, with one verdict for all ranks.

        Not collective. Every wait in a call of the group, in this process and in all others,
        raises AbortedError with the reason within milliseconds. So does every later call. A group
        that has a verdict already keeps it. The group is still to be closed.

        Raises:
            UsageError: The group was closed.
        """
        super().abort(reason or "no reason given")
        self._gpus.stop()

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
            try:
                super().close()
            finally:  # also where it has no memory for its symmetric tensors: it is closed
                if self.on_close is not None:
                    self.on_close()

    def forget_queue(self) -> None:
        """Start with an empty queue; for a forked child, which may only close the group."""
        self._queue = CallQueue(self)


def close_all() -> None:
    """Close every group of this process; a broken group does not stop it."""
    for group in list(_living):
        try:
            group.close()
        except FastcollError as error:
            say(f"closing {group!r}: {error}")


def _end_transfers() -> None:
    """Give sends their time, then end the transfers without a peer: threads may wait for them."""
    deadline = Deadline(LAST_SENDS_S)
    while any(group.has_open_sends() for group in list(_living)) and deadline.left_s() > 0:
        time.sleep(0.001)
    for group in list(_living):
        group.end_unmet_transfers()


before_end(_end_transfers)


def _forget_queues() -> None:
    """Drop the queues that a forked child inherited from its parent, without their threads."""
    for group in list(_living):
        group.forget_queue()


os.register_at_fork(after_in_child=_forget_queues)
