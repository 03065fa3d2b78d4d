# SPDX-License-Identifier: Apache-2.0
"""Backends of torch.distributed as carriers: a group of one for each lane.

Decides how a backend is made by its name, and its operations. Must not know the meaning of the
bytes, nor how long to wait for them.
"""

import ctypes
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp, Store

from fastcoll.errors import DriverError, UsageError
from fastcoll.nodes.carriers.carrier import Carrier, MakeCarrier, Started, starting
from fastcoll.types import DType, Op

# Sums of other types, and AVG, are none of Gloo's.
_GLOO_SUMS = frozenset(
    (DType.float32, DType.float64, DType.float16, DType.bfloat16, DType.int32, DType.int64)
)
# The sums that every backend has; other types go as bytes, which any can move.
_SUMS_OF_ANY = frozenset((DType.float32, DType.float64))
# Waits end in watch.py. This limit is for transfers that were given up: Gloo can't be stopped.
_NO_LIMIT = timedelta(days=1)
_NOBODYS_TAG = 2**31 - 1


def _unlimited(options: Any) -> Any:
    options.timeout = _NO_LIMIT
    return options


class TorchCarrier(Carrier):
    """A process group of torch.distributed, of this lane alone."""

    def __init__(self, group: Any, sums: frozenset[DType], accepts_short: bool = False) -> None:
        super().__init__()
        self.accepts_short = accepts_short
        self._group = group  # a ProcessGroup or a Backend; torch's stubs know half of either
        self._sums = sums

    def reduces(self, dtype: DType, op: Op) -> bool:
        return dtype in self._sums and op in (Op.SUM, Op.PRODUCT)

    @starting
    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int],
        input_bytes: Sequence[int],
    ) -> Started:
        options = _unlimited(dist.AllToAllOptions())
        sizes = list(output_bytes), list(input_bytes)
        started: Started = self._group.alltoall_base(output, input, *sizes, options)
        return started

    @starting
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Started:
        options = _unlimited(AllgatherOptions())
        started: Started = self._group._allgather_base(output, input, options)
        return started

    @starting
    def broadcast(self, tensor: torch.Tensor, node: int) -> Started:
        options = _unlimited(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = node, 0
        started: Started = self._group.broadcast([tensor], options)
        return started

    @starting
    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Started:
        options = _unlimited(dist.AllreduceOptions())
        options.reduceOp = getattr(ReduceOp, op.name)
        started: Started = self._group.allreduce([tensor], options)
        return started

    def abandon(self) -> None:
        # For ever: its destructor would wait for the transfers, at the latest when Python ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def resume(self) -> None:
        """See `Carrier`; the group goes with its last reference."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))

    def close(self) -> None:
        """See `Carrier`; the group goes with its last reference."""


class GlooCarrier(TorchCarrier):
    """A process group of Gloo's, of this lane alone."""

    def has_lost(self, node: int) -> bool:
        """See `Carrier`.

        Gloo keeps a broken connection to itself until somebody uses it. A send that nobody receives
        is such a use, beside all collectives: it costs 64 bytes here and 20 there.
        """
        try:
            self._group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], node, _NOBODYS_TAG)
        except RuntimeError:
            return True
        return False


@cache
def _gloo_devices(process: int) -> Any:
    """Return the network devices through which all groups of a process connect.

    Each group would look up this host's name otherwise, and have a thread of its own.
    """
    del process  # a forked child has none of its parent's threads
    # Only a group knows GLOO_SOCKET_IFNAME.
    alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, _NO_LIMIT)
    return alone.options._devices


def find_gloo_devices(node: int) -> None:
    """Find this machine's network devices; a DriverError for all ranks if there are none."""
    try:
        _gloo_devices(os.getpid())
    except RuntimeError as error:
        raise DriverError(
            f"node {node} ({socket.gethostname()}) has no network device for Gloo (is "
            f"GLOO_SOCKET_IFNAME right there?): {error}"
        ) from error


def gloo(store: Store, node: int, num_nodes: int, limit_s: float) -> Carrier:
    """Make a lane of Gloo; see `MakeCarrier`."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = _gloo_devices(os.getpid()), 2
    # Gloo waits for a connection five times this long, without a check of any verdict.
    options._timeout = max(timedelta(seconds=limit_s) / 5, timedelta(milliseconds=1))
    group = dist.ProcessGroupGloo(store, node, num_nodes, options)
    return GlooCarrier(group, _GLOO_SUMS, accepts_short=True)


def registered(name: str) -> MakeCarrier | None:
    """Return the maker of a backend that is registered with torch.distributed.

    Raises:
        UsageError: It is not for tensors on CPUs.
    """
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or name == "fastcoll":
        return None
    devices = dist.Backend.backend_capability.get(name.lower(), ["cpu"])
    if "cpu" not in devices:
        raise UsageError(
            f'carrier="{name}": between nodes a carrier moves tensors on CPUs, and this backend '
            f"was registered for {', '.join(devices)} only. Name another one, or register it with "
            'devices=["cpu", ...] if it takes them'
        )

    def make(store: Store, node: int, num_nodes: int, limit_s: float) -> Carrier:
        limit = timedelta(seconds=limit_s)
        if plugin.extended_api:
            options = dist.distributed_c10d._DistributedBackendOptions()
            options.store, options.group_rank, options.group_size = store, node, num_nodes
            options.timeout, options.group_id = limit, "fastcoll"
            options.global_ranks_in_group = list(range(num_nodes))
            return TorchCarrier(plugin.creator_fn(options, None), _SUMS_OF_ANY)
        group = plugin.creator_fn(store, node, num_nodes, limit)
        return TorchCarrier(group, _SUMS_OF_ANY)

    return make
