# SPDX-License-Identifier: Apache-2.0
"""The group as its GPU side sees it, and the description of its device.

Decides the facts about a device that a rank sends, and for how many ranks it claims thread blocks.
Must not know calls.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastcoll import env
from fastcoll.calls.limits import GpuLimits
from fastcoll.errors import FastcollError, UnsupportedError
from fastcoll.gpu.link import Facts
from fastcoll.gpu.residency import Claim, residency
from fastcoll.gpu.terms import DeviceHello, Terms, describe_device, explain_refusal
from fastcoll.machine import gpu
from fastcoll.native import _C, _cuda


class DeviceHost(Protocol):
    """The group that sets up its GPUs, as far as its GPU side has to know it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def traces(self) -> bool: ...
    @property
    def socket_fds(self) -> list[int]: ...
    def gather_bytes(self, data: bytes) -> list[bytes]: ...
    def gather_words(self, words: list[int]) -> list[list[int]]: ...
    def exchange_fds(self, fd: int) -> list[int]: ...
    def check_host(self) -> None: ...
    def fail(self, kind: int, text: str, ranks: Sequence[int]) -> Any: ...
    def peer_is_gone(self, peer: int) -> bool: ...
    def use_gpu(self, calls: _C.GpuCalls | None) -> None: ...


class GpuLink:
    """The host, as the regions' module sees it."""

    def __init__(self, host: DeviceHost) -> None:
        self.rank = host.rank
        self.socket_fds = host.socket_fds
        self.exchange_fds = host.exchange_fds
        self._gather_bytes = host.gather_bytes

    def gather(self, facts: Facts) -> list[Facts]:
        return [json.loads(text) for text in self._gather_bytes(json.dumps(facts).encode())]


def hello_of(
    device: int, world_size: int, limits: GpuLimits, no_table: Callable[[], str]
) -> tuple[Facts, int]:
    """Return this rank's introduction, and how many blocks its device holds."""
    try:
        gpu.require()
        facts = gpu.gpu(device)
        capacity = _cuda.load_kernels(device)
        hello = describe_device(
            facts,
            world_size,
            blocks=residency.blocks(device, capacity),
            heap_bytes=env.GPU_HEAP_MIB.get() << 20,
            most_channels=env.GPU_CHANNELS.get(),
        )
        hello |= {"no_table": no_table(), "timeout_s": limits.timeout_s}
    except FastcollError as error:
        return explain_refusal(str(error)), 0
    return hello, capacity


def claim_blocks(
    hellos: Sequence[DeviceHello], terms: Terms, link: GpuLink, capacity: int
) -> Claim:
    """Claim thread blocks of this rank's device, which holds `capacity`. Collective.

    Raises:
        UnsupportedError: Another group took them on some rank since the ranks agreed.
    """
    me = hellos[link.rank]
    claim = residency.share if terms.shares else residency.claim
    claimed = claim(me.device, terms.num_channels * _share_of(hellos, link.rank), capacity)
    try:
        rows = link.gather({"claimed": claimed is not None})
        late = [rank for rank, row in enumerate(rows) if not row["claimed"]]
        if claimed is None or late:
            raise UnsupportedError(
                f"another group took the thread blocks of the GPUs of ranks {late} meanwhile: make "
                "groups one after another, or close one first"
            )
    except BaseException:
        if claimed is not None:
            claimed.release()
        raise
    return claimed


def _share_of(hellos: Sequence[DeviceHello], rank: int) -> int:
    """Return for how many ranks this one claims: ranks of other processes claim nothing here."""
    me = hellos[rank]
    there = [hello for hello in hellos if hello.uuid == me.uuid]
    here = [hello for hello in there if hello.process == me.process]
    return -(-len(there) // len(here))
