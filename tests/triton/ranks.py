# SPDX-License-Identifier: Apache-2.0
"""The work of a rank in the tests of the Triton kernels: calls over memory that all ranks map.

Decides how the memory of a world lies in one file and how calls are made, by the interpreter. Must
not know what the results should be. Kernels are imported in the ranks only, where TRITON_INTERPRET
is set.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import oracle
from tests.support.harness import Rank
from tests.triton import mutants

SCRATCH_BYTES = 32 << 10
_SHARE_BYTES = SCRATCH_BYTES + (16 << 10)
_VERDICT_BYTES = 64  # of the words: those that do not grow


@dataclass(frozen=True)
class World:
    """The memory of one group, and how its ranks behave.

    Attributes:
        folder: Where the memory's file lies, new for every world, and a planted package.
        world_size: Number of ranks.
        package: Which package's kernels run.
        limits_s: Limit of a wait, by rank; a single one is everybody's.
        absent: Ranks that make no call.
        words_before: The value that all words that grow hold before the first call.
    """

    folder: str
    world_size: int
    package: str = "fastcoll_kernels"
    limits_s: tuple[float, ...] = (60.0,)
    absent: tuple[int, ...] = ()
    words_before: int = 0

    def __post_init__(self) -> None:
        path = Path(self.folder, "memory")
        if path.exists():
            return
        share = np.zeros(_SHARE_BYTES // 4, np.int32)
        share[(SCRATCH_BYTES + _VERDICT_BYTES) // 4 :] = self.words_before
        path.write_bytes(share.tobytes() * self.world_size)


@dataclass(frozen=True)
class Case:
    """One call. `block` and `channels` are the shape of the launch."""

    algorithm: str
    verb: str
    dtype: str
    numel: int  # of the result of an all_reduce, of the input of a reduce_scatter
    op: str
    block: int
    channels: int
    seed: int


@dataclass(frozen=True)
class Report:
    """The outcome of the calls on one rank: outputs as bits, and the verdict."""

    outputs: list[np.ndarray]
    verdict: tuple[int, ...] | None


Perform = Callable[[int, Sequence[Case]], list[Report]]


def words_in(dtype: str, numel: int, rank: int, seed: int) -> np.ndarray:
    """The bits that a rank puts in: numbers that a wrong order changes, and any bits at all."""
    rng = np.random.default_rng([oracle.DTYPES.index(dtype), rank, seed])
    count = numel * oracle.lanes(dtype)
    word = oracle.word_of(dtype)
    anything = rng.integers(0, 2 ** (8 * word.itemsize) - 1, count, np.uint64, True).astype(word)
    dtype = oracle.COMPLEX.get(dtype, dtype)
    if dtype == "bool":
        return anything & 1
    if dtype not in oracle.FLOATS:
        return anything
    wide = np.float64 if dtype == "float64" else np.float32
    special = rng.choice(np.array([2.0**24, -(2.0**24), 1.0, 0.5, 0.0, -0.0]), count)
    numbers = np.where(rng.random(count) < 0.4, special, rng.standard_normal(count)).astype(wide)
    with np.errstate(over="ignore"):
        return np.where(rng.random(count) < 0.2, anything, oracle.encode(numbers, dtype))


def tensor_of(words: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor with these bits, in memory of its own."""
    raw = torch.from_numpy(words.copy().view(np.uint8))
    return raw.view(getattr(torch, dtype))


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor's elements or components."""
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.reshape(-1).view(torch.uint8).numpy().view(oracle.word_of(name)).copy()


def workspace(me: Rank, world: World, num_channels: int = 2) -> Any:
    """This rank's view of the world's memory."""
    module = mutants.load(world.folder, world.package, "workspace")
    with open(Path(world.folder, "memory"), "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    shares = [memory.data_ptr() + peer * _SHARE_BYTES for peer in range(world.world_size)]
    signals = torch.tensor([share + SCRATCH_BYTES for share in shares])
    space = module.Workspace(
        signals,
        torch.tensor(shares),
        SCRATCH_BYTES,
        torch.zeros(module.VERDICT_WORDS.value, dtype=torch.int32),
        me.rank,
        num_channels,
        world.limits_s[me.rank % len(world.limits_s)],
    )
    assert module.SIGNAL_BYTES <= _SHARE_BYTES - SCRATCH_BYTES
    # The tables hold bare addresses: the mapping must outlive them.
    object.__setattr__(space, "memory", memory)
    return space


def perform(me: Rank, world: World, cases: Sequence[Case]) -> Report:
    """Make calls one after another; outputs are poisoned before."""
    if me.rank in world.absent:
        return Report([], None)
    space = workspace(me, world)
    launches = mutants.load(world.folder, world.package, "call").Launch
    outputs = []
    for case in cases:
        algorithm = mutants.load(world.folder, world.package, case.algorithm)
        source = tensor_of(words_in(case.dtype, case.numel, me.rank, case.seed), case.dtype)
        launch = launches(case.channels, 4, case.block)
        if case.verb == "all_reduce":
            out = source  # in place
            algorithm.all_reduce(source, space, case.op, launch=launch)
        else:
            out = torch.full_like(source[: case.numel // world.world_size], 1)
            algorithm.reduce_scatter(out, source, space, case.op, launch=launch)
        outputs.append(bits_of(out))
    verdict = space.broken()
    return Report(outputs, verdict and tuple(verdict))


def reduce_here(me: Rank, cases: Sequence[Case], num_sources: int) -> list[np.ndarray]:
    """Reduce arrays of this process: the ranks share the cases among them."""
    from fastcoll_kernels import call, reduce

    outputs = []
    for case in cases[me.rank :: me.world_size]:
        sources = [
            tensor_of(words_in(case.dtype, case.numel, rank, case.seed), case.dtype)
            for rank in range(num_sources)
        ]
        out = torch.empty_like(sources[0])
        table = [source.data_ptr() for source in sources]
        reduce.reduce(table, out, case.op, launch=call.Launch(case.channels, 4, case.block))
        outputs.append(bits_of(out))
    return outputs
