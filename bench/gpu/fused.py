# SPDX-License-Identifier: Apache-2.0
"""Times the Triton kernels on one GPU beside those of CUDA; ranks are streams (streams.py).

The case is all_reduce -> add residual -> RMSNorm as one kernel. Beside it are the same as three
steps, by Triton's all_reduce and by that of CUDA, and the plain all_reduce of both. The variants
take turns, each in a captured graph. Every case is compared with sums in float32 before it is
timed. One thread launches all graphs, so the time is that of the last rank: the others have waited
for it.
`python fused.py OUT.json`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import streams
import torch
from parts import run_parts
from streams import Body, CudaGroup, CudaSpace, Group

from fastcoll import env
from fastcoll_kernels import epilogues, one_shot, two_shot
from fastcoll_kernels.workspace import Workspace

BUDGET_S = 80.0
CALLS, WINDOWS = 50, 9
COLUMNS, EPSILON = 4096, 1e-5
ROWS = (1, 8, 64, 512)  # of bfloat16: 8 KiB to 4 MiB
SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)  # of float32
WORLDS = (2, 4, 8)
CHANNELS, SCRATCH_BYTES = 16, 64 << 20
MODULES = {"one_shot": one_shot, "two_shot": two_shot}
Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A call, the group that makes it, and where its ranks' results go."""

    what: str
    group: Group
    call: Body
    outs: list[torch.Tensor]


def check(one: Contender, wanted: torch.Tensor) -> None:
    """Raise an error if a group is broken or its results are wrong."""
    for space, out in zip(one.group.spaces, one.outs, strict=True):
        if space.broken() is not None:
            raise RuntimeError(f"{one.what}, rank {space.rank}: {space.broken()}")
        torch.testing.assert_close(
            out.float(),
            wanted,
            rtol=2.0**-6,
            atol=1e-2,
            msg=lambda text: f"{one.what}: {text}",
        )


def side_by_side(contenders: list[Contender], wanted: torch.Tensor, case: str) -> Iterator[Row]:
    """Time calls in turn, whose results must all be close to the expected ones."""
    replays = []
    for one in contenders:
        replays.append(one.group.capture(one.call, CALLS))
        for out in one.outs:
            out.fill_(float("nan"))
        one.group.replay(replays[-1])
        check(one, wanted)
    windows = [
        [one.group.replay(again)[-1] for one, again in zip(contenders, replays, strict=True)]
        for _ in range(WINDOWS)
    ]
    for one, times in zip(contenders, zip(*windows, strict=True), strict=True):
        yield _row(one.what, case, median(times) * 1e3 / CALLS)


def fused(world: int, rows: int) -> Iterator[Row]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=streams.DEVICE).bfloat16()

    parts = [some(rows, COLUMNS) for _ in range(world)]
    residual, weight = some(rows, COLUMNS), some(COLUMNS)
    outs, in_three_outs, cuda_outs, summed = (
        [torch.empty_like(residual) for _ in parts] for _ in range(4)
    )
    norm = partial(torch.nn.functional.rms_norm, normalized_shape=(COLUMNS,), eps=EPSILON)

    def in_one(space: Workspace) -> None:
        rank = space.rank
        end = epilogues.add_rms_norm(outs[rank], residual, weight, EPSILON, summed[rank])
        one_shot.all_reduce(parts[rank], space, out=outs[rank], epilogue=end)

    def add_and_norm(rank: int, results: list[torch.Tensor]) -> None:
        torch.add(summed[rank], residual, out=summed[rank])
        results[rank] = norm(summed[rank], weight=weight)

    def in_three(space: Workspace) -> None:
        one_shot.all_reduce(parts[space.rank], space, out=summed[space.rank])
        add_and_norm(space.rank, in_three_outs)

    def in_three_by_cuda(space: CudaSpace) -> None:
        space.comm.all_reduce(parts[space.rank], out=summed[space.rank])
        add_and_norm(space.rank, cuda_outs)

    total = torch.stack(parts).float().sum(0) + residual.float()
    wanted = norm(total, weight=weight.float())
    group = Group(world, num_channels=CHANNELS, scratch_bytes=SCRATCH_BYTES)
    contenders = [
        Contender("fused add + RMSNorm", group, in_one, outs),
        Contender("in three steps", group, in_three, in_three_outs),
    ]
    if (by_cuda := cuda.group(world)) is not None:
        contenders.append(Contender("in three steps, CUDA", by_cuda, in_three_by_cuda, cuda_outs))
    yield from side_by_side(contenders, wanted, f"{world} ranks, {rows} x {COLUMNS} bfloat16")


def plain(world: int, algorithm: str) -> Iterator[Row]:
    group = Group(world, num_channels=CHANNELS, scratch_bytes=SCRATCH_BYTES)
    by_cuda = cuda.group(world)
    for num_bytes in SIZES:
        parts = [torch.randn(num_bytes // 4, device=streams.DEVICE) for _ in range(world)]
        outs = [torch.empty_like(part) for part in parts]

        def call(space: Workspace, parts: Any = parts, outs: Any = outs) -> None:
            MODULES[algorithm].all_reduce(parts[space.rank], space, out=outs[space.rank])

        def call_cuda(space: CudaSpace, parts: Any = parts, outs: Any = outs) -> None:
            rank = space.rank
            space.comm.all_reduce(parts[rank], out=outs[rank], algorithm=algorithm)

        contenders = [Contender(f"Triton {algorithm}", group, call, outs)]
        if by_cuda is not None:
            contenders.append(Contender(f"CUDA {algorithm}", by_cuda, call_cuda, outs))
        case = f"{world} ranks, {num_bytes} bytes"
        yield from side_by_side(contenders, torch.stack(parts).sum(0), case)


class Cuda:
    """The CUDA kernels' group, one at a time: each claims its share of the device."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._group: CudaGroup | None = None
        self._world = 0

    def group(self, world: int) -> CudaGroup | None:
        """Return the ranks of a group of this size, or None if they can't come up."""
        if world != self._world:
            self.close()
            self._world = world
            try:
                self._group = CudaGroup(world, CHANNELS)
            except RuntimeError as error:  # the Triton kernels are worth measuring all the same
                print(f"CUDA, {world} ranks: {error}", flush=True)
                self.problems.append(f"CUDA, {world} ranks: {str(error).splitlines()[-1]}"[:300])
        return self._group

    def close(self) -> None:
        """End the group, if there is one; it may be broken."""
        if self._group is not None:
            self._group.close()
        self._group, self._world = None, 0


cuda = Cuda()


def _row(what: str, case: str, value: float) -> Row:
    return {"what": what, "case": case, "value": round(value, 3), "unit": "us"}


def main(path: Path) -> None:
    document: dict[str, Any] = {"columns": COLUMNS, "rows": [], "failed": []}
    cuda.problems = document["failed"]
    parts = [partial(fused, world, rows) for world in WORLDS for rows in ROWS]
    parts += [partial(plain, world, name) for world in WORLDS for name in MODULES]
    try:
        run_parts(path, document, parts, BUDGET_S, recover=cuda.close)
    finally:
        cuda.close()


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]))
