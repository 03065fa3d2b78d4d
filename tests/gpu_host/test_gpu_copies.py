# SPDX-License-Identifier: Apache-2.0
"""all_reduce by copy engines: streams, copies and meetings on a driver that is made up.

All ranks' streams are queues in this process, and a seed says which of them goes on. A stream that
leaves out a wait shows as a wrong sum sooner or later. That the meetings are bounded waits is the
kernel's matter (tests/protocol/sim); what real copy engines do is for tests/gpu.
"""

import contextlib
import ctypes
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastcoll import _C
from fastcoll.calls.tensors import Flat
from fastcoll.choose import algorithms, select
from fastcoll.choose.algorithms import copy_engine
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.gpu import copies as device_copies
from fastcoll.gpu.copies import CopyEngine
from fastcoll.memory.heap import Block
from fastcoll.types import TORCH_DTYPES, Algorithm, DType, Op, Verb
from tests.gpu_host.gpu_rows import request
from tests.support import oracle
from tests.support.gpu import needs_gpu_part

pytestmark = needs_gpu_part

LIMIT_S = 9.0


class Stream:
    """A queue of what a rank's GPU does one after the other."""

    def __init__(self, driver: "Driver") -> None:
        self.driver = driver
        self.cuda_stream = len(driver.streams)
        self.ops: deque[Callable[[], bool]] = deque()  # False: not yet
        self.captured = False
        driver.streams.append(self)

    def wait_stream(self, other: "Stream") -> None:
        assert self.captured == other.captured, "CUDA refuses to wait across a capture's edge"
        done: list[bool] = []
        other.ops.append(lambda: done.append(True) or True)
        if self.driver.keeps(f"{self.kind} waits"):
            self.ops.append(lambda: bool(done))

    @property
    def kind(self) -> str:
        return "main" if self in self.driver.mains else "copy"


class Driver:
    """The GPUs of all ranks.

    Attributes:
        broken: The step that is left out: "main waits", "copy waits", or "meeting K" of each call.
        log: Everything that was started: "copy", "add", or "meet" with the output, by rank.
    """

    def __init__(self, world_size: int, broken: str = "") -> None:
        self.world_size = world_size
        self.broken = broken
        self.streams: list[Stream] = []
        self.mains: list[Stream] = []
        self.met = [0] * world_size
        self.log: list[list[Any]] = [[] for _ in range(world_size)]

    def keeps(self, what: str) -> bool:
        return what != self.broken

    def run(self, seed: int) -> None:
        """Carry out all that was started, in an order drawn from a seed."""
        draw = random.Random(seed)
        stuck = 0
        while waiting := [stream for stream in self.streams if stream.ops]:
            stream = draw.choice(waiting)
            # Some streams go on for long while others stand still.
            for _ in range(draw.choice((1, 3, 50))):
                if not stream.ops or not stream.ops[0]():
                    stuck += 1
                    break
                stream.ops.popleft()
                stuck = 0
            assert stuck < 10_000, "the streams wait for each other"


