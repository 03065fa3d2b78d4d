# SPDX-License-Identifier: Apache-2.0
"""Schedules with one mistake planted, and all interleavings of a small schedule tried out.

The interleavings share nothing with the checker but the meaning of the steps: they keep counters
and blocks, no clocks.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastcoll_model.schedule import (
    EVERY,
    Contribution,
    Copy,
    Reduce,
    Schedule,
    Signal,
    Span,
    Step,
    Wait,
)
from fastcoll_model.values import Sum, contributions

Programs = dict[tuple[int, int], list[Step]]


def programs(schedule: Schedule) -> Programs:
    return {
        (rank, channel): list(schedule.program(rank, channel))
        for rank in range(schedule.world_size)
        for channel in range(schedule.num_channels)
    }


def with_programs(schedule: Schedule, changed: Programs) -> Schedule:
    return dataclasses.replace(schedule, program=lambda r, c: iter(changed[r, c]))


def with_steps(schedule: Schedule, where: tuple[int, int], steps: list[Step]) -> Schedule:
    return with_programs(schedule, programs(schedule) | {where: steps})


def _another(rank: int, num_ranks: int) -> int:
    return rank if rank == EVERY else (rank + 1) % num_ranks


def _changed(step: Step, n: int) -> Iterator[tuple[str, Step]]:
    """Yield the step with a wrong peer, and with a wrong block."""
    if isinstance(step, Signal | Wait):
        yield "wrong peer", step._replace(rank=_another(step.rank, n))
        return
    sources = [step.src] if isinstance(step, Copy) else list(step.srcs)

    def rebuilt(spans: list[Span]) -> Step:
        return (
            Copy(step.dst, spans[0]) if isinstance(step, Copy) else Reduce(step.dst, tuple(spans))
        )

    for i, source in enumerate(sources):
        moved = source._replace(start=source.start + 1)
        peer = source._replace(rank=_another(source.rank, n))
        yield "wrong block", rebuilt([*sources[:i], moved, *sources[i + 1 :]])
        yield "wrong peer", rebuilt([*sources[:i], peer, *sources[i + 1 :]])
    yield "wrong block", step._replace(dst=step.dst._replace(start=step.dst.start + 1))
    yield "wrong peer", step._replace(dst=step.dst._replace(rank=_another(step.dst.rank, n)))


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield every schedule that differs by one mistake in one step of one rank."""
    n = schedule.world_size
    for where, steps in programs(schedule).items():
        for i, step in enumerate(steps):
            name = f"rank {where[0]} channel {where[1]} step {i} ({step})"
            yield f"dropped: {name}", with_steps(schedule, where, steps[:i] + steps[i + 1 :])
            if i + 1 < len(steps) and steps[i + 1] != step:
                swapped = [*steps[:i], steps[i + 1], step, *steps[i + 2 :]]
                yield f"swapped: {name}", with_steps(schedule, where, swapped)
            for kind, other in _changed(step, n):
                changed = [*steps[:i], other, *steps[i + 1 :]]
                if changed != steps:
                    yield f"{kind}: {name} -> {other}", with_steps(schedule, where, changed)


class TooMany(Exception):
    """A schedule has more states than the limit."""


