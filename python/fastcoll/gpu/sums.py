# SPDX-License-Identifier: Apache-2.0
"""Sums of parts that lie in this rank's own memory, for copy engines: by Triton's kernel or CUDA's.

Decides which of the two adds. Both add in the order of the parts and have the CPU's bits, so ranks
may differ. Triton's kernel is taken where Triton is installed and has put its code on the GPU
before a rank waited for this one. Else CUDA's adds, which is always loaded: in a capture that met
no call of its kind before, for instance. Must not know who brought the parts.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from fastcoll.gpu.nccl import add_parts
from fastcoll.memory.symmetric import bytes_at
from fastcoll.native import _C
from fastcoll.text import say
from fastcoll.types import ITEMSIZE, TORCH_DTYPES, DType, Op

_Kind = tuple[DType, Op, int, int]  # of a sum: its type, its operation, its parts, its code
_NUMELS = (16, 17, 1)  # Triton compiles a code of its own for each: see _code_number


def _code_number(numel: int) -> int:
    """Return a number for the code that Triton makes for so many elements.

    It compiles for one element, for a multiple of 16 and for all others.
    """
    return 1 if numel == 1 else 16 * (numel % 16 == 0)


class Sums:
    """The sums of one rank on its GPU."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._loaded: set[_Kind] = set()
        self._tries = find_spec("triton") is not None

    def make_ready(self, plan: _C.Plan, num_parts: int, *, captured: bool) -> None:
        """Bring Triton's code for a plan to the GPU, before any rank waits for this one."""
        for numel in _NUMELS:
            if self._tries and _kind(plan, num_parts, numel) not in self._loaded:
                self._load(plan, num_parts, numel, captured)

    def _load(self, plan: _C.Plan, num_parts: int, numel: int, captured: bool) -> None:
        """Load the code for so many elements; after a failure no other one is tried."""
        try:
            from fastcoll_kernels import loading, reduce  # only now: it imports Triton

            place = torch.device("cuda", self._device)
            room = torch.empty(numel, dtype=TORCH_DTYPES[DType(plan.dtype)], device=place)
            with torch.cuda.device(self._device):
                code = reduce.code_of([room.data_ptr()] * num_parts, room, Op(plan.op).name)
                if captured and not loading.is_loaded(code):
                    return  # loading may wait for other work, so a capture forbids it
                loading.load(code)
            self._loaded.add(_kind(plan, num_parts, numel))
        except Exception as error:  # of many classes, Triton's own
            self._tries = False
            say(f"CUDA's kernel adds in place of Triton's, which can't be had: {error}")

    def add(
        self, plan: _C.Plan, parts: Sequence[int], target: int, numel: int, stream: int
    ) -> None:
        """Add parts in their order, in the current stream, which is `stream`."""
        if _kind(plan, len(parts), numel) not in self._loaded:
            add_parts(self._device, plan, [*parts], target, numel, stream)
            return
        from fastcoll_kernels import reduce

        dtype = DType(plan.dtype)
        out = bytes_at(target, numel * ITEMSIZE[dtype], self._device).view(TORCH_DTYPES[dtype])
        with torch.cuda.device(self._device):
            reduce.reduce(parts, out, Op(plan.op).name)


def _kind(plan: _C.Plan, num_parts: int, numel: int) -> _Kind:
    return DType(plan.dtype), Op(plan.op), num_parts, _code_number(numel)