class Core:
    """The core that starts kernels and copies of one rank."""

    def __init__(self, driver: Driver, rank: int) -> None:
        self.driver, self.rank, self.meetings = driver, rank, 0

    def copy(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        for to, of, num_bytes in copies:
            self.driver.log[self.rank].append("copy")
            self.driver.streams[stream].ops.append(
                lambda to=to, of=of, n=num_bytes: ctypes.memmove(to, of, n) is not None
            )

    def launch(self, plan: Any, source: int, target: int, stream: int, limit_s: float) -> None:
        driver, ops = self.driver, self.driver.streams[stream].ops
        assert limit_s == LIMIT_S
        assert plan.algorithm == Algorithm.copy_engine
        driver.log[self.rank].append(("meet", target))
        self.meetings += 1
        number = self.meetings

        def meet() -> bool:
            driver.met[self.rank] = max(number, driver.met[self.rank])
            return min(driver.met) >= number

        if driver.keeps(f"meeting {(number - 1) % 2}"):
            ops.append(meet)


class CudaSums:
    """Replaces `Sums`, without Triton's kernel: a rank's device has its number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def make_ready(self, *_: Any, **__: Any) -> None:
        """See that CUDA's kernel is loaded, which it is."""

    def add(self, plan: Any, parts: list[int], target: int, numel: int, stream: int) -> None:
        from tests.support.fake_gpu import add_parts

        driver = device_copies.torch.cuda.now.driver
        driver.log[self.rank].append("add")
        adding = partial(add_parts, self.rank, plan, parts, target, numel, stream)
        driver.streams[stream].ops.append(lambda: adding() is None)


class Machine:
    """All ranks of a group, with regions that all reach."""

    def __init__(self, world_size: int, broken: str = "") -> None:
        self.driver = Driver(world_size, broken)
        num_bytes = 64 + (2 * world_size + 1) * (device_copies.WAVE_BYTES + 16)
        self.regions = [torch.full((num_bytes,), 77, dtype=torch.uint8) for _ in range(world_size)]
        ptrs = [region.data_ptr() for region in self.regions]
        self.engines = []
        for rank in range(world_size):
            heap = SimpleNamespace(allocate=lambda size, r=rank: self._block(r, size))
            core = Core(self.driver, rank)
            self.engines.append(CopyEngine(rank, rank, ptrs, core, heap))
        self.world_size = world_size

    def _block(self, rank: int, num_bytes: int) -> Block:
        assert num_bytes <= len(self.regions[rank]) - 64
        start = -self.regions[rank].data_ptr() % 64
        return Block(0, self.regions[rank].data_ptr() + start, num_bytes)

    def start(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], op: Op
    ) -> list[torch.Tensor]:
        """Let every rank start an all_reduce in a stream of its own, which is another each time.

        Returns:
            The values that each rank's program then finds in its output. It looks behind the call
            in the same stream.
        """
        found = [torch.zeros_like(one) for one in outputs]
        kind = next(d for d, t in TORCH_DTYPES.items() if t is inputs[0].dtype)
        plan = _C.Plan(0, int(kind), int(op), 9, inputs[0].numel(), 0, 0, False, False, 0, 16)
        for engine, given, taken, seen in zip(self.engines, inputs, outputs, found, strict=True):
            main = Stream(self.driver)
            self.driver.mains.append(main)
            with on(main):
                flat = Flat(given.data_ptr(), taken.data_ptr(), lambda: None)
                engine.run(plan, flat, LIMIT_S)
            main.ops.append(lambda to=seen, of=taken: to.copy_(of) is not None)
        return found


@contextlib.contextmanager
def on(main: Stream) -> Iterator[None]:
    """`main` is the current stream."""
    device_copies.torch.cuda.now = main
    yield


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    put_cuda(monkeypatch)
    monkeypatch.setattr(device_copies, "Sums", CudaSums)


def put_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the streams that are made up in CUDA's place."""

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, cuda.now = cuda.now, one
        yield
        cuda.now = before

    cuda = SimpleNamespace(
        now=None,
        current_stream=lambda device: cuda.now,
        Stream=lambda device: Stream(cuda.now.driver),
        stream=stream,
        is_current_stream_capturing=lambda: cuda.now.captured,
    )
    monkeypatch.setattr(device_copies, "torch", SimpleNamespace(cuda=cuda))
    # Small, so that a message has several waves of several segments.
    monkeypatch.setattr(device_copies, "WAVE_BYTES", 4096)
    monkeypatch.setattr(device_copies, "LEAST_SEGMENT_BYTES", 64)


NUMELS = (2501, 1024, 3, 5000)  # some waves and a rest, one wave, less than a pack


def calls(
    world_size: int,
    seed: int,
    kind: tuple[DType, Op] = (DType.float32, Op.SUM),
    broken: str = "",
    numels: tuple[int, ...] = NUMELS,
) -> list[bool]:
    """Make calls, every other one in place; return whether each has the oracle's bits."""
    machine = Machine(world_size, broken)
    dtype, op = kind
    draw = torch.Generator().manual_seed(seed)
    begun = []
    for idx, numel in enumerate(numels):
        inputs = [
            (torch.randn(numel, generator=draw) * 9).to(TORCH_DTYPES[dtype])
            for _ in range(world_size)
        ]
        word = oracle.word_of(dtype.name)
        wanted = oracle.reduce(
            [raw(one).view(word) for one in inputs], dtype.name, op.name, world_size
        )
        outputs = inputs if idx % 2 else [torch.zeros_like(one) for one in inputs]
        begun.append((machine.start(inputs, outputs, op), wanted.view("uint8"), inputs, outputs))
    machine.driver.run(seed)
    return [all((raw(one) == wanted).all() for one in found) for found, wanted, *_ in begun]


