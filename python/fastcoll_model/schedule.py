# SPDX-License-Identifier: Apache-2.0
"""A collective as data: the steps of every rank over blocks of memory.

Decides the four kinds of step and their meaning, and the inputs and outputs of each verb. Knows
nothing of time, topology or how schedules are built.

The message is cut into equal blocks; a `Span` names consecutive blocks of one rank's buffer. A rank
runs one or more channels side by side; the steps of a channel run one after the other. Every rank
sees every rank's memory, as in fastcoll itself:

- `Copy` and `Reduce` may read and write anywhere, but the channel that holds the step always moves
  the data.
- `Signal` raises a counter that one channel of one rank waits on; it takes no time there. The k-th
  `Wait` of a channel for another one returns when that one's k-th `Signal` to it has arrived.
  Writes before the signal are visible after the wait.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastcoll_model.errors import ModelError

Buffer = Literal["input", "output", "scratch"]

EVERY = -1
"""As the rank of a span: the multicast address of all ranks. Read, it is the sum over all ranks,
in an order that the switch chooses; written, it writes to all."""


class Span(NamedTuple):
    """`num_blocks` blocks of one rank's buffer, from block `start` on."""

    rank: int
    buffer: Buffer
    start: int
    num_blocks: int

    def __str__(self) -> str:
        owner = "every rank" if self.rank == EVERY else f"rank {self.rank}"
        end = self.start + self.num_blocks
        blocks = f"{self.start}" if self.num_blocks == 1 else f"{self.start}:{end}"
        return f"{owner}'s {self.buffer}[{blocks}]"


class Copy(NamedTuple):
    """`dst = src`."""

    dst: Span
    src: Span

    def __str__(self) -> str:
        return f"copy {self.dst} = {self.src}"


class Reduce(NamedTuple):
    """`dst = srcs[0] + srcs[1] + ...`, added from left to right; `dst` may be one of them."""

    dst: Span
    srcs: tuple[Span, ...]

    def __str__(self) -> str:
        return f"reduce {self.dst} = {' + '.join(map(str, self.srcs))}"


class Signal(NamedTuple):
    """Raise the counter that `channel` of `rank` waits on for this channel."""

    rank: int
    channel: int = 0

    def __str__(self) -> str:
        return f"signal rank {self.rank}" + (f" channel {self.channel}" if self.channel else "")


class Wait(NamedTuple):
    """Wait for the next signal of `channel` of `rank` to this channel."""

    rank: int
    channel: int = 0

    def __str__(self) -> str:
        return f"wait for rank {self.rank}" + (f" channel {self.channel}" if self.channel else "")


Step = Copy | Reduce | Signal | Wait
Program = Iterator[Step]


def moved(step: Copy | Reduce) -> list[tuple[Span, Span]]:
    """Return the (source, destination) pairs of a data step whose blocks cross between ranks."""
    sources = (step.src,) if isinstance(step, Copy) else step.srcs
    return [(source, step.dst) for source in sources if source.rank != step.dst.rank]


class Contribution(NamedTuple):
    """Block `block` of the input of `rank`."""

    rank: int
    block: int


VERBS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
REDUCTIONS = frozenset(("all_reduce", "reduce_scatter", "reduce"))
ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))


@dataclass(frozen=True)
class Schedule:
    """The steps of every rank of a collective.

    Attributes:
        verb: One of `VERBS`.
        algorithm: Its name in `builders`.
        world_size: Number of ranks.
        num_blocks: Blocks of the message: the larger of a rank's input and output, as nccl-tests
            counts sizes. That is the input of reduce_scatter, scatter and all_to_all, the output of
            all_gather and gather. A multiple of `world_size` where a rank's part counts.
        program: The steps of (rank, channel), fresh at every call.
        num_channels: Channels of every rank.
        root: Rank that gives in broadcast and scatter, and gets in reduce and gather.
    """

    verb: str
    algorithm: str
    world_size: int
    num_blocks: int
    program: Callable[[int, int], Program]
    num_channels: int = 1
    root: int = 0

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ModelError(f"no verb {self.verb!r}; the verbs are {', '.join(VERBS)}")
        if not 0 <= self.root < self.world_size:
            raise ModelError(f"root {self.root} is not a rank of {self.world_size}")

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one rank's part of the message."""
        return self.num_blocks // self.world_size

    def input_blocks(self, rank: int) -> int:
        """Return how many blocks `rank` gives."""
        if self.verb in ("broadcast", "scatter"):
            return self.num_blocks if rank == self.root else 0
        if self.verb in ("all_gather", "gather"):
            return self.chunk_blocks
        return self.num_blocks

    def output_blocks(self, rank: int) -> int:
        """Return how many blocks `rank` gets."""
        if self.verb in ("reduce", "gather") and rank != self.root:
            return 0
        if self.verb in ("reduce_scatter", "scatter"):
            return self.chunk_blocks
        return self.num_blocks

    def expected(self, rank: int) -> list[list[Contribution]]:
        """Return, for each block of `rank`'s output, the contributions that belong there."""
        chunk, everyone = self.chunk_blocks, range(self.world_size)
        if self.verb in ("reduce", "gather") and rank != self.root:
            return []
        if self.verb in ("all_reduce", "reduce"):
            return [[Contribution(q, b) for q in everyone] for b in range(self.num_blocks)]
        if self.verb == "reduce_scatter":
            mine = range(rank * chunk, (rank + 1) * chunk)
            return [[Contribution(q, b) for q in everyone] for b in mine]
        if self.verb == "broadcast":
            return [[Contribution(self.root, b)] for b in range(self.num_blocks)]
        if self.verb == "scatter":
            return [[Contribution(self.root, rank * chunk + j)] for j in range(chunk)]
        first = rank * chunk if self.verb == "all_to_all" else 0
        return [[Contribution(q, first + j)] for q in everyone for j in range(chunk)]