class Interleavings:
    """Runs a schedule in every order that there is; `fault` is a fault that it found, or None.

    A rank enters: its input appears. It runs its channels step by step. Then it returns: its output
    is taken, and it owns input and output no longer.
    """

    def __init__(self, schedule: Schedule, max_states: int = 400_000) -> None:
        self.schedule = schedule
        self.keys = [
            (rank, channel)
            for rank in range(schedule.world_size)
            for channel in range(schedule.num_channels)
        ]
        self.steps = [programs(schedule)[key] for key in self.keys]
        self.max_states = max_states
        self.results: set[Any] = set()
        self.fault = self._explore()

    def _explore(self) -> str | None:
        n = self.schedule.world_size
        start = ((0,) * len(self.keys), (), (), (False,) * n, (None,) * n)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            following = list(self._moves(state))
            for after in following:
                if isinstance(after, str):
                    return after
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
            if len(seen) > self.max_states:
                raise TooMany
            if not following and (fault := self._ended(state)):
                return fault
        return "the result depends on the timing" if len(self.results) > 1 else None

    def _moves(self, state: Any) -> Iterator[Any]:
        places, memory, counters, entered, returned = state
        for rank, inside in enumerate(entered):
            mine = [i for i, key in enumerate(self.keys) if key[0] == rank]
            if not inside:
                blocks = dict(memory)
                for block in range(self.schedule.input_blocks(rank)):
                    blocks[rank, "input", block] = Contribution(rank, block)
                now = (*entered[:rank], True, *entered[rank + 1 :])
                yield (places, self._frozen(blocks), counters, now, returned)
                continue
            if returned[rank] is None and all(places[i] == len(self.steps[i]) for i in mine):
                blocks = dict(memory)
                wanted = range(self.schedule.output_blocks(rank))
                output = tuple(blocks.get((rank, "output", b)) for b in wanted)
                kept = {k: v for k, v in blocks.items() if k[0] != rank or k[1] == "scratch"}
                now = (*returned[:rank], output, *returned[rank + 1 :])
                yield (places, self._frozen(kept), counters, entered, now)
                continue
            for i in mine:
                if places[i] < len(self.steps[i]):
                    after = self._step(state, i)
                    if after is not None:
                        yield after

    def _step(self, state: Any, i: int) -> Any:
        places, memory, counters, entered, returned = state
        step = self.steps[i][places[i]]
        now = (*places[:i], places[i] + 1, *places[i + 1 :])
        if isinstance(step, Signal | Wait):
            if (step.rank, step.channel) not in self.keys:
                return "no such rank"
            other = self.keys.index((step.rank, step.channel))
            counts = dict(counters)
            pair = (i, other) if isinstance(step, Signal) else (other, i)
            counts[pair] = counts.get(pair, 0) + (1 if isinstance(step, Signal) else -1)
            if counts[pair] < 0:
                return None
            return (now, memory, self._frozen(counts), entered, returned)
        blocks = dict(memory)
        fault = self._data(step, blocks, entered, returned)
        return fault or (now, self._frozen(blocks), counters, entered, returned)

    def _data(self, step: Copy | Reduce, blocks: dict, entered: Any, returned: Any) -> str | None:
        n = self.schedule.world_size
        sources = [step.src] if isinstance(step, Copy) else step.srcs
        values = []
        for offset in range(step.dst.num_blocks):
            parts: list[Any] = []
            for span in sources:
                every = range(n) if span.rank == EVERY else [span.rank]
                found = [blocks.get((r, span.buffer, span.start + offset)) for r in every]
                if None in found:
                    return "reads what isn't there"
                parts.append(Sum(tuple(found), True) if span.rank == EVERY else found[0])
            values.append(parts[0] if len(parts) == 1 else Sum(tuple(parts)))
        for offset, value in enumerate(values):
            for rank in range(n) if step.dst.rank == EVERY else [step.dst.rank]:
                block = step.dst.start + offset
                if step.dst.buffer == "output":
                    outside = not 0 <= block < self.schedule.output_blocks(rank)
                    if outside or not entered[rank] or returned[rank] is not None:
                        return "writes to what isn't there"
                blocks[rank, step.dst.buffer, block] = value
        return None

    @staticmethod
    def _frozen(mapping: dict) -> tuple:
        return tuple(sorted((item for item in mapping.items() if item[1] != 0), key=repr))

    def _ended(self, state: Any) -> str | None:
        places, _, counters, _, returned = state
        if any(place < len(steps) for place, steps in zip(places, self.steps, strict=True)):
            return "stuck"
        if counters:
            return "a signal is left over"
        for rank, output in enumerate(returned):
            for value, wanted in zip(output, self.schedule.expected(rank), strict=True):
                if value is None or Counter(contributions(value)) != Counter(wanted):
                    return "wrong result"
        self.results.add(returned)
        return None
