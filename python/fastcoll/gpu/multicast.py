# SPDX-License-Identifier: Apache-2.0
"""One address for all ranks' regions, through which the switch adds and stores (NVLink SHARP).

Decides whether a group has it: the object is really made, and tried out. The trial has every
operation of every type that calls may ask of it, and its stores. Every rank learns of every
failure, so all have it or none has. Must not know verbs or streams.

Rank 0 makes the object and hands its descriptor over the sockets. Every rank adds its device; when
all have, each binds its region and maps the object. Then it is tried. A
failure of any rank at any step is a failure of all, and the group works without multicast.
"""

import contextlib
import os
import secrets
from typing import Protocol

from fastcoll.errors import FastcollError, UnsupportedError
from fastcoll.gpu.link import Link, problem_of, problems, try_together
from fastcoll.native import _cuda
from fastcoll.types import DType, Op

# The operations that are tried, by type: csrc/cuda/launch.h, Probe.
_OF_INTEGERS = (Op.SUM, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)
_TRIED: dict[DType, tuple[Op, ...]] = {
    DType.float32: (Op.SUM,),
    DType.float16: (Op.SUM,),
    DType.bfloat16: (Op.SUM,),
    DType.int32: _OF_INTEGERS,
    DType.uint32: _OF_INTEGERS,
    DType.int64: _OF_INTEGERS,
    DType.uint64: _OF_INTEGERS,
}


class BoundRegions(Protocol):
    """The regions of all ranks; see `fastcoll.gpu.regions.Regions`."""

    device: int
    num_bytes: int
    ptrs: list[int]
    multicast: _cuda.Multicast | None

    def close_multicast(self) -> None:
        """Let go of the object behind all of them."""


def join_multicast(
    regions: BoundRegions, link: Link, group: _cuda.Group | None = None, place: int = 0
) -> str:
    """Put the regions of all ranks, or an arena of theirs, behind one address. Collective.

    Args:
        regions: Memory of all ranks.
        link: The other ranks.
        group: Tries the address out, and uses it from then on. None: regions of these ranks were
            tried out before.
        place: The address; 0: any.

    Returns:
        Why it can't be had, the same on all ranks; empty: the regions have it, and close it.
    """
    joining = _Joining(regions, link, group, place)
    try:
        problem = joining.run()
    finally:
        joining.close_fds()
    if problem:
        if group is not None:
            group.use_multicast(0)
        with contextlib.suppress(FastcollError):  # the verdict is another one already
            regions.close_multicast()
    return problem


class _Joining:
    """The steps of one rank, each of which all ranks take before the next."""

    def __init__(
        self, regions: BoundRegions, link: Link, group: _cuda.Group | None, place: int
    ) -> None:
        self._regions = regions
        self._link = link
        self._group = group
        self._place = place
        self._world_size = len(regions.ptrs)
        self._fds: list[int] = []
        self._token = secrets.randbits(32)

    def run(self) -> str:
        """Take all steps; return the first failure, or an empty string. Collective."""
        link = self._link
        rows = link.gather({"problem": problem_of(self._create), "token": self._token})
        if problem := problems(rows):
            return problem
        self._token = rows[0]["token"]
        # All give a descriptor, but only rank 0's is the object's.
        mine = self._fds.pop() if self._fds else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._fds = link.exchange_fds(mine)
        # The driver would block a rank that binds or maps before all have added their devices.
        steps = [self._add, self._bind, self._map]
        for step in [*steps, *([self._try, self._reduce, self._look] if self._group else [])]:
            if problem := try_together(link, step):
                return problem
        return ""

    def _create(self) -> None:
        if self._link.rank == 0:
            self._fds = [self._open(-1).export_fd()]

    def _open(self, fd: int) -> _cuda.Multicast:
        regions = self._regions
        made = _cuda.Multicast(regions.device, self._world_size, regions.num_bytes, fd)
        regions.multicast = made
        return made

    def _add(self) -> None:
        multicast = self._regions.multicast or self._open(self._fds[0])
        multicast.add_device()

    def _bind(self) -> None:
        assert self._regions.multicast is not None
        self._regions.multicast.bind(self._regions.ptrs[self._link.rank])

    def _map(self) -> None:
        assert self._regions.multicast is not None
        self._ptr = self._regions.multicast.map(self._place)

    def _try(self) -> None:
        assert self._group is not None
        self._group.use_multicast(self._ptr)
        self._group.probe(_cuda.Probe.operands, self._token)

    def _reduce(self) -> None:
        assert self._group is not None
        right = self._group.probe(_cuda.Probe.reduce, self._token)
        bad = [
            f"{op.name} of {dtype.name}"
            for (dtype, ops), bits in zip(_TRIED.items(), right, strict=False)
            for op in ops
            if not bits >> op & 1
        ]
        if bad:
            raise UnsupportedError(f"mapped, but the switch was wrong: {', '.join(bad)}")

    def _look(self) -> None:
        assert self._group is not None
        seen = self._group.probe(_cuda.Probe.stored, self._token)[: self._world_size]
        if bad := [rank for rank, right in enumerate(seen) if right != 1]:
            raise UnsupportedError(
                f"mapped, but what the switch was to store did not arrive: ranks {bad}"
            )

    def close_fds(self) -> None:
        """Close the descriptors that were handed over: a rank that opened the object keeps it."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
