# SPDX-License-Identifier: Apache-2.0
"""bench/gpu measures without a GPU: the scripts are as they are, but for device and clocks."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu_host.fake_event import Event
from tests.gpu_host.gpu_measured import GPU, MEASURED
from tests.support.programs import run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`on_cpu(name)` is a script of bench/gpu whose ranks have their tensors on the CPU."""
    from fastcoll.measure import gpu_ranks

    # The scripts set it, and tests that come later in this process would have as few channels.
    monkeypatch.setenv("FASTCOLL_GPU_CHANNELS", "0")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def captured(me: Any, body: Callable[[], None]) -> Any:
        me.comm.barrier()
        return SimpleNamespace(replay=body)

    def load(name: str) -> Any:
        module = importlib.import_module(name)
        monkeypatch.setattr(
            module,
            "GpuRanks",
            lambda devices, timeout_s: gpu_ranks.GpuRanks(["cpu"] * len(devices), timeout_s),
        )
        monkeypatch.setattr(module, "copy_gbps", lambda device, num_bytes: 100.0)
        if name == "measure":
            monkeypatch.setattr(module, "capture", captured)
            monkeypatch.setattr(module, "floor_of", lambda me, *args: me.comm.barrier)
            monkeypatch.setattr(module, "SMALL_CALLS", 2)
        return module

    return load


def rehearse_steps(patch: pytest.MonkeyPatch, kernels: Any) -> None:
    """Let ranks on the CPU take the steps that kernels measure, in fewer sizes."""
    theirs: dict[int, torch.Tensor] = {}

    def copying(me: Any, step: str, local: Any, symmetric: Any, blocks: int) -> Any:
        theirs[me.rank] = symmetric
        return lambda: theirs[1].copy_(local) if step == "put" else local.copy_(theirs[1])

    class AllReduce:
        shape = (4, 512, 1024)

        def __init__(self, me: Any, source: Any, out: Any, algorithm: str) -> None:
            self.call = partial(me.comm.all_reduce, source, out=out, algorithm=algorithm)

        def launched(self, shape: tuple[int, int, int]) -> Any:
            assert shape == (4, 512, 2048)
            return self.call

    patch.setattr(kernels, "copying", copying)
    patch.setattr(kernels, "capture_alone", lambda me, body: SimpleNamespace(replay=body))
    patch.setattr(kernels, "AllReduce", AllReduce)
    patch.setattr(kernels, "there_and_back", lambda me, step, rounds, token: 700.0)
    patch.setattr(kernels, "channels_of", lambda me: 4)
    patch.setattr(kernels, "MOVE_SIZES", [1000])
    patch.setattr(kernels, "TILES", {2: [2048]})


