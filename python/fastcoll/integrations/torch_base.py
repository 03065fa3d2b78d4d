# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="override"
"""A torch process group without its calls: its names, settings, batches, and its end.

Decides which answers torch gets about a group, and which handles of calls are kept. Must not know
the verbs.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType
from torch.distributed import ProcessGroup

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.transfer_work import TransferWork
from fastcoll.calls.work import Work
from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError, UnsupportedError
from fastcoll.group.communicator import Communicator
from fastcoll.integrations.torch_work import TorchWork
from fastcoll.types import Numerics

NAME = "fastcoll"
GLOO = "gloo"
# On GPUs, where neither the call nor FASTCOLL_NUMERICS says: such programs come from NCCL, which
# fixes no order of a sum. Only so may the switch or NCCL add, which is quicker on NVSwitch.
NUMERICS_ON_GPUS: Numerics = "fast"
_KEPT_BYTES = 64  # so that no tensor of size outlives its use
# The process of rank 0 has the server of torch's store, and ends it with its default group. A rank
# that left sooner, and makes its groups anew, would meet that old server. So the others wait up to
# this long for rank 0 to leave, and then for its process to free the groups. Gloo takes 10 ms. With
# 0.1 s a test failed whose rank 0 was held up for 0.3 s, as on a busy machine.
_BEHIND_FIRST_S = 1.0
_FREEING_S = 0.01
_LOOK_S = 0.0005


def connect_ranks(
    store: dist.Store, rank: int, world_size: int, limit_s: float, name: str
) -> BaseGroup:
    """Make the group that carries out the calls of a group of torch's. Collective."""
    return Communicator.from_store(
        store, rank, world_size, timeout_s=limit_s, name=name, default_on_gpus=NUMERICS_ON_GPUS
    )


