# SPDX-License-Identifier: Apache-2.0
"""`fastcoll tune --device cuda` and the rows it writes, as far as no GPU is needed.

Ranks are measured by a fake function, on CPU threads, or on support/fake_gpu.py.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastcoll import env
from fastcoll.choose import TuningTable, algorithms, read_table, select, tuning
from fastcoll.choose.algorithms.shared import CPU
from fastcoll.cli import app
from fastcoll.cli.console import ExitCode
from fastcoll.cli.points import parse_gpu_worlds
from fastcoll.errors import UsageError
from fastcoll.machine import gpu
from fastcoll.measure import tune
from fastcoll.measure.gpu_ranks import GpuRank
from fastcoll.measure.gpu_variants import ThreadVariants
from fastcoll.measure.library import Bound
from fastcoll.measure.on_gpus import OnGpus, ThreadRanks
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured
from fastcoll.measure.rounds import Outcome
from fastcoll.measure.tune import TuneSettings, run_gpu_tune, run_tune, write_table
from fastcoll.measure.variants import VERBS
from fastcoll.measure.worker import Worker
from fastcoll.types import Algorithm
from tests.gpu_host.gpu_rows import (
    MACHINE,
    ROWS,
    TIMES,
    Json,
    document,
    part,
    row,
    row_request,
)
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank
from tests.support.sites import group_on_fake_gpu

# ---- the tuner -----------------------------------------------------------------------------------

SETTINGS = TuneSettings((2,), (4096, 1 << 20), ("all_reduce", "broadcast"))
TERMS: Json = {
    "num_channels": 32,
    "ranks_per_gpu": 1,
    "reaches_peers": True,
    "no_nccl": "",
    "no_multicast": "no switch",
}


class Ranks:
    """Ranks that know their terms and measure nothing."""

    name, is_running = "ranks", True

    def __init__(self, **terms: Any) -> None:
        self._terms = TERMS | terms

    def command(self, text: str) -> list[Json]:
        assert text == "terms"
        return [self._terms | {"idle_cpu_s": 0.0}] * 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what was measured, by a fake function; TIMES say how long it takes."""
    names: list[str] = []

    def cell_by_all(variants: list[Any], cell: Cell, *_: object) -> list[Outcome]:
        outcomes = []
        for variant in variants:
            names.append(f"{cell.verb}/{variant.name}")
            us = TIMES.get(variant.name, 10.0)
            outcomes.append(Outcome(variant.name, windows_us=[[us, us]] * 3))
        return outcomes

    monkeypatch.setattr(tune, "measure_cell", cell_by_all)
    monkeypatch.setattr(OnGpus, "running", lambda *_: nullcontext(Ranks()))
    monkeypatch.setattr(gpu, "fingerprint", lambda: MACHINE)
    yield names


def tuned(path: Path, settings: TuneSettings = SETTINGS) -> Json:
    place = OnGpus(2, path.parent, None)
    return run_gpu_tune(settings, path, place, lambda *_: None, CPU)


