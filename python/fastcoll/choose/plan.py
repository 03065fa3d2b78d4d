# SPDX-License-Identifier: Apache-2.0
"""The plan of one call: all that the C++ core needs to run it, equal on every rank.

Decides the fields and how a plan is shown. Knows nothing of how a plan is chosen or run.
"""

from dataclasses import dataclass, fields
from typing import Any

from fastcoll.types import REDUCTIONS, Algorithm, DType, Op, Verb, num_tensors


@dataclass(frozen=True, slots=True)
class Plan:
    """One call, fully decided; the fields are those of `_C.Plan`, in its order."""

    verb: Verb
    dtype: DType
    op: Op
    algorithm: Algorithm
    numel: int  # elements of the message (see `fastcoll.types.Request`)
    root: int
    segment_bytes: int  # staged bytes of one segment
    fast_numerics: bool  # the order of a float reduction is free
    inline: bool  # data and flag travel in one cache line; for the smallest messages
    splits: int = 0  # see `fastcoll.types.Request`; of a schedule, a hash of all ranks' programs
    channels: int = 0  # thread blocks of each rank's kernel; 0 on CPUs

    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments of `_C.Plan`."""
        return tuple(getattr(self, one.name) for one in fields(self))

    def describe(self) -> str:
        """Return the plan as one line of text."""
        words = [self.verb.name, f"{self.numel} x {self.dtype.name}"]
        if self.verb in REDUCTIONS:
            words.append(self.op.name)
        if self.verb in (Verb.broadcast, Verb.gather, Verb.scatter, Verb.reduce):
            words.append(f"root {self.root}")
        if count := num_tensors(self.splits):
            words.append(f"in {count} tensors")
        elif self.splits and self.algorithm is not Algorithm.schedule:
            words.append("in uneven parts")
        words.append(f"-> {self.algorithm.name}")
        words.append("inline" if self.inline else f"segments of {self.segment_bytes} bytes")
        if self.channels:
            words.append(f"on {self.channels} channels")
        if self.fast_numerics:
            words.append("fast numerics")
        return " ".join(words)
