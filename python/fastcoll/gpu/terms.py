# SPDX-License-Identifier: Apache-2.0
"""The facts that ranks exchange when a group first uses its GPUs, and the terms derived from them.

Decides the size of a region, the number of channels, and whose thread blocks they are. Decides also
which routes to each other's memory are worth a try. Must not know how memory is mapped.

Rows of a tuning table are used if they fit the GPUs of every rank, which ranks compare here. That
all have the same table they know since the group was made.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastcoll.errors import FastcollError, UnsupportedError, UsageError
from fastcoll.gpu.link import Facts
from fastcoll.gpu.residency import Blocks
from fastcoll.machine.gpu import USUAL_CHANNELS, Gpu, multicast_problem, nccl_name, nccl_problem
from fastcoll.native import _cuda

# By VMM a mapping from a descriptor keeps the memory, so ranks may leave in any order: tried first.
VMM, IPC = "vmm", "ipc"
ROUTES = (VMM, IPC)

LEAST_CHANNELS = 8  # with which blocks of one's own are worth more than shared ones; not measured

PROCESS = secrets.token_hex(8)  # tells processes apart, in any namespace


@dataclass(frozen=True)
class DeviceHello:
    """A rank's facts about its GPU, for the other ranks."""

    problem: str  # why this rank can't use its GPU; empty if it can
    device: int
    uuid: str
    process: str
    layout: str
    has_vmm: bool
    granularity: int  # the size of a region there must be a multiple of this, in bytes
    free_blocks: int  # thread blocks that may still be resident on its device
    heap_bytes: int  # bytes by which its memory for symmetric tensors would grow
    most_channels: int  # the most channels it wants; 0 leaves it to the group
    nccl: str = ""  # `nccl_name()` there
    no_table: str = ""  # why the tuning table can't be used for its GPU; empty if it can
    no_multicast: str = ""  # `Gpu.no_multicast` there, or another reason against it
    timeout_s: float = 0.0  # the limit of its kernels' waits
    # The blocks of its device: see `fastcoll.gpu.residency.Blocks`.
    capacity: int = 0
    shared_blocks: int = 0
    is_sharing: bool = False


@dataclass(frozen=True)
class Terms:
    """The terms that every rank derives alike from all ranks' facts."""

    num_bytes: int  # of a region
    heap_bytes: int  # by which the memory for symmetric tensors grows
    num_channels: int  # thread blocks of each rank's kernels
    ranks_per_gpu: int  # the most ranks that share one device
    routes: tuple[str, ...]  # in which order to try
    no_nccl: str = ""  # why NCCL can't carry between the ranks; empty: it can
    reaches_peers: bool = True  # whether a route was found; else NCCL carries all
    no_table: str = ""  # why the group's tuning table says nothing of its GPUs; empty: it is used
    # Why the switch can't add for the ranks; empty: it can, once that was tried.
    no_multicast: str = ""
    granularity: int = 1  # sizes of memory must be a multiple of this, in bytes
    shares: bool = False  # they belong to all groups that share them (`fastcoll.gpu.residency`)

    def of_request(self) -> dict[str, Any]:
        """Return the fields of a request that they decide."""
        return {
            "num_channels": self.num_channels,
            "ranks_per_gpu": self.ranks_per_gpu,
            "reaches_peers": self.reaches_peers,
            "no_nccl": self.no_nccl,
            "no_multicast": self.no_multicast,
        }


