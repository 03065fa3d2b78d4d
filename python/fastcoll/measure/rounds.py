# SPDX-License-Identifier: Apache-2.0
"""Libraries side by side: check, then take turns.

Decides the order of the measurement. Every library's result is checked before anything is timed.
Then the libraries take turns in rounds, each round starting with another one. Meanwhile the ranks
of all others are blocked in a read. Knows nothing of how results are shown or stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured
from fastcoll.measure.protocol import Reply, prepare_command
from fastcoll.measure.timer import Budget, Summary, summarise


class Contender(Protocol):
    """A participant in the turns: the ranks of a library, or these ranks with one algorithm."""

    @property
    def name(self) -> str:
        """The name of its outcomes."""

    @property
    def is_running(self) -> bool:
        """Whether it has processes that answer."""

    def command(self, text: str) -> list[Reply]:
        """Send one command to every rank and return their replies; see `Pool.command`."""


@dataclass
class Outcome:
    """The result of one library for one cell."""

    library: str
    reason: str | None = None  # why there is no time, or None
    # Elements that differ from the reference, over all ranks; None if there is nothing to check.
    num_wrong: int | None = None
    iterations: int = 0
    # Per window, the time of one call on each rank.
    windows_us: list[list[float]] = field(default_factory=list)
    idle_cpu_s: float = 0.0  # CPU time that all waiting ranks took from the others' turns

    @property
    def summary(self) -> Summary | None:
        """Return the figures, None if nothing was timed."""
        return summarise(self.windows_us) if self.windows_us else None


def _windows_us(replies: Sequence[Reply], iterations: int) -> list[list[float]]:
    """Turn every rank's seconds per window into microseconds per call per window."""
    columns = [reply["seconds"] for reply in replies]
    return [[s / iterations * 1e6 for s in window] for window in zip(*columns, strict=True)]


def _check(pool: Contender, cell: Cell, outcome: Outcome) -> None:
    """Prepare `cell` and compare one call with the reference.

    Raises:
        NotMeasured: the library cannot do it, or does it wrong.
    """
    replies = pool.command(prepare_command(cell))
    if replies[0]["num_wrong"] is not None:
        outcome.num_wrong = sum(reply["num_wrong"] for reply in replies)
        if outcome.num_wrong:
            raise NotMeasured(f"wrong result: {outcome.num_wrong} elements")


def _call_us(pool: Contender, budget: Budget) -> float:
    """Return about how long an undisturbed call takes: single calls first, then short windows."""
    call_us, iterations = float("inf"), 1
    for _ in range(3):
        windows = _windows_us(pool.command(f"time {iterations} 3"), iterations)
        # A compiled loop's clock may tick in whole microseconds: a single call can read as 0.
        tick_us = 1 / iterations
        call_us = min(call_us, *(max(tick_us, *window) for window in windows))
        if iterations == 1 and call_us > 10 * budget.window_us:
            break
        iterations = max(1, budget.iterations(call_us) // 4)
    return call_us


def _take_turn(pool: Contender, outcome: Outcome, num_windows: int) -> None:
    """Take the windows of one round; the first one warms the caches and is dropped."""
    replies = pool.command(f"time {outcome.iterations} {num_windows + 1}")
    outcome.windows_us += _windows_us(replies, outcome.iterations)[1:]
    outcome.idle_cpu_s += sum(reply["idle_cpu_s"] for reply in replies)


def measure_cell(
    pools: Sequence[Contender],
    cell: Cell,
    budget: Budget,
    on_turn: Callable[[str], None],
    beside_first: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Check and time `cell` with every library, interleaved.

    Args:
        on_turn: Called with a library's name before each of its turns; the place to draw
            progress, as nothing is being timed then.
        beside_first: Called after each turn of the first library, to measure something in the
            same state of the machine.
    """
    outcomes = [Outcome(pool.name) for pool in pools]
    num_windows = [0] * len(pools)

    def attempt(idx: int, step: Callable[[int], None]) -> None:
        if outcomes[idx].reason is None:
            on_turn(pools[idx].name)
            try:
                step(idx)
            except NotMeasured as error:
                outcomes[idx].reason = str(error)
                outcomes[idx].windows_us.clear()

    def calibrate(idx: int) -> None:
        _check(pools[idx], cell, outcomes[idx])
        call_us = _call_us(pools[idx], budget)
        outcomes[idx].iterations = budget.iterations(call_us)
        num_windows[idx] = budget.windows(call_us)

    def take_turn(idx: int) -> None:
        _take_turn(pools[idx], outcomes[idx], num_windows[idx])
        if idx == 0 and beside_first is not None:
            beside_first()

    for idx in range(len(pools)):
        attempt(idx, calibrate)
    for round_idx in range(budget.num_rounds):
        for turn in range(len(pools)):
            attempt((turn + round_idx) % len(pools), take_turn)
    for pool in pools:
        if pool.is_running:
            pool.command("release")
    return outcomes


def one_way_flag_us(pool: Contender, iterations: int) -> float | None:
    """Return the time of one one-way flag, None where it can't be measured."""
    try:
        replies = pool.command(f"flag {iterations}")
    except NotMeasured:
        return None
    return float(f"{max(reply['seconds'] for reply in replies) * 1e6:.4g}")
