# SPDX-License-Identifier: Apache-2.0
"""The GPUs that this process can see, and the reason where it can't use them.

Reads the driver through the extension `_cuda`, which is there only in builds with nvcc. Knows
nothing of ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fastcoll import env, native
from fastcoll.errors import UnsupportedError

USUAL_CHANNELS = 32  # of a group; not measured: NCCL's own limit on NVLink machines
NCCL_SHARES = ", several ranks on one GPU"


@dataclass(frozen=True)
class Gpu:
    """One device."""

    index: int
    name: str
    uuid: str  # the same for every process that sees the device; a MIG instance has its own
    capability: int  # 90 for sm_90
    num_sms: int
    has_vmm_fds: bool  # its memory can be handed to other processes as descriptors
    has_multicast: bool  # its switch can reduce (NVLink SHARP)

    @property
    def no_multicast(self) -> str:
        """Why a switch can't add data in its memory, or is not to; empty: it can."""
        if not self.has_multicast:
            return "its GPU or driver has no multicast (NVLink SHARP)"
        return "FASTCOLL_GPU_MULTICAST=never" if env.GPU_MULTICAST.get() == "never" else ""


def problem() -> str:
    """Return why no GPU can be used, or an empty string."""
    if native.cuda_import_error:
        if "No module named 'fastcoll._cuda'" in native.cuda_import_error:
            return (
                "this fastcoll was built without GPU support: install it again where nvcc is on "
                "PATH (FASTCOLL_CUDA=1 makes a missing nvcc an error)"
            )
        return f"fastcoll's GPU support does not load: {native.cuda_import_error}"
    count, reason = native._cuda.device_count()
    if count == 0:
        return f"no CUDA device can be used: {reason or 'the driver lists none'}"
    return ""


def require() -> None:
    """Make sure that GPUs can be used.

    Raises:
        UnsupportedError: They can't; the text says why.
    """
    if text := problem():
        raise UnsupportedError(text)


def gpus() -> list[Gpu]:
    """Return the devices this process can use; none where there is a problem."""
    if problem():
        return []
    count, _ = native._cuda.device_count()
    return [gpu(index) for index in range(count)]


def gpu(index: int) -> Gpu:
    """Return one device.

    Raises:
        DriverError: There is no such device.
    """
    return Gpu(index=index, **native._cuda.device_facts(index))


def pairs_without_access() -> list[tuple[int, int]]:
    """Return the pairs of devices of which the first can't reach the second's memory."""
    indices = [one.index for one in gpus()]
    return [(a, b) for a in indices for b in indices if not native._cuda.can_access_peer(a, b)]


def has_kernel(algorithm: int, verb: int, dtype: int, *, ll: bool = False) -> bool:
    """Return whether this build has a kernel; `ll` is one whose packs carry their own flags."""
    return not native.cuda_import_error and native._cuda.has_kernel(algorithm, verb, dtype, ll)


def max_ll_bytes(num_channels: int) -> int:
    """Return the most that such packs can carry from one rank to another."""
    return native._cuda.max_ll_bytes(num_channels)


# Since this version, where NCCL_MULTI_RANK_GPU_ENABLE=1; before, it refuses.
SHARING_NCCL = (2, 30)


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch has; empty if it has none."""
    if not dist.is_nccl_available():
        return ()
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return found


def nccl_name() -> str:
    """Return NCCL's version, and whether GPUs may be shared, as text; empty if torch has none."""
    version = nccl_version()
    sharing = version >= SHARING_NCCL and env.nccl_shares_gpus()
    return ".".join(map(str, version)) + (NCCL_SHARES if version and sharing else "")


def nccl_problem(names: Sequence[str], ranks_per_gpu: int) -> str:
    """Return why NCCL can't carry between ranks with these `nccl_name()`s; empty: it can."""
    if "" in names:
        return f"torch has no NCCL on rank {names.index('')}"
    if len(set(names)) > 1:
        sides = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        return f"the ranks have different versions of it: {sides}"
    if ranks_per_gpu > 1 and not names[0].endswith(NCCL_SHARES):
        return (
            f"{ranks_per_gpu} ranks share a GPU, which NCCL allows since 2.30 and with "
            f"NCCL_MULTI_RANK_GPU_ENABLE=1; here is {names[0]}"
        )
    return ""


def multicast_problem(reasons: Sequence[str], ranks_per_gpu: int) -> str:
    """Return why there is no use in trying to let the switch add; empty: it is worth a try.

    `reasons`: the `no_multicast` of each rank's GPU.
    """
    if len(reasons) == 1:
        return "one rank alone has nothing to add"
    if ranks_per_gpu > 1:
        return f"{ranks_per_gpu} ranks share a GPU, and the switch adds what different GPUs hold"
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def driver_version() -> str:
    """Return the newest CUDA that the driver runs, or "none"."""
    return "none" if native.cuda_import_error else native._cuda.driver_version()


def fingerprint(driver_folder: Path = Path("/proc/driver/nvidia")) -> dict[str, object]:
    """Return the facts that must be equal for measurements of GPUs to hold here.

    Where the kernel module tells, its own version is the driver's, and all of the machine's GPUs
    count: a process may see one of them.
    """
    seen = gpus()
    try:
        text = (driver_folder / "version").read_text()
    except OSError:
        text = ""
    module = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.M)
    return {
        "names": sorted({one.name for one in seen}),
        "num_gpus": max(len(list(driver_folder.glob("gpus/*"))), len(seen)),
        "driver": module[1] if module else f"CUDA {driver_version()}",
        "nccl": ".".join(map(str, nccl_version())),
        "layout": "none" if native.cuda_import_error else native._cuda.layout(),
    }