class BaseProcessGroup(ProcessGroup):
    """A torch process group whose calls a communicator carries out."""

    # Makes what torch gets for a part of a group. Its arguments are a store, the rank, the number
    # of ranks, a name, and a limit in seconds. The module that makes groups sets it.
    make_part: ClassVar[Callable[..., Any]]
    # The same for a group whose ranks are connected: torch_backend.make_backend.
    make_backend: ClassVar[Callable[..., ProcessGroup | dist.Backend]]

    def __init__(self, comm: BaseGroup, store: dist.Store, events: str = NAME) -> None:
        super().__init__(comm.rank, comm.world_size)  # type: ignore[call-arg]
        self.communicator = comm
        self.events = events  # GLOO: in a profile its calls have the names of Gloo's
        self.global_ranks: Sequence[int] = ()  # as torch named them when it made the group
        self.is_default = False  # torch's default group
        self._store = store
        self._name = comm.name
        self._desc = "undefined"
        self._coalescing: list[Work | TransferWork] | None = None
        self._sequence = 0
        self.shown: Any = None  # torch_dispatch.py's
        # DDP's reducer waits for the flag that a rank of an uneven join sends. It holds only the
        # C++ half of that Work: without the Python half its wait would never return.
        self._kept: deque[TorchWork] = deque(maxlen=64)

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.world_size

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815

    def get_group_store(self) -> dist.Store:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Self:
        if torch.device(device).type not in {one.type for one in self._device_types}:
            raise UnsupportedError(f'the backend "{NAME}" has nothing for {device}')
        return self

    @property
    def options(self) -> Backend.Options:
        """The group's limit, ranks and name as Gloo's groups tell them: a copy, of this moment."""
        limit = timedelta(seconds=self.communicator.timeout_s)
        told: Any = Backend.Options(self.events, limit)
        told.global_ranks_in_group = list(self.global_ranks)
        told.group_name = self._name
        return told  # type: ignore[no-any-return]

    @property
    def supports_splitting(self) -> bool:
        """False: `new_group` makes subgroups."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """True: see `shrink`."""
        return True

    def shrink(
        self, ranks_to_exclude: Sequence[int], flags: int = 0, options: object = None
    ) -> ProcessGroup | dist.Backend:
        """Make a group of the other ranks; `dist.shrink_group` calls this. Collective over those.

        The excluded ranks need not come, nor live. The rest meet at the group's store.

        Args:
            ranks_to_exclude: Ranks of this group, the same on all that come, in ascending order.
            flags: 1 aborts this group first (SHRINK_ABORT): its waits raise on every rank.
            options: Ignored.
        """
        del options
        if flags & 1:
            self.abort()
        gone, limit_s = set(ranks_to_exclude), self.communicator.timeout_s
        stay = [rank for rank in range(self.size()) if rank not in gone]
        name = f"{self._name} without {', '.join(map(str, sorted(gone)))}"
        store = dist.PrefixStore(f"fastcoll/{name}", self._store)
        rank = stay.index(self.rank())
        comm = connect_ranks(store, rank, len(stay), limit_s, name)
        return self.make_backend(comm, store, limit_s, self.events)

    @property
    def supports_coalescing(self) -> bool:
        """Whether torch makes a batch of transfers one call, with one Work.

        A batch is all of the group's: no other thread may call meanwhile. Only GPUs need it, where
        one stream carries out a batch. Programs for Gloo wait for several Works.
        """
        return self.events == NAME and torch.cuda.device_count() > 0

    @property
    def supports_time_estimate(self) -> bool:
        """False, as Gloo's: torch.compile asks, where it may order collectives by their time."""
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: DDP's buckets are symmetric tensors on the compiled backend only."""
        del device
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing, as Gloo's: the ranks are connected."""

    def get_error(self) -> Any:
        """Return the kind of error that broke the group, or torch's SUCCESS; waits for nothing."""
        kinds: Any = ErrorType
        try:
            self.communicator.check()
        except CollectiveTimeout:
            return kinds.TIMEOUT
        except PeerLostError:
            return kinds.REMOTE_ERROR
        except FastcollError:
            return kinds.COMM_ERROR
        return kinds.SUCCESS

    def _set_sequence_number_for_group(self) -> None:
        pass  # a communicator counts its calls itself

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of calls that give none."""
        self.communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; queued calls end first. Torch's default group is left behind rank 0."""
        if self.is_default and self.rank() != 0 and not self.communicator.closed:
            self._await_end_of_rank_0()
        self.communicator.close()

    def _await_end_of_rank_0(self) -> None:
        deadline = Deadline(_BEHIND_FIRST_S)
        with contextlib.suppress(FastcollError):  # a broken group tells nothing of its ranks
            while isinstance(self.communicator, Communicator) and not deadline.passed():
                if self.communicator.peer_is_gone(0):
                    time.sleep(_FREEING_S)
                    break
                time.sleep(_LOOK_S)

    def split(self, store: dist.Store, ranks: Sequence[int], name: str, timeout_s: float) -> Any:
        """Make a group of some ranks of this one; None on the others. Collective over them."""
        if self.rank() not in ranks:
            return None
        return self.make_part(store, ranks.index(self.rank()), len(ranks), name, timeout_s)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **rest: object,
    ) -> Self | None:
        """Make a group of some ranks of this one; None on the others. Collective over them.

        As torch's method, but for the options, which are another backend's, and the devices: a
        group in Python has them all.
        """
        del opts, rest
        if torch.__version__ < "2.14":  # from then on torch numbers a part's ranks as given
            ranks = sorted(ranks)
        name = group_name or f"{self._name}:split:{'_'.join(map(str, ranks))}"
        limit_s = self.communicator.timeout_s if timeout is None else timeout.total_seconds()
        part: Self | None = self.split(
            dist.PrefixStore(f"{name}/", self._store), ranks, name, limit_s
        )
        if part is not None:
            part._set_group_desc(group_desc or f"{self._desc}:split")
        return part

    def abort(self) -> None:
        """Give the group up: every wait in it, on any rank, raises AbortedError."""
        if not self.communicator.closed:
            self.communicator.abort("torch.distributed was told to abort the group")
            self.communicator.close()

    # ---- calls -----------------------------------------------------------------------------------

    def _begin(self, opts: Any) -> tuple[BaseGroup, bool, float | None]:
        """Count a call; return the group for it, whether it is asynchronous, and its limit.

        The group's C function of its verb runs it: with a known plan it needs no more Python.
        """
        self._sequence += 1
        if opts is None:
            return self.communicator, True, None
        asynchronous: bool = opts.asyncOp or self._coalescing is not None
        limit_s: float = opts.timeout.total_seconds()
        return self.communicator, asynchronous, limit_s if limit_s > 0 else None

    def _handle(self, work: Work | None) -> TorchWork | None:
        return None if work is None else self._track(work)

    def _track(self, work: Work | TransferWork) -> TorchWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        result = TorchWork([work])
        if isinstance(work, Work) and work.num_bytes() <= _KEPT_BYTES:
            self._kept.append(result)
        return result

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        """Return a work for all calls since the start; torch drops the works of each."""
        del device
        works, self._coalescing = self._coalescing or [], None
        return TorchWork(works)
