# SPDX-License-Identifier: Apache-2.0
"""The backend "fastcoll" of ray.util.collective: torch tensors and NumPy arrays of Ray's actors.

Decides how the actors of a group meet: rank 0 starts a store and leaves its address in Ray's
key-value table. Calls go to a communicator unchanged. Needs Ray, so nothing else imports this.

    from fastcoll.integrations import ray_collective

    @ray.remote
    class Worker:
        def __init__(self, rank, size):
            ray_collective.register()
            collective.init_collective_group(size, rank, "fastcoll")
"""

import time
from datetime import timedelta

import ray
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from fastcoll.calls.arrays import Array
from fastcoll.calls.settings import resolve
from fastcoll.errors import CollectiveTimeout, UnsupportedError
from fastcoll.group.communicator import Communicator
from fastcoll.types import ReduceOp

TESTED = "2.60.0"
_NAME = "FASTCOLL"  # as Ray writes names of backends
_LOOK_S = 0.02
_CONNECT_S = 5.0  # to the address of a store, which may be one that a dead rank 0 has left


def register() -> None:
    """Let `ray.util.collective` know the backend "fastcoll"; call it in the driver and each actor.

    Then `init_collective_group(..., backend="fastcoll")` and `create_collective_group` make groups.
    Their limits are those of the environment (FASTCOLL_TIMEOUT_S). A second call does nothing.

    Raises:
        UnsupportedError: This version of Ray takes no backends; nothing was changed.
    """
    try:
        from ray.util.collective.backend_registry import (
            _global_registry,
            register_collective_backend,
        )
    except ImportError:
        raise UnsupportedError(
            f"Ray {ray.__version__} takes no backends of others in ray.util.collective; install "
            f"Ray {TESTED}, with which this was tested"
        ) from None
    if not _global_registry.is_registered(_NAME):
        register_collective_backend(_NAME, FastcollGroup)


class FastcollGroup(BaseGroup):  # type: ignore[misc]
    """The collective group of Ray that `register` makes known. Ray wraps each tensor in a list."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._store = _meet(group_name, rank)
        self._comm = Communicator.from_store(self._store, rank, world_size, name=group_name)
        if rank == 0:
            internal_kv._internal_kv_del(_key(group_name))

    @classmethod
    def backend(cls) -> str:
        return _NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self._comm.close()

    def allreduce(self, tensor: list[Array], allreduce_options: AllReduceOptions) -> None:
        self._comm.all_reduce(tensor[0], _op(allreduce_options))

    def barrier(self, barrier_options: BarrierOptions | None = None) -> None:
        self._comm.barrier()

    def reduce(self, tensor: list[Array], reduce_options: ReduceOptions) -> None:
        self._comm.reduce(tensor[0], reduce_options.root_rank, _op(reduce_options))

    def broadcast(self, tensor: list[Array], broadcast_options: BroadcastOptions) -> None:
        self._comm.broadcast(tensor[0], broadcast_options.root_rank)

    def allgather(
        self,
        tensor_list: list[list[Array]],
        tensor: list[Array],
        allgather_options: AllGatherOptions,
    ) -> None:
        self._comm.all_gather(tensor_list[0], tensor[0])

    def reducescatter(
        self,
        tensor: list[Array],
        tensor_list: list[list[Array]],
        reducescatter_options: ReduceScatterOptions,
    ) -> None:
        self._comm.reduce_scatter(tensor[0], tensor_list[0], _op(reducescatter_options))

    def send(self, tensor: list[Array], send_options: SendOptions) -> None:
        self._comm.send(tensor[0], send_options.dst_rank)

    def recv(self, tensor: list[Array], recv_options: RecvOptions) -> None:
        self._comm.recv(tensor[0], recv_options.src_rank)


def _op(options: AllReduceOptions | ReduceOptions | ReduceScatterOptions) -> ReduceOp.RedOpType:
    op: ReduceOp.RedOpType = getattr(ReduceOp, options.reduceOp.name)
    return op


def _key(group_name: str) -> str:
    return f"fastcoll/{group_name}"


def _meet(group_name: str, rank: int) -> dist.Store:
    """Return a store of the group's own, at rank 0."""
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        internal_kv._internal_kv_put(_key(group_name), f"{host}:{store.port}")
        return store
    limit_s = resolve(None, None).making_s
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (address := internal_kv._internal_kv_get(_key(group_name))) is None:
            time.sleep(_LOOK_S)
            continue
        host, _, port = address.decode().rpartition(":")
        try:
            return dist.TCPStore(host, int(port), timeout=timedelta(seconds=_CONNECT_S))
        except dist.DistError:  # the address may be an older one; rank 0 writes its own over it
            time.sleep(_LOOK_S)
    raise CollectiveTimeout(
        f'rank {rank}: rank 0 of group "{group_name}" did not come within {limit_s:g} s. Does '
        "every actor of the group call init_collective_group()?",
        [0],
    )
