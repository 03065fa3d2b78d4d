# SPDX-License-Identifier: Apache-2.0
"""A reduction whose elements are coded between nodes: `wire=` of a call on CPUs.

Decides the coded arrays: each node's partials, divided before for an average, and the sums of an
all_reduce once more. So every rank decodes the same bytes, its own among them, and all have one
result. Blocks of 128 elements are counted from the message's element 0. Segments, chunks and shards
begin with a block, so neither their sizes nor the lanes change a bit. docs/numerics.md has the
definition and its bounds. Must not know phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from fastcoll.nodes.arrays import WIRE_BLOCK, add_coded, code, coded_bytes, round_to
from fastcoll.nodes.reductions import Reduction
from fastcoll.types import Op, Wire


@dataclass(frozen=True)
class CodedReduction(Reduction):
    """How to reduce with coded elements."""

    wire: Wire
    # Of the message or of a segment of it, fp32; see `fastcoll.calls.tensors.Call`.
    feedback: torch.Tensor | None

    @property
    def block_numel(self) -> int:
        return WIRE_BLOCK

    def of_segment(self, first: int, last: int) -> Self:
        if self.feedback is None:
            return self
        return replace(self, feedback=self.feedback[first:last])

    def given_bytes(self, numel: int) -> int:
        return coded_bytes(self.wire, numel)

    def give(self, partials: torch.Tensor, first: int = 0) -> torch.Tensor:
        """See `Reduction`; zeros fill a message up to whole blocks, and have no feedback."""
        divisor = self.world_size if self.op is Op.AVG else 1
        if self.feedback is None:
            return code(self.wire, partials, None, divisor)
        feedback = self.feedback[first:][: partials.numel()]
        num_bytes = coded_bytes(self.wire, partials.numel())
        coded = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        some = code(self.wire, partials[: feedback.numel()], feedback, divisor)
        coded[: some.numel()] = some
        return coded

    def reduce(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """See `Reduction`; the sum is coded, as those of shards are."""
        total = torch.empty(self.given_bytes(target.numel()), dtype=torch.uint8, device="cpu")
        add_coded(self.wire, rows, total, target.numel(), coded_again=True)
        self.take(target, total)

    def reduce_part(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """See `Reduction`; the sum is not coded, as it does not cross."""
        self._round(target, rows)

    def total(self, rows: Sequence[torch.Tensor], numel: int, result: torch.Tensor) -> torch.Tensor:
        del result
        coded = torch.zeros(self.given_bytes(numel), dtype=torch.uint8, device="cpu")
        whole_bytes = self.given_bytes(WIRE_BLOCK)
        present = rows[0].numel() // whole_bytes * WIRE_BLOCK
        add_coded(self.wire, rows, coded, present, coded_again=True)
        return coded

    def take(self, target: torch.Tensor, total: torch.Tensor) -> None:
        self._round(target, [total])

    def _round(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Add coded arrays and round their sum, once; a NaN becomes the canonical one."""
        is_wide = target.dtype == torch.float32
        wide = target if is_wide else torch.empty(target.numel(), dtype=torch.float32, device="cpu")
        add_coded(self.wire, rows, wide, target.numel(), coded_again=False)
        round_to(target, wide, self.dtype)