def raw(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "num_seeds"), [(1, 12), (2, 12), (3, 12), (5, 12), (72, 1)])
def test_every_order_that_streams_may_take_has_the_same_bits(
    world_size: int, num_seeds: int
) -> None:
    for seed in range(num_seeds):
        assert all(calls(world_size, seed)), seed


@pytest.mark.parametrize(
    "kind",
    [
        (DType.bfloat16, Op.AVG),
        (DType.float16, Op.SUM),
        (DType.float64, Op.PRODUCT),
        (DType.int64, Op.MAX),
        (DType.int8, Op.SUM),
    ],
    ids=lambda kind: f"{kind[0].name}-{kind[1].name}",
)
def test_every_width_of_elements(kind: tuple[DType, Op]) -> None:
    assert all(calls(3, 1, kind))


@pytest.mark.parametrize("broken", ["main waits", "copy waits", "meeting 0", "meeting 1"])
def test_what_is_not_waited_for_is_found(broken: str) -> None:
    """Negative controls: no stream waits for the others, or no rank for what it reads."""
    found = [calls(3, seed, broken=broken, numels=(2501,)) for seed in range(40)]
    assert not all(map(all, found))


def test_who_starts_what_and_in_which_order() -> None:
    machine = Machine(2)
    inputs = [torch.full((1500,), 1.0 + rank) for rank in range(2)]
    machine.start(inputs, inputs, Op.SUM)
    for rank, log in enumerate(machine.driver.log):
        meet = ("meet", inputs[rank].data_ptr())  # its kernel leaves NaN there if the call fails
        segment = ["copy", "copy", "add"]
        wave = ["copy", meet, *8 * segment, meet, "copy", "copy"]
        last = ["copy", meet, *8 * segment, meet, "copy", "copy"]
        assert log == [*wave, *last, meet]
    machine.driver.run(0)
    assert all(bool((one == 3).all()) for one in inputs)


# ---- graphs --------------------------------------------------------------------------------------


def test_a_captured_call_stays_within_its_capture() -> None:
    machine = Machine(2)
    inputs = [torch.ones(1500) for _ in range(2)]
    with pytest.raises(UsageError, match="make one such call before the capture"):
        captured(machine, inputs)
    machine.start(inputs, inputs, Op.SUM)
    machine.driver.run(0)
    captured(machine, inputs)  # the streams assert that nothing outside is waited for
    machine.driver.run(0)
    assert all(bool((one == 4).all()) for one in inputs)


def captured(machine: Machine, tensors: list[torch.Tensor]) -> None:
    """Start a call in a stream that is captured; who waits for it is captured with it."""
    wait_stream = Stream.wait_stream

    def joins(self: Stream, other: Stream) -> None:
        if self.kind == "copy":
            self.captured = other.captured
        wait_stream(self, other)

    class Captured(Stream):
        def __init__(self, driver: Driver) -> None:
            super().__init__(driver)
            self.captured = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "wait_stream", joins)
        patch.setattr(sys.modules[__name__], "Stream", Captured)
        machine.start(tensors, tensors, Op.SUM)


# ---- the choice ----------------------------------------------------------------------------------


large_request = partial(request, numel=4 << 20, algorithm="copy_engine")


def test_it_is_taken_where_it_is_asked_for() -> None:
    plan = select(large_request(), algorithms.ALL).plan
    assert (plan.algorithm, plan.channels, plan.inline) == (Algorithm.copy_engine, 16, False)
    assert "by copy_engine" in repr(_C.Plan(*plan.args()))
    for numel in (4 << 20, 1 << 30):
        chosen = select(request(numel=numel), algorithms.ALL).plan
        assert chosen.algorithm is not Algorithm.copy_engine
    assert copy_engine.estimate_us(large_request()) > algorithms.two_shot.estimate_us(
        large_request()
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_channels": 0}, "copy_engine is for GPUs"),
        ({"verb": Verb.reduce_scatter}, "carries out all_reduce alone"),
        ({"splits": 2 << 40}, "one tensor, not a list"),
        ({"numel": 1 << 18}, "for 4194304 bytes and more, not 1048576"),
        ({"reaches_peers": False}, "do not reach each other's memory"),
    ],
    ids=str,
)
def test_it_is_refused_in_clear_words(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        select(large_request(**fields), algorithms.ALL)