@needs_gpu_part
def test_the_tuner_writes_a_table_that_groups_choose_by(
    measured: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    written = tuned(path)
    assert written == json.loads(path.read_text())
    table = read_table(path, tuning.identity())
    assert table.gpus == MACHINE
    of_reduction = {row["algorithm"] for row in written["gpu"]["rows"] if "all_r" in row["verb"]}
    assert of_reduction == {*TIMES, "nccl"}
    moves = {row["algorithm"] for row in written["gpu"]["rows"] if row["verb"] == "broadcast"}
    assert moves == {"direct", "nccl"}
    assert select(row_request(), algorithms.ALL, table).plan.algorithm is Algorithm.chain
    assert written["gpu"]["is_complete"]
    assert not written["is_complete"], "no CPU was measured"


@needs_gpu_part
@pytest.mark.parametrize(
    ("terms", "missing"),
    [({"no_multicast": ""}, {}), ({"no_nccl": "old"}, {"nccl": "old", "multimem": "no switch"})],
    ids=str,
)
def test_what_the_gpus_have_not_is_left_out_with_the_reason(
    terms: Json, missing: dict[str, str], tmp_path: Path
) -> None:
    place = OnGpus(2, tmp_path, None)
    cell = tune.make_cell("all_reduce", "float32", "sum", 4096, 2)
    names = {variant.name for variant in place.variants(Ranks(**terms), cell)}
    assert place.left_out == missing
    assert {"nccl", "nccl_moves", "multimem"} & names == (
        {"nccl", "nccl_moves", "multimem"} if not missing else set()
    )


@needs_gpu_part
def test_an_interrupted_run_is_gone_on_with(measured: list[str], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    whole = tuned(path)
    num_measured = len(measured)
    kept = [row for row in whole["gpu"]["rows"] if row["verb"] == "all_reduce"]
    said = {"multimem": "no switch"}
    write_table(whole | {"gpu": part(kept, is_complete=False, left_out=said)}, path)
    measured.clear()
    again = tuned(path)
    assert again["gpu"]["left_out"] == said
    assert {name.split("/")[0] for name in measured} == {"broadcast"}
    assert again["gpu"]["rows"] == whole["gpu"]["rows"]
    assert again["gpu"]["is_complete"]
    # A table that is whole is measured anew, but for points that are not asked for.
    measured.clear()
    only = replace(SETTINGS, verbs=("all_reduce",))
    assert len(tuned(path, only)["gpu"]["rows"]) == len(whole["gpu"]["rows"])
    assert {name.split("/")[0] for name in measured} == {"all_reduce"}
    # Nothing is left of other GPUs.
    write_table(
        whole | {"gpu": part(ROWS, machine=MACHINE | {"driver": "1.2"}, is_complete=False)}, path
    )
    measured.clear()
    tuned(path)
    assert len(measured) == num_measured
    # No time: nothing is measured, and the table says so.
    path.unlink()
    late = tuned(path, replace(SETTINGS, limit_s=-1.0))
    assert not late["gpu"]["is_complete"]
    assert late["gpu"]["rows"] == []


@needs_gpu_part
def test_rows_of_cpus_and_of_gpus_stay_side_by_side(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setattr(tune, "own_pool", lambda *_: nullcontext(None))
    with_cpus = run_tune(SETTINGS, path, tmp_path, lambda *_: None, CPU)
    with_both = tuned(path)
    assert with_both["rows"] == with_cpus["rows"]
    assert with_both["is_complete"]
    again = run_tune(SETTINGS, path, tmp_path, lambda *_: None, CPU)
    assert again["gpu"] == with_both["gpu"]


@needs_gpu_part
def test_nccl_that_fails_is_left_out_and_said(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(reason: str) -> Any:
        right = Outcome("", windows_us=[[1.0, 1.0]])
        wrong = Outcome("", reason=reason)
        return lambda variants, *_: [
            replace(wrong if one.name == "nccl" else right, library=one.name) for one in variants
        ]

    monkeypatch.setattr(tune, "measure_cell", failing("DistBackendError: no network"))
    found = tuned(tmp_path / "table.json")["gpu"]
    assert found["left_out"]["nccl"] == "DistBackendError: no network"
    assert "nccl" not in {row["algorithm"] for row in found["rows"]}
    # But a wrong result is never excused.
    monkeypatch.setattr(tune, "measure_cell", failing("wrong result: 7 elements"))
    with pytest.raises(NotMeasured, match=r"all_reduce of 4096 bytes by nccl: wrong result"):
        tuned(tmp_path / "other.json")


def test_which_worlds_are_measured() -> None:
    worlds = {1: (2, 4), 2: (2,), 6: (2, 4, 6), 8: (2, 4, 8)}
    assert {num_gpus: parse_gpu_worlds("", num_gpus) for num_gpus in worlds} == worlds
    assert parse_gpu_worlds("2,3", 8) == (2, 3)
    alone, torchrun = OnGpus(2, Path(), None), OnGpus(2, Path(), 0)
    assert [alone.are_threads(world) for world in (2, 3)] == [False, True]
    assert not torchrun.are_threads(3), "its processes are the ranks; the worker says why not"
    cell = tune.make_cell("all_gather", "float32", "sum", 4096, 3)
    assert alone.point(cell)["ranks_per_gpu"] == 2


# ---- ranks that are threads ----------------------------------------------------------------------


class OnCpuThreads(ThreadVariants):
    """The library of a rank thread, on CPU tensors: graphs are loops, and clocks the CPU's."""

    odd_rank = -1

    def terms(self) -> Json:
        return TERMS | {"ranks_per_gpu": 2, "no_nccl": "none"}

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        call, operands = self.checked(cell, output, source)
        asked = replace(call, algorithm=self._name, numerics="fast")
        plan = self.comm.planner.plan(asked, operands)

        def run() -> None:
            operands.carry_out(self.comm, plan, 20.0)
            if self.rank == self.odd_rank:
                output[0] += 1

        return run, ()

    def capture(self, run: Any, stream: Any = None) -> Any:
        self.barrier()
        return SimpleNamespace(replay=run)

    def loop(self, iterations: int) -> float:
        run, num_calls = self.calls(iterations)
        begin = perf_counter()
        run()
        return (perf_counter() - begin) * iterations / num_calls


class WrongOnCpuThreads(OnCpuThreads):
    odd_rank = 1


def on_threads(make: type[OnCpuThreads]) -> Any:
    return lambda place, world_size: ThreadRanks(["cpu"] * world_size, make)


@needs_gpu_part
def test_threads_are_checked_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "fingerprint", lambda: MACHINE)
    monkeypatch.setattr(OnGpus, "running", on_threads(OnCpuThreads))
    monkeypatch.setattr(tune, "_BUDGET", tune.Budget(200, 1, 2, 2))
    few = TuneSettings((2,), (4096,), ("all_reduce",))
    path = tmp_path / "table.json"
    found = run_gpu_tune(few, path, OnGpus(1, tmp_path, None), lambda *_: None, CPU)["gpu"]
    assert {row["algorithm"] for row in found["rows"]} == {"one_shot", "two_shot", "ring", "chain"}
    for each in found["rows"]:
        group = each["ranks_are"], each["ranks_per_gpu"], each["num_channels"]
        assert group == ("threads", 2, 32)
        assert each["time_us"] > 0
    assert found["left_out"] == {"nccl": "none", "multimem": "no switch"}
    # Negative control: rank 1 gets something wrong.
    monkeypatch.setattr(OnGpus, "running", on_threads(WrongOnCpuThreads))
    with pytest.raises(NotMeasured, match="wrong result: 1 elements"):
        run_gpu_tune(few, tmp_path / "b", OnGpus(1, tmp_path, None), lambda *_: None, CPU)


def test_threads_that_do_not_come_up_say_why() -> None:
    def refuse(me: GpuRank) -> ThreadVariants:
        if me.rank == 1:
            raise UsageError("rank 1 can't")
        return ThreadVariants(me)

    with pytest.raises(NotMeasured, match="UsageError: rank 1 can't"):
        ThreadRanks(["cpu"] * 2, refuse)


# ---- on the GPU made of the CPU ------------------------------------------------------------------


class OnFakeGpu(ThreadVariants):
    """A rank's library as it is, but for graphs and clocks."""

    capture, loop = OnCpuThreads.capture, OnCpuThreads.loop


def commanded(rank: Rank) -> tuple[list[Json], list[str], list[str]]:
    """Carry out what the tuner commands, on every verb by every algorithm."""
    replies, called = [], []
    with group_on_fake_gpu(rank, no_nccl="") as (comm, core):
        me: Any = SimpleNamespace(
            rank=comm.rank, world_size=comm.world_size, comm=comm, device="cpu", stream=None
        )
        worker = Worker(OnFakeGpu(me))
        terms = worker.run("terms")
        assert terms["num_channels"] == 16
        for verb in VERBS:
            reduces = verb in ("all_reduce", "reduce", "reduce_scatter")
            names = ["one_shot", "nccl", "nccl_moves"] if reduces else ["direct", "nccl"]
            lines = [f"choose {name} 0\nprepare {verb} float32 sum 700 0" for name in names]
            lines += [f"choose {name} 0\ntime 25 2" for name in names]
            for line in "\n".join([*lines, "release"]).splitlines():
                replies.append({"command": f"{verb}: {line}", **worker.run(line)})
            called += core.log
            core.log.clear()
        group = comm.device_group
        assert group is not None
        return replies, called, list(group._nccl._group.log)


@needs_gpu_part
def test_what_the_tuner_commands_is_what_runs(own_pools: Pools) -> None:
    for replies, launched, by_nccl in own_pools(2).run(commanded):
        assert not [reply for reply in replies if "error" in reply]
        wrong = [reply["num_wrong"] for reply in replies if "num_wrong" in reply]
        assert len(wrong) == 3 * 3 + 5 * 2
        assert not any(wrong)
        assert all(min(reply["seconds"]) > 0 for reply in replies if "seconds" in reply)
        assert {"allreduce", "alltoall_base"} <= set(by_nccl), "it added, and it moved"
        assert "add" in launched, "what NCCL moved, a kernel added"
        assert {one[0] for one in launched if one != "add"} == set(VERBS)


def chosen_by_table(rank: Rank) -> list[str]:
    """Return by what a call on the group's GPUs is carried out: by the table, then by the model."""
    found = []
    rows = [row("chain", size, 1.0, num_channels=16, ranks_per_gpu=2) for size in (4, 1 << 20)]
    for no_table in ("", "rank 0: another driver"):
        with group_on_fake_gpu(rank) as (comm, _):
            comm.planner.tuning = tuning.Tuning(TuningTable(document(rows)), "mine")
            side: Any = comm.device_group
            side.terms = replace(side.terms, no_table=no_table)
            tensor = torch.full((1000,), rank.rank + 1.0)
            comm.all_reduce(tensor)
            assert bool((tensor == 3).all())
            found.append(repr(comm.planner.known()[-1]))  # coming to the GPUs made plans, too
            found.append(comm.gpu_report())
    return found


@needs_gpu_part
def test_a_group_chooses_by_the_table_or_says_why_not(own_pools: Pools) -> None:
    for tuned, report, modelled, refused in own_pools(2).run(chosen_by_table):
        assert "by chain" in tuned
        assert "chosen by the table" in report
        assert "by one_shot" in modelled
        assert "no table: rank 0: another driver" in refused


# ---- the command ---------------------------------------------------------------------------------


def test_a_torch_without_gpus_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(gpu, "problem", lambda: "")
    out = tmp_path / "table.json"
    result = CliRunner().invoke(app, ["tune", "--device", "cuda", "--out", str(out)])
    assert result.exit_code == ExitCode.MISSING
    assert "torch sees no CUDA device" in result.output
    assert not out.exists()


@needs_gpu_part
def test_the_command_shows_what_it_found(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "problem", lambda: "")
    monkeypatch.setattr(env, "prepare_gpu_threads", lambda: None)
    options = ["--out", str(tmp_path / "table.json"), "--ranks", "2", "--sizes", "4K,1M"]
    result = CliRunner().invoke(app, ["tune", "--device", "cuda", *options])
    assert result.exit_code == 0, result.output
    assert "2, 2 on a GPU (processes)" in result.output, result.output
    assert "2 x Some GPU, driver 580.1" in result.output
    refused = CliRunner().invoke(app, ["tune", "--device", "cuda", "--ranks", "17"])
    assert refused.exit_code == 2
