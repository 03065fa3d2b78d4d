# SPDX-License-Identifier: Apache-2.0
"""Measurements on GPUs, without one: what is fair beside other libraries, graphs, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_host.fake_event import Event, Graph, capture


@pytest.mark.parametrize(
    ("world_size", "num_gpus", "mps", "words"),
    [
        (2, 0, False, "no CUDA device"),
        (2, 1, False, "take turns"),
        (2, 1, True, ""),
        (8, 8, False, ""),
    ],
)
def test_a_comparison_that_is_not_fair_is_not_made(
    world_size: int, num_gpus: int, mps: bool, words: str
) -> None:
    from fastcoll.measure.gpu_libraries import problem_of

    text = problem_of(world_size, num_gpus, mps)
    assert words in text
    assert bool(text) == bool(words)


def test_a_library_in_a_graph_is_checked_and_timed_by_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fastcoll.measure import gpu_libraries
    from fastcoll.measure.library import WorkerConfig
    from fastcoll.measure.pattern import make_cell

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    log: list[str] = []

    class Alone(gpu_libraries.InGraph):
        """All of a group of one, on the CPU: a sum is what it was."""

        wrong = 0.0

        def __init__(self, config: WorkerConfig) -> None:
            self.device = torch.device("cpu")
            gpu_libraries.Library.__init__(self, config)

        def version(self) -> str:
            return "1"

        def barrier(self) -> None:
            pass

        def close(self) -> None:
            pass

        def bind(self, cell: Any, output: torch.Tensor, source: torch.Tensor) -> Any:
            def now(mode: str) -> None:
                log.append(mode)
                if mode == "replayed":
                    output.add_(self.wrong)

            def call() -> None:
                if Graph.capturing:
                    Graph.capturing.calls.append(lambda: now("replayed"))
                else:
                    now("eager")

            return call, ()

    library = Alone(WorkerConfig("alone", 1, "", "", None, rank=0))
    cell = make_cell("all_reduce", "float32", "sum", 64, 1)
    assert library.prepare(cell) == 0
    assert log == ["eager", "replayed"], (
        "the first call is not captured, and a captured one checked"
    )
    log.clear()
    seconds = library.loop(50)
    assert log == ["replayed"] * 60, "three times twenty"
    assert seconds == pytest.approx(1e-3 * 50 / 60)
    library.wrong = 1.0  # negative control: only the replayed call is wrong
    assert library.prepare(cell) == cell.output_numel


@pytest.mark.parametrize(
    ("graph", "peers"),
    [
        (True, ("fastcoll_graph", "cupy", "cupy_graph", "symm_one_shot", "symm_one_shot_graph")),
        (False, ("cupy", "symm_one_shot")),
    ],
)
def test_each_library_on_gpus_is_measured_in_a_graph_too(
    graph: bool, peers: tuple[str, ...]
) -> None:
    from fastcoll.cli.bench import Device, _peers
    from fastcoll.measure.gpu_peers import GPU_LIBRARIES
    from fastcoll.measure.session import BenchSettings, worker_config

    assert _peers("cupy,symm_one_shot", Device.cuda, graph) == peers
    settings = BenchSettings("all_reduce", "float32", "sum", 2, (8,), peers, device="cuda")
    keys = [worker_config(settings, name, Path("x")).library for name in ("fastcoll", *peers)]
    assert keys == ["fastcoll_gpu", *peers]
    assert set(keys) <= GPU_LIBRARIES.keys()


def test_mps_is_seen_by_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fastcoll.measure.gpu_libraries import mps_runs

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()


@pytest.mark.slow  # it starts ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: there is a GPU here")
def test_bench_on_gpus_says_why_it_measures_nothing() -> None:
    from typer.testing import CliRunner

    from fastcoll.cli import app

    options = ["--device", "cuda", "--vs", "nccl,symm_mem", "--sizes", "8", "--rounds", "1"]
    result = CliRunner().invoke(app, ["bench", "all_reduce", *options])
    assert result.exit_code == 1
    assert "torch sees no CUDA device" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [("--device cuda --vs gloo", "nccl"), ("--device cuda --level c", "compiled loop")],
)
def test_bench_on_gpus_refuses_what_it_has_not(options: str, words: str) -> None:
    from typer.testing import CliRunner

    from fastcoll.cli import app

    result = CliRunner().invoke(app, ["bench", "all_reduce", *options.split()])
    assert result.exit_code == 2
    assert words in result.output