@pytest.mark.slow
def test_what_is_measured_runs_and_is_reported(
    tmp_path: Path,
    on_cpu: Callable[[str], Any],
    report: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measuring scripts as they are, but for the device, the clock and the number of rows."""
    measure, kernels = on_cpu("measure"), on_cpu("kernels")
    cases = [case for case in measure.plan() if case[0] == 2 and case[3] <= 16 << 10]
    assert {case[1] for case in cases} == {"all_reduce", *measure.MOVES}
    # A rank that fails is told, and the rows after it are measured all the same.
    rows = [(2, "all_reduce", "none", 8, False), *cases]
    monkeypatch.setattr(measure, "plan", lambda is_first: rows)
    with pytest.raises(SystemExit, match="1 rows failed"):
        measure.main(tmp_path / "measured.json")
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert len(measured["rows"]) == len(cases)
    small = [row for row in measured["rows"] if "over_floor" in row]
    assert {(row["verb"], row["mode"]) for row in small} == {("all_reduce", "graph")}
    assert len(small) == 5 * 3, "each size by each algorithm"
    assert all(abs(row["over_floor"] - row["time_us"] / row["floor_us"]) < 0.01 for row in small)
    assert "no algorithm" in measured["failed"][0][-1]
    monkeypatch.setattr(kernels, "MESSAGE_BYTES", kernels.LARGE_BYTES)
    monkeypatch.setattr(kernels, "DTYPES", ("float32", "complex64"))
    monkeypatch.setattr(kernels, "CHANNELS", (2,))
    monkeypatch.setattr(kernels, "time_calls", lambda me, *args: [[1.0]])
    rehearse_steps(monkeypatch, kernels)
    kernels.main(tmp_path / "kernels.json")
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["complete"]
    # Reductions fail, and the parts after them are measured all the same.
    monkeypatch.setattr(kernels, "DTYPES", ("float33",))
    with pytest.raises(SystemExit, match="3 parts failed"):
        kernels.main(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert {row["what"] for row in again["rows"]} == {
        "copy",
        "signal, one way",
        "ll_pack, one way",
        "put",
        "get",
        "segment",
        "blocks",
        "send and receive, 8 bytes",
    }
    assert not again["complete"]
    (tmp_path / "steps.tsv").write_text("measure\t1\t9\n")
    report(tmp_path)
    text = (tmp_path / "out/gpu.txt").read_text()
    for word in ("send_recv", "all_to_all", "complex64, 8 ranks", "send and receive, 8 bytes"):
        assert word in text


def test_the_first_rows_are_some_of_all(on_cpu: Callable[[str], Any]) -> None:
    measure = on_cpu("measure")
    first = measure.plan(is_first=True)
    assert set(first) < set(measure.plan())
    assert {row[:3] for row in first} == {(world, "all_reduce", "auto") for world in (8, 2)}
    assert len(first) == 2 * 2 * len(measure.SIZES), "each size, captured and eager"
    assert [row[0] for row in first] == sorted((row[0] for row in first), reverse=True)


def test_a_number_of_ranks_that_fails_is_given_up(
    tmp_path: Path, on_cpu: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = on_cpu("measure")
    bad = [(2, "all_reduce", "none", 8, False)] * 5
    rows = [*bad, (3, "all_gather", "auto", 8, False)]
    monkeypatch.setattr(measure, "plan", lambda is_first: rows)
    with pytest.raises(SystemExit, match="3 rows failed"):
        measure.main(tmp_path / "measured.json")
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert [row["ranks"] for row in measured["rows"]] == [3]
    assert len(measured["left_out"]) == 2


def test_a_wrong_result_is_not_timed(
    on_cpu: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what rank 1 should get is another number."""
    measure = on_cpu("measure")
    right = measure.bind

    def wrong(me: Any, *args: Any) -> Any:
        call, result, wanted = right(me, *args)
        return call, result, wanted + me.rank

    monkeypatch.setattr(measure, "bind", wrong)
    ranks = measure.GpuRanks(["cpu"] * 2, timeout_s=20.0)
    with pytest.raises(RuntimeError, match="wrong result: all_gather"):
        measure.row(ranks, (2, "all_gather", "auto", 64, False), None)
    ranks.close()


FLOOR_SIZES = (8, 256, 1024, 4096, 16384)


@pytest.mark.long
@pytest.mark.parametrize(
    ("over", "says"),
    [
        (
            [1.5, 1.2, 1.9, 1.4, 2.0],
            "at most 2.00 x the floor, at 16384 bytes; 2 x are allowed: kept",
        ),
        (
            [1.5, 2.1, 1.9, 1.4, 2.0],
            "at most 2.10 x the floor, at 256 bytes; 2 x are allowed: MISSED",
        ),
        ([1.5, 1.2, 1.9, 1.4], "not measured against the floor at [16384] bytes"),
    ],
)
def test_small_calls_are_judged_by_the_worst_of_all(
    tmp_path: Path, report: Callable[[Path], str], over: list[float], says: str
) -> None:
    rows = [
        {**MEASURED["rows"][0], "ranks": ranks, "algorithm": name, "size_bytes": size}
        | {"floor_us": 2.0, "over_floor": times + (ranks != 8) + (name != "auto")}
        for size, times in zip(FLOOR_SIZES, over, strict=False)
        for ranks in (2, 8)
        for name in ("auto", "one_shot")
    ]
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED | {"rows": rows}))
    assert f"8 ranks in a graph, up to 16384 bytes: {says}" in report(tmp_path)
    table = (tmp_path / "out/gpu.txt").read_text()
    assert says in table
    assert f"{over[0]:.2f} x" in table


