# SPDX-License-Identifier: Apache-2.0
"""Mistakes that programs of torch.distributed make, and the error of each on every rank.

On Gloo each of them aborts a process, gives garbage or waits for the whole limit without naming a
rank. All run on three ranks; rank 1 is the one that errs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests.support.harness import LATE_S, Attempt, Rank, attempt

WORLD, ODD = 3, 1
LIMIT = timedelta(seconds=1)


@dataclass(frozen=True)
class Mistake:
    """A wrong call of rank 1 beside the usual ones; the error's text has all `words`.

    Attributes:
        local: Rank 1's own call is wrong in itself.
    """

    odd: Callable[[], object]
    usual: Callable[[], object]
    words: tuple[str, ...]
    local: bool = False


def _ones(numel: int = 8) -> torch.Tensor:
    return torch.ones(numel)


def _all_reduce(numel: int) -> None:
    dist.all_reduce(_ones(numel))


def _gather_list(own: int, *, right: bool = True) -> None:
    sizes = [own if right else own + 1] * WORLD
    dist.all_gather([_ones(size) for size in sizes], _ones(own))


def _shuffle(gives: list[int], gets: list[int]) -> None:
    dist.all_to_all_single(_ones(sum(gets)), _ones(sum(gives)), gets, gives)


def _swapped(*numels: int) -> None:
    for numel in numels:
        _all_reduce(numel)


def _uneven_reduce_scatter(*sizes: int) -> None:
    dist.reduce_scatter(_ones(sizes[dist.get_rank()]), [_ones(size) for size in sizes])


MISTAKES = {
    "a gather into a list that does not fit": Mistake(
        lambda: _gather_list(8, right=False), lambda: _gather_list(8), ("barrier",), local=True
    ),
    "split sizes that a peer does not expect": Mistake(
        lambda: _shuffle([2, 1, 2], [1, 1, 1]), lambda: _shuffle([1] * 3, [1] * 3), ("all_to_all",)
    ),
    "split sizes that do not add up": Mistake(
        lambda: dist.all_to_all_single(_ones(3), _ones(3), [1, 1, 1], [1, 1, 2]),
        lambda: _shuffle([1] * 3, [1] * 3),
        ("barrier",),
        local=True,
    ),
    "two calls in another order": Mistake(
        lambda: _swapped(9, 8), lambda: _swapped(8, 9), ("numel differs: ", "numel=")
    ),
    "outputs of several sizes": Mistake(
        lambda: _uneven_reduce_scatter(8, 9, 8),
        lambda: _uneven_reduce_scatter(8, 8, 8),
        ("reduce_scatter",),
    ),
}


def make(rank: Rank, name: str) -> list[Attempt]:
    """Make a mistake after some right calls; then every rank makes its next call."""
    mistake = MISTAKES[name]
    for numel in (8, 9):
        _all_reduce(numel)
    first = attempt(mistake.odd if rank.rank == ODD else mistake.usual)
    return [first, attempt(dist.barrier)]


def check(name: str, rows: list[list[Attempt]]) -> None:
    """Check the errors on all ranks."""
    mistake = MISTAKES[name]
    verdict = rows[0][-1].text
    for rank, (first, then) in enumerate(rows):
        wrong_here = mistake.local and rank == ODD
        # A rank that does not wait in the call, as a broadcast's root, gets the error in the next.
        assert first.kind in (("UsageError",) if wrong_here else ("DesyncError", "")), (rank, first)
        assert then.kind == "DesyncError", (rank, then)
        assert then.text == verdict, (rank, then)
        assert first.seconds < LATE_S, (rank, first)
        assert then.seconds < LATE_S, (rank, then)
        if first.kind == "DesyncError":
            assert first.text == verdict, (rank, first)
    assert any(first.kind == "DesyncError" for first, _ in rows) or mistake.local
    assert f"rank {ODD}" in verdict
    for word in mistake.words:
        assert word in verdict, (word, verdict)


def wrong_everywhere(rank: Rank) -> list[Attempt]:
    """Make wrong calls on all ranks: no message is sent, and the group goes on."""
    del rank
    calls = [MISTAKES[name].odd for name in MISTAKES if MISTAKES[name].local]
    seen = [attempt(call) for call in calls]
    total = _ones()
    dist.all_reduce(total)
    assert total[0] == WORLD
    return seen


def receive_less(rank: Rank) -> list[Attempt]:
    """Send rank 1 more than it receives, and too much for rank 0 not to wait."""
    if rank.rank == 0:
        first = attempt(dist.send, _ones((1 << 20) + 1), ODD)
    elif rank.rank == ODD:
        first = attempt(dist.recv, _ones(1 << 20), 0)
    else:
        first = Attempt("", "", 0)
    return [first, attempt(dist.barrier)]


def models_differ(rank: Rank) -> list[Attempt]:
    """Run DDP on a model that has another shape on rank 1, which torch tells rank 1 alone."""
    model = nn.Linear(4, 5 if rank.rank == ODD else 4)
    return [attempt(nn.parallel.DistributedDataParallel, model), attempt(dist.barrier)]