def agree_terms(hellos: Sequence[DeviceHello], region_bytes: Callable[[int, int], int]) -> Terms:
    """Derive the terms of a group on GPUs. Pure: every rank comes to the same ones.

    `region_bytes` returns the size of a region for a number of channels and of ranks.

    Raises:
        UnsupportedError: A rank can't use its GPU, or there is no room on one.
        UsageError: The ranks' builds or limits differ.
    """
    problems = [f"rank {rank}: {h.problem}" for rank, h in enumerate(hellos) if h.problem]
    if problems:
        raise UnsupportedError("not every rank can use its GPU: " + "; ".join(problems))
    if len({hello.layout for hello in hellos}) > 1:
        sides = ", ".join(f"rank {rank}: {hello.layout}" for rank, hello in enumerate(hellos))
        raise UsageError(f"the ranks of a group need equal builds of fastcoll's GPU part: {sides}")
    if len({hello.timeout_s for hello in hellos}) > 1:
        sides = ", ".join(f"rank {rank}: {h.timeout_s:g} s" for rank, h in enumerate(hellos))
        raise UsageError(
            "the ranks of a group on GPUs need one limit, or the first to reach its own would "
            f"break the group of all: {sides}. Give all ranks the same gpu_timeout_s=, timeout_s=, "
            "FASTCOLL_GPU_TIMEOUT_S and FASTCOLL_TIMEOUT_S"
        )
    on_device: dict[str, list[DeviceHello]] = {}
    for hello in hellos:
        on_device.setdefault(hello.uuid, []).append(hello)
    channels, shares = _agree_channels(hellos, list(on_device.values()))
    ranks_per_gpu = max(map(len, on_device.values()))
    granularity = max(hello.granularity for hello in hellos)
    num_bytes = -(-region_bytes(channels, len(hellos)) // granularity) * granularity
    return Terms(
        num_bytes=num_bytes,
        heap_bytes=min(hello.heap_bytes for hello in hellos),
        num_channels=channels,
        ranks_per_gpu=ranks_per_gpu,
        routes=ROUTES if all(hello.has_vmm for hello in hellos) else (IPC,),
        no_nccl=nccl_problem([hello.nccl for hello in hellos], ranks_per_gpu),
        no_table=next(
            (f"rank {rank}: {h.no_table}" for rank, h in enumerate(hellos) if h.no_table), ""
        ),
        no_multicast=multicast_problem([hello.no_multicast for hello in hellos], ranks_per_gpu),
        granularity=granularity,
        shares=shares,
    )


def _agree_channels(
    hellos: Sequence[DeviceHello], devices: Sequence[Sequence[DeviceHello]]
) -> tuple[int, bool]:
    """Return how many channels a group has, and whether it shares their blocks with others.

    Without a given number it takes at most half of the free blocks on its fullest device, and
    leaves those that groups may share. So other groups find room, too. A group with fewer than
    LEAST_CHANNELS of its own would rather share. It can't if two of its ranks are on one GPU, as
    those run at the same time.
    """
    wishes = [hello.most_channels for hello in hellos if hello.most_channels]
    most = min([_cuda.K_MAX_CHANNELS, *wishes]) if wishes else USUAL_CHANNELS
    may_share = all(len(there) == 1 for there in devices)
    own = shared = most
    for there in devices:
        share = min(hello.free_blocks for hello in there) // len(there)
        one = there[0]
        kept = one.shared_blocks if may_share and not one.is_sharing else 0
        wanted = share if wishes else max(min(1, share), share // 2)
        own = min(own, max(wanted if share < kept else min(wanted, share - kept), 0))
        shared = min(shared, one.shared_blocks if may_share else 0)
    if shared > own and own < LEAST_CHANNELS:
        return shared, True
    if own > 0:
        return own, False
    worst = min(devices, key=lambda there: min(one.free_blocks for one in there) - len(there))
    free, capacity = min(one.free_blocks for one in worst), worst[0].capacity
    raise UnsupportedError(
        f"{len(worst)} ranks on GPU {worst[0].uuid} need a resident thread block each, but of its "
        f"{capacity} blocks {free} are free: use fewer ranks on that GPU, or close other groups "
        "first"
    )


def describe_device(
    facts: Gpu, world_size: int, *, blocks: Blocks, heap_bytes: int, most_channels: int
) -> Facts:
    """Return this rank's introduction to a group."""
    granularity = _cuda.vmm_granularity(facts.index) if facts.has_vmm_fds else 2 << 20
    no_multicast = facts.no_multicast
    if not no_multicast and world_size > 1:
        try:
            least_bytes = _cuda.multicast_granularity(world_size, granularity)
            granularity = max(granularity, least_bytes)
        except FastcollError as error:
            no_multicast = str(error)
    hello = DeviceHello(
        problem="",
        device=facts.index,
        uuid=facts.uuid,
        process=PROCESS,
        layout=_cuda.layout(),
        has_vmm=facts.has_vmm_fds,
        granularity=granularity,
        free_blocks=blocks.free,
        heap_bytes=heap_bytes,
        most_channels=most_channels,
        nccl=nccl_name(),
        no_multicast=no_multicast,
        capacity=blocks.capacity,
        shared_blocks=blocks.shared,
        is_sharing=blocks.is_sharing,
    )
    return asdict(hello)


def explain_refusal(problem: str) -> Facts:
    """Return the introduction of a rank that can't use its GPU."""
    return asdict(DeviceHello(problem, -1, "", PROCESS, "", False, 1, 0, 0, 0))