def test_bytes_that_were_not_copied_are_not_timed(
    on_cpu: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a put that does nothing, and sums that are another call's."""
    on_cpu("measure")
    kernels = on_cpu("kernels")
    rehearse_steps(monkeypatch, kernels)
    monkeypatch.setattr(kernels, "copying", lambda *args: lambda: None)
    for step in ("put", "get"):
        with pytest.raises(RuntimeError, match=f"wrong bytes: {step}, 1000"):
            list(kernels.moves(step))
    monkeypatch.setattr(kernels.AllReduce, "launched", lambda self, shape: lambda: None)
    with pytest.raises(RuntimeError, match="wrong result: tiles of 2048 bytes"):
        list(kernels.segments(2))


REHEARSAL = """
import contextlib, sys, torch
import fused, streams
from types import SimpleNamespace
from fastcoll.measure import gpu_ranks

class Anything:
    def __init__(self, *args, **kwargs): pass
    def record(self, stream): pass
    def elapsed_time(self, end): return 1.0

streams.DEVICE = "cpu"
streams.capture = lambda stream, body: body
streams.capture_alone = lambda me, body: SimpleNamespace(replay=body)
streams.GpuRanks = lambda devices, timeout_s: gpu_ranks.GpuRanks(["cpu"] * len(devices), timeout_s)
torch.cuda.Stream = torch.cuda.Event = Anything
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.synchronize = lambda: None
torch.Tensor.pin_memory = lambda self: self
fused.WORLDS, fused.ROWS, fused.SIZES, fused.CALLS, fused.WINDOWS = (1,), (2,), (64,), 1, 1
fused.COLUMNS, fused.CHANNELS = 64, 2
"""
WRONG = """
right = fused.one_shot.all_reduce
def wrong(tensor, space, out, **more):
    right(tensor, space, out=out, **more)
    out.mul_(1.5)
fused.one_shot.all_reduce = wrong
"""


@pytest.mark.slow  # Triton comes up, twice
@pytest.mark.parametrize("wrong", ["", WRONG], ids=["right", "wrong"])
def test_the_triton_kernels_are_compared_and_timed(
    tmp_path: Path, wrong: str, report: Callable[[Path], str]
) -> None:
    """By the interpreter, so of one rank: who runs alone waits for nobody."""
    path = tmp_path / "fused.json"
    program = f"{REHEARSAL}{wrong}\nfused.main(fused.Path({str(path)!r}))"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run([sys.executable, "-c", program], 240, cwd=GPU, env=env)
    found = json.loads(path.read_text())
    names = [row["what"] for row in found["rows"]]
    if wrong:  # the negative control: what is wrong is not timed, what comes behind it is
        assert done.returncode == 1, done.stdout
        assert names == ["Triton two_shot", "CUDA two_shot"]
        assert len(found["failed"]) == 2
        return
    assert done.returncode == 0, done.stdout
    assert names == [
        "fused add + RMSNorm",
        "in three steps",
        "in three steps, CUDA",
        "Triton one_shot",
        "CUDA one_shot",
        "Triton two_shot",
        "CUDA two_shot",
    ]
    assert found["complete"]
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    text = report(tmp_path)
    assert "1 ranks, 2 x 64 bfloat16: fused add + RMSNorm 1000.00 us, in three steps" in text
