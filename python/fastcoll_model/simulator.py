# SPDX-License-Identifier: Apache-2.0
"""Run a schedule over a fabric and tell how long it takes.

Decides which steps take time:

- A signal arrives after the route's latency; sending it takes no time.
- A transfer between ranks is a flow over the links of its route. Flows that share a link share its
  bandwidth (`sharing`). The terms of one reduction flow at the same time.
- A reduction then takes gamma for every byte added. Copies and reductions within a rank take no
  link.
- The channels of a rank run side by side, each one step after the other.

Exact for up to some thousand ranks; `regular` runs one rank in place of all where all do the same.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import Fabric, Link
from fastcoll_model.schedule import EVERY, Copy, Reduce, Schedule, Signal, Step, Wait, moved
from fastcoll_model.sharing import fair_rates

_SAME_TIME = 1e-9  # relative: events that differ by rounding only are one


class Event(NamedTuple):
    """A step that took time, for a picture."""

    rank: int
    channel: int
    start_us: float
    end_us: float
    step: Step


@dataclass
class Timing:
    """How long a schedule takes.

    Attributes:
        time_us: From the start, at which all ranks call, until the last rank is through.
        link_bytes: Bytes that each link carried.
        events: The steps, if asked for.
    """

    time_us: float = 0.0
    link_bytes: dict[Link, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Flow:
    """A transfer under way."""

    __slots__ = ("bytes_left", "rate", "since_us", "stamp", "stream", "usage")

    def __init__(self, stream: "Stream", usage: Mapping[Link, float], num_bytes: float) -> None:
        self.stream = stream
        self.usage = usage
        self.bytes_left = num_bytes
        self.rate = 0.0
        self.since_us = 0.0
        self.stamp = 0


class Stream:
    """One channel of one rank."""

    __slots__ = ("channel", "num_flows", "rank", "started_us", "step", "steps", "time_us")

    def __init__(self, rank: int, channel: int, steps: Iterator[Step]) -> None:
        self.rank = rank
        self.channel = channel
        self.steps = steps
        self.step: Step | None = None
        self.time_us = 0.0
        self.started_us = 0.0
        self.num_flows = 0


def simulate(
    schedule: Schedule, fabric: Fabric, size_bytes: float, *, trace: bool = False
) -> Timing:
    """Return how long a schedule takes for a message of `size_bytes`.

    Args:
        schedule: A schedule that the checker accepts.
        fabric: Where it runs; rank i of the schedule is rank i of the fabric.
        size_bytes: As in `Schedule.num_blocks`; cut into blocks of equal size, without rounding.
        trace: Keep the events.

    Raises:
        ModelError: The fabric has too few ranks, or the schedule waits for ever.
    """
    return Simulation(schedule, fabric, size_bytes, trace=trace).run()


class Simulation:
    """One run; `regular` overrides the parts that depend on the ranks that are run."""

    def __init__(
        self, schedule: Schedule, fabric: Fabric, size_bytes: float, *, trace: bool = False
    ) -> None:
        if schedule.world_size > fabric.num_ranks:
            raise ModelError(
                f"{schedule.world_size} ranks don't fit on a topology of {fabric.num_ranks}"
            )
        self.schedule = schedule
        self.fabric = fabric
        self.block_bytes = size_bytes / schedule.num_blocks
        self.trace = trace
        self.timing = Timing()
        self.streams = {
            (rank, channel): Stream(rank, channel, schedule.program(rank, channel))
            for rank in self.ranks()
            for channel in range(schedule.num_channels)
        }
        self.arrivals: dict[tuple[int, ...], list[float]] = {}
        self.waiting: dict[tuple[int, ...], Stream] = {}
        self.flows_of: dict[Link, dict[Flow, None]] = {}
        self.usages: dict[tuple[int, int], Mapping[Link, float]] = {}
        self.dirty: set[Link] = set()
        self.ticket = itertools.count()
        self.queue: list[tuple[float, int, Stream | Flow, int]] = []

    def ranks(self) -> range:
        """Return the ranks whose steps are run."""
        return range(self.schedule.world_size)

    def wire(self, sender: Stream, signal: Signal) -> tuple[int, ...]:
        """Return which wait a signal is for: (rank, channel) that signals, then that waits."""
        return (sender.rank, sender.channel, signal.rank, signal.channel)

    def usage(self, source: int, destination: int) -> Mapping[Link, float]:
        """Return the share of each link of a transfer."""
        key = (source, destination)
        if key not in self.usages:
            self.usages[key] = dict.fromkeys(self.fabric.route(source, destination).links, 1.0)
        return self.usages[key]

    def multicast_usage(self, rank: int, *, reads: bool) -> Mapping[Link, float]:
        """Return the share of each link of a load from all ranks, or a store to all."""
        ports = [self.fabric.multicast_ports(each) for each in range(self.schedule.world_size)]
        ups, downs = zip(*ports, strict=True)
        links = (*ups, downs[rank]) if reads else (ups[rank], *downs)
        return dict.fromkeys(links, 1.0)

    def run(self) -> Timing:
        """Return how long it takes."""
        self._advance(list(self.streams.values()))
        while self.queue:
            now = self.queue[0][0]
            limit = now + _SAME_TIME * max(1.0, now)
            while self.queue and self.queue[0][0] <= limit:
                _, _, what, stamp = heapq.heappop(self.queue)
                if isinstance(what, Stream):
                    self._start_flows(what)
                elif what.stamp == stamp:
                    self._finish(what, now)
            self._share(now)
        if self.waiting:
            key = next(iter(self.waiting))
            raise ModelError(
                f"rank {key[2]} waits for a signal of rank {key[0]} that never comes: "
                "the checker has the whole story"
            )
        return self.timing

    # 1. Steps.

    def _advance(self, ready: list[Stream]) -> None:
        """Run streams until each moves data between ranks, waits, or is through."""
        while ready:
            stream = ready.pop()
            for step in stream.steps:
                if isinstance(step, Signal):
                    ready += self._signal(stream, step)
                elif isinstance(step, Wait):
                    if not self._wait(stream, step):
                        break
                elif moved(step):
                    stream.step, stream.started_us = step, stream.time_us
                    self._enqueue(stream.time_us, stream, 0)
                    break
                else:
                    started = stream.time_us
                    stream.time_us += self._local_us(step)
                    self._record(stream, started, step)
            else:
                self.timing.time_us = max(self.timing.time_us, stream.time_us)

    def _signal(self, stream: Stream, step: Signal) -> list[Stream]:
        latency = 0.0
        if step.rank != stream.rank:
            latency = self.fabric.route(stream.rank, step.rank).latency_us
        key = self.wire(stream, step)
        sleeper = self.waiting.pop(key, None)
        if sleeper is None:
            self.arrivals.setdefault(key, []).append(stream.time_us + latency)
            return []
        self._resume(sleeper, stream.time_us + latency)
        return [sleeper]

    def _wait(self, stream: Stream, step: Wait) -> bool:
        key = (step.rank, step.channel, stream.rank, stream.channel)
        stream.step = step
        if not self.arrivals.get(key):
            self.waiting[key] = stream
            return False
        self._resume(stream, self.arrivals[key].pop(0))
        return True

    def _resume(self, stream: Stream, arrival_us: float) -> None:
        started = stream.time_us
        stream.time_us = max(started, arrival_us)
        if stream.time_us > started and stream.step is not None:
            self._record(stream, started, stream.step)

    def _local_us(self, step: Copy | Reduce) -> float:
        num_bytes = step.dst.num_blocks * self.block_bytes
        if isinstance(step, Copy):
            return num_bytes * self.fabric.copy_us_per_byte
        return num_bytes * self.fabric.reduce_us_per_byte * (len(step.srcs) - 1)

    def _record(self, stream: Stream, started_us: float, step: Step) -> None:
        if self.trace:
            event = Event(stream.rank, stream.channel, started_us, stream.time_us, step)
            self.timing.events.append(event)

    # 2. Transfers.

    def _enqueue(self, time_us: float, what: Stream | Flow, stamp: int) -> None:
        heapq.heappush(self.queue, (time_us, next(self.ticket), what, stamp))

    def _start_flows(self, stream: Stream) -> None:
        assert isinstance(stream.step, Copy | Reduce)
        pairs = moved(stream.step)
        stream.num_flows = len(pairs)
        for source, destination in pairs:
            if EVERY in (source.rank, destination.rank):
                usage = self.multicast_usage(stream.rank, reads=source.rank == EVERY)
            else:
                usage = self.usage(source.rank, destination.rank)
            flow = Flow(stream, usage, source.num_blocks * self.block_bytes)
            flow.since_us = stream.time_us
            for link, weight in usage.items():
                self.flows_of.setdefault(link, {})[flow] = None
                carried = self.timing.link_bytes.get(link, 0.0)
                self.timing.link_bytes[link] = carried + weight * flow.bytes_left
            self.dirty.update(usage)
            if flow.bytes_left == 0:
                self._enqueue(stream.time_us, flow, flow.stamp)

    def _finish(self, flow: Flow, now: float) -> None:
        flow.stamp = -1
        for link in flow.usage:
            del self.flows_of[link][flow]
            if not self.flows_of[link]:
                del self.flows_of[link]  # an empty dict remembers how large it was
        self.dirty.update(flow.usage)
        stream = flow.stream
        stream.num_flows -= 1
        if stream.num_flows == 0:
            step = stream.step
            assert isinstance(step, Copy | Reduce)
            added_us = self._local_us(step) if isinstance(step, Reduce) else 0.0
            stream.time_us = now + added_us
            self._record(stream, stream.started_us, step)
            self._advance([stream])

    def _share(self, now: float) -> None:
        """Set the rates of all flows that something changed for."""
        while self.dirty:
            link = self.dirty.pop()
            if link not in self.flows_of:
                continue
            together = self._sharing_with(link)
            if len(together) == 1:
                [usage] = [flow.usage for flow in together]
                capacity = self.fabric.bytes_per_us
                rates = [min(capacity(link) / weight for link, weight in usage.items())]
            else:
                rates = fair_rates([flow.usage for flow in together], self.fabric.bytes_per_us)
            for flow, rate in zip(together, rates, strict=True):
                self.dirty.difference_update(flow.usage)
                if rate != flow.rate:
                    flow.bytes_left = max(0.0, flow.bytes_left - flow.rate * (now - flow.since_us))
                    flow.rate, flow.since_us = rate, now
                    flow.stamp += 1
                    self._enqueue(now + flow.bytes_left / rate, flow, flow.stamp)

    def _sharing_with(self, link: Link) -> list[Flow]:
        """Return the flows over a link, those that they share other links with, and so on."""
        found = dict.fromkeys(self.flows_of[link])
        todo, seen = list(found), {link}
        while todo:
            for other in todo.pop().usage:
                if other in seen:
                    continue
                seen.add(other)
                for flow in self.flows_of[other]:
                    if flow not in found:
                        found[flow] = None
                        todo.append(flow)
        return list(found)
