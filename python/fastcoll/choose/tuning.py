# SPDX-License-Identifier: Apache-2.0
"""Which tuning table a group chooses by: read, held against this machine, agreed.

Decides when a table is used: if every rank has read an equal one. Else all ranks choose by the
model. Must not know how ranks talk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastcoll import env
from fastcoll.bootstrap.identity import layout, library_version
from fastcoll.choose import TuningTable, read_table
from fastcoll.choose.table import difference
from fastcoll.errors import UsageError
from fastcoll.machine import gpu
from fastcoll.machine.cpu import fingerprint
from fastcoll.native import _C
from fastcoll.trust import require_trusted


@dataclass(frozen=True)
class Tuning:
    """A table, or why there is none."""

    table: TuningTable | None
    reason: str  # which table it is; or why the model chooses
    is_refusal: bool = False  # a table was asked for, and can't be used

    @property
    def digest(self) -> str:
        """The digest that the ranks compare; empty without a table."""
        return self.table.digest if self.table else ""

    def problem_on_gpus(self) -> str:
        """Return why calls on this process's GPUs are not chosen by the table; empty: they are."""
        if self.table is None:
            return self.reason
        if self.table.gpus is None:
            return "it has no rows of GPUs: `fastcoll tune --device cuda` adds them"
        other = difference(self.table.gpus, gpu.fingerprint())
        return f"its GPUs are foreign, or stale: {other}" if other else ""


def identity() -> dict[str, dict[str, object]]:
    """Return the build and machine that a table must share with this process."""
    build: dict[str, object] = {"version": library_version(), "layout": layout()}
    return {"build": build, "machine": fingerprint() | {"simd_level": _C.simd_level()}}


def find() -> Tuning:
    """Read the table that FASTCOLL_TUNING names."""
    path = env.TUNING.get()
    if not path:
        return Tuning(None, f"no table ({env.TUNING.name} is not set)")
    try:
        table = read_table(require_trusted(Path(path)), identity())
    except UsageError as error:
        return Tuning(None, str(error), is_refusal=True)
    except OSError as error:
        return Tuning(None, f"{path}: can't be read: {error.strerror or error}", is_refusal=True)
    of_gpus = f" and {table.num_gpu_rows} of GPUs" if table.num_gpu_rows else ""
    what = f"table {table.digest} of {table.date}, {table.num_rows} measurements{of_gpus}"
    return Tuning(table, f"{what}, from {path}")


def agree(mine: Tuning, digests: Sequence[str]) -> Tuning:
    """Return the tuning that the group uses, the same on every rank.

    Args:
        mine: This rank's tuning.
        digests: Every rank's `Tuning.digest`, by rank.
    """
    if len(set(digests)) == 1:
        return mine
    ranks_of: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks_of.setdefault(digest, []).append(rank)
    sides = "; ".join(f"ranks {ranks}: {digest or 'none'}" for digest, ranks in ranks_of.items())
    own = f"; here: {mine.reason}" if mine.is_refusal else ""
    return Tuning(None, f"the ranks have different tuning tables: {sides}{own}", is_refusal=True)
