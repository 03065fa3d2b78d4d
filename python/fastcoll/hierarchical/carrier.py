# SPDX-License-Identifier: Apache-2.0
"""What moves bytes between nodes: a backend of torch.distributed, one group of it for each lane.

Decides how a backend is made by its name and what it is asked to do. Must not know what the bytes
are, nor how long to wait for them.
"""

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp, Store

from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError
from fastcoll.types import TORCH_DTYPES, DType, Op

# Sums of other types, and AVG, are none of Gloo's.
_GLOO_SUMS = frozenset(
    (DType.float32, DType.float64, DType.float16, DType.bfloat16, DType.int32, DType.int64)
)
# Waits end in watch.py. This one is for what was given up: Gloo can't be told to stop.
_NO_LIMIT = timedelta(days=1)


class Started(Protocol):
    """A transfer under way; torch's Work is one."""

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""

    def wait(self) -> object:
        """Wait; raises what went wrong."""


class Carrier(Protocol):
    """One lane: as many ranks as there are nodes, numbered like these.

    All methods are collective over the lane. Tensors are contiguous, and stay untouched until the
    transfer is over.
    """

    def reduces(self, dtype: DType, op: Op) -> bool:
        """Return whether `all_reduce` can be asked for this."""

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int],
        input_bytes: Sequence[int],
    ) -> Started:
        """Give each node its part of `input` (uint8), and get each one's part of `output`."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Started:
        """Put everybody's `input` one after another into `output`."""

    def broadcast(self, tensor: torch.Tensor, node: int) -> Started:
        """Copy a node's tensor to all others."""

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Started:
        """Reduce in the carrier's own order and with its own roundings."""

    def abandon(self) -> None:
        """Let go of transfers that never end; the lane is of no use any more."""


class TorchCarrier:
    """A process group of torch.distributed, of this lane alone."""

    def __init__(self, group: Any, sums: frozenset[DType]) -> None:
        self._group = group  # a ProcessGroup or a Backend; torch's stubs know half of either
        self._sums = sums

    def reduces(self, dtype: DType, op: Op) -> bool:
        """See `Carrier`."""
        return dtype in self._sums and op in (Op.SUM, Op.PRODUCT)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int],
        input_bytes: Sequence[int],
    ) -> Started:
        """See `Carrier`."""
        options = dist.AllToAllOptions()
        options.timeout = _NO_LIMIT
        sizes = list(output_bytes), list(input_bytes)
        started: Started = self._group.alltoall_base(output, input, *sizes, options)
        return started

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Started:
        """See `Carrier`."""
        options = AllgatherOptions()
        options.timeout = _NO_LIMIT
        started: Started = self._group._allgather_base(output, input, options)
        return started

    def broadcast(self, tensor: torch.Tensor, node: int) -> Started:
        """See `Carrier`."""
        options = dist.BroadcastOptions()
        options.timeout = _NO_LIMIT
        options.rootRank, options.rootTensor = node, 0
        started: Started = self._group.broadcast([tensor], options)
        return started

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Started:
        """See `Carrier`."""
        options = dist.AllreduceOptions()
        options.timeout = _NO_LIMIT
        options.reduceOp = getattr(ReduceOp, op.name)
        started: Started = self._group.allreduce([tensor], options)
        return started

    def abandon(self) -> None:
        """See `Carrier`."""
        # For ever: its destructor would wait for the transfers, at the latest when Python ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


def _gloo(store: Store, node: int, num_nodes: int, limit_s: float) -> Carrier:
    limit = timedelta(seconds=limit_s)
    return TorchCarrier(dist.ProcessGroupGloo(store, node, num_nodes, limit), _GLOO_SUMS)


def _registered(name: str) -> "MakeCarrier | None":
    """Return the maker of a backend that somebody registered with torch.distributed."""
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or name == "fastcoll":
        return None

    def make(store: Store, node: int, num_nodes: int, limit_s: float) -> Carrier:
        limit = timedelta(seconds=limit_s)
        if plugin.extended_api:
            options = dist.distributed_c10d._DistributedBackendOptions()
            options.store, options.group_rank, options.group_size = store, node, num_nodes
            options.timeout, options.group_id = limit, "fastcoll"
            options.global_ranks_in_group = list(range(num_nodes))
            return TorchCarrier(plugin.creator_fn(options, None), frozenset(TORCH_DTYPES))
        group = plugin.creator_fn(store, node, num_nodes, limit)
        return TorchCarrier(group, frozenset(TORCH_DTYPES))

    return make


MakeCarrier = Callable[[Store, int, int, float], Carrier]
CARRIERS: dict[str, MakeCarrier] = {"gloo": _gloo}


def maker_of(name: str) -> MakeCarrier:
    """Return what makes a lane of the carrier with this name; that is collective over the lane.

    Raises:
        UsageError: There is none.
    """
    make = CARRIERS.get(name) or _registered(name)
    if make is None:
        raise UsageError(
            f'there is no carrier "{name}" for tensors on CPUs; there are {", ".join(CARRIERS)} '
            "and the backends registered with torch.distributed"
        )
    return make


def make_lane(
    make: MakeCarrier, store: Store, node: int, num_nodes: int, limit_s: float
) -> Carrier:
    """Make one lane. Collective over it.

    Raises:
        CollectiveTimeout: A rank of the lane did not come.
    """
    try:
        return make(store, node, num_nodes, limit_s)
    except RuntimeError as error:
        if isinstance(error, FastcollError):
            raise
        raise CollectiveTimeout(
            f"init: the carrier between nodes could not be made on node {node}: {error}"
        ) from error
