# SPDX-License-Identifier: Apache-2.0
"""The memory that the ranks share, as one rank sees it.

Decides how scratch is divided and reads the verdict. Allocates and maps nothing.

One workspace carries one sequence of kernels, of which at most one runs at a time. All ranks launch
the same kernels in the same order. Their numel, operation, dtypes, epilogue and shape of the launch
are equal. The caller has to check that; here a difference shows as a peer that does not come.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .signal import MAX_CHANNELS, MAX_WORLD, NUM_WORDS, VERDICT_WORDS, Group

SIGNAL_BYTES: int = 4 * NUM_WORDS.value
_BUFFERS = 2
PACK_BYTES = 16


class Verdict(NamedTuple):
    """Why a group is broken: equal on all ranks, but for the last two.

    Attributes:
        rank: The rank that waited in vain.
        missing: The rank that it waited for.
        channel: The program that waited.
        expected: Epoch that this rank's own first vain wait was for; 0 if it had none.
        seen: The epoch that it saw instead.
    """

    rank: int
    missing: int
    channel: int
    expected: int
    seen: int


@dataclass(frozen=True)
class Workspace:
    """Memory that the ranks share, as one rank has mapped it.

    Attributes:
        signals: int64[world_size] on the device, address of every rank's SIGNAL_BYTES bytes of
            words: zeroed before any rank launches, aligned to 64 bytes, used for nothing else.
        scratch: int64[world_size] on the device, address of every rank's scratch, aligned to 16.
        scratch_bytes: Bytes of scratch; equal on all ranks.
        verdict: int32[VERDICT_WORDS], zeroed; memory that both the device and the host can access.
        rank: This rank.
        num_channels: Most programs of a launch; scratch is divided among them. Equal on all ranks.
        limit_s: Limit of one wait inside a kernel.

    Raises:
        ValueError: On construction, for a value out of range, with the reason.
    """

    signals: torch.Tensor
    scratch: torch.Tensor
    scratch_bytes: int
    verdict: torch.Tensor
    rank: int
    num_channels: int = 16
    limit_s: float = 30.0
    _rank_word: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("signals", "scratch"):
            table = getattr(self, name)
            if table.dtype != torch.int64 or table.dim() != 1:
                raise ValueError(f"{name}: need int64[world_size], got {table.dtype}")
        if len(self.signals) != len(self.scratch) or not 1 <= self.world_size <= MAX_WORLD.value:
            raise ValueError(
                f"{len(self.signals)} addresses of signals, {len(self.scratch)} of scratch: need "
                f"one for each of 1 to {MAX_WORLD.value} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if not 1 <= self.num_channels <= MAX_CHANNELS.value:
            raise ValueError(f"num_channels={self.num_channels}: 1 to {MAX_CHANNELS.value}")
        if self.verdict.dtype != torch.int32 or self.verdict.numel() != VERDICT_WORDS.value:
            raise ValueError(f"verdict: need int32[{VERDICT_WORDS.value}]")
        word = torch.tensor([self.rank], dtype=torch.int32, device=self.signals.device)
        object.__setattr__(self, "_rank_word", word)

    @property
    def world_size(self) -> int:
        return len(self.signals)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of a channel's two buffers."""
        return self.scratch_bytes // (self.num_channels * _BUFFERS) // PACK_BYTES * PACK_BYTES

    def group(self) -> Group:
        """The kernels' view."""
        limit_ns = round(self.limit_s * 1e9)
        return Group(
            self.signals, self.scratch, self.buffer_bytes, self.verdict, self._rank_word, limit_ns
        )

    def broken(self) -> Verdict | None:
        """Return why the group is broken, or None; for the kernels that have finished so far.

        A broken group stays so: its kernels fill their outputs with NaN and return at once.
        """
        found, expected, seen = self.verdict.tolist()
        if not found:
            return None
        rest, missing = divmod(found - 1, MAX_WORLD.value)
        channel, rank = divmod(rest, MAX_WORLD.value)
        return Verdict(rank, missing, channel, expected, seen)

    def tiles_per_buffer(self, block: int, itemsize: int) -> int:
        """How many tiles of `block` elements a buffer holds.

        Raises:
            ValueError: It doesn't hold one.
        """
        tiles = self.buffer_bytes // (block * itemsize)
        if tiles < 1:
            need = block * itemsize * self.num_channels * _BUFFERS
            raise ValueError(
                f"a tile of {block} elements of {itemsize} bytes needs {need} bytes of scratch for "
                f"{self.num_channels} channels; there are {self.scratch_bytes}"
            )
        return tiles
