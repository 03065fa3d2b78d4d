# SPDX-License-Identifier: Apache-2.0
"""Libraries measured on GPUs, without one: names, environments, how they come up, what is fair,
graphs, refusals.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll.cli.bench import Device, _peers
from fastcoll.measure import gpu_libraries, gpu_peers, session
from fastcoll.measure.gpu_libraries import mps_runs, problem_of
from fastcoll.measure.library import IN_GRAPH, WorkerConfig
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import NotMeasured, Pool, own_commands
from fastcoll.measure.session import GPU_FAMILIES, GPU_PEERS, BenchSettings, worker_config
from tests.gpu_host.fake_event import Graph, use_fake_events

ROOT = Path(__file__).parents[2]
NCCL = ("nccl_default", "nccl_nowin", "nccl_window")
SYMM_MEM = ("symm_one_shot", "symm_two_shot", "symm_multimem")


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
    text = problem_of(world_size, num_gpus, mps)
    assert words in text
    assert bool(text) == bool(words)


def test_a_library_in_a_graph_is_checked_and_timed_by_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_fake_events(monkeypatch)
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


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vs", "peers"),
    [
        ("nccl,symm_mem", NCCL + SYMM_MEM),
        ("NCCL", NCCL),
        ("symm_multimem, nccl_nowin", ("symm_multimem", "nccl_nowin")),
        ("nccl_window,nccl", ("nccl_window", "nccl_default", "nccl_nowin")),
        (None, (*NCCL, *SYMM_MEM, "cupy")),
    ],
)
def test_a_name_means_every_way_to_use_the_library(vs: str | None, peers: tuple[str, ...]) -> None:
    assert _peers(vs, Device.cuda, False) == peers
    in_graphs = _peers(vs, Device.cuda, True)
    assert in_graphs == (
        "fastcoll_graph",
        *(name + end for name in peers for end in ("", IN_GRAPH)),
    )
    names = ("fastcoll", *in_graphs)
    settings = BenchSettings("all_reduce", "float32", "sum", 2, (8,), names, device="cuda")
    keys = [worker_config(settings, name, Path("x")).library for name in names]
    assert keys == ["fastcoll_gpu", *in_graphs]
    assert set(keys) <= gpu_peers.GPU_LIBRARIES.keys()


def test_each_way_can_be_started_and_is_told_of() -> None:
    for name in GPU_PEERS:
        assert {name, name + IN_GRAPH} <= gpu_peers.GPU_LIBRARIES.keys()
        assert issubclass(gpu_peers.GPU_LIBRARIES[name + IN_GRAPH], gpu_libraries.InGraph)
    texts = {
        "bench/README.md": (ROOT / "bench/README.md").read_text(),
        "--help": CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "80"}).output,
    }
    for place, text in texts.items():
        missing = {name for name in (*GPU_FAMILIES, *GPU_PEERS) if name not in text}
        assert not missing, place
    assert f"--vs {','.join(GPU_FAMILIES)} " in (ROOT / "bench/gpu/check.sh").read_text()


# ---- what the processes find ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [each + end for each in GPU_PEERS for end in ("", IN_GRAPH)])
def test_what_a_librarys_processes_find_in_their_environment(name: str) -> None:
    settings = BenchSettings("all_reduce", "float32", "sum", 2, (8,), (name,), device="cuda")
    commands = own_commands(worker_config(settings, name, Path("x")), [0, 1])
    found = [command[: command.index(sys.executable)] for command in commands]
    if name.startswith("nccl_nowin"):
        assert found == [["env", "NCCL_SYM_NOWIN_ENABLE=1"]] * 2
    elif name.startswith("symm"):
        assert found == [["env", "GLOO_SOCKET_IFNAME=lo"]] * 2
    else:
        assert found == [[], []]


# ---- what is fair, and refusals ------------------------------------------------------------------


def test_mps_is_seen_by_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()


@pytest.mark.slow  # it starts ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: there is a GPU here")
def test_bench_on_gpus_says_why_it_measures_nothing() -> None:
    options = ["--device", "cuda", "--vs", "nccl,symm_mem", "--sizes", "8", "--rounds", "1"]
    result = CliRunner().invoke(app, ["bench", "all_reduce", *options])
    assert result.exit_code == 1
    assert "torch sees no CUDA device" in result.output


# ---- coming up -----------------------------------------------------------------------------------


class LoggedPool(Pool):
    """A pool without processes, which tells when it is started."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, 2, "", [])
        self.log = log

    def launch(self) -> None:
        self.log.append(f"launch {self.name}")

    def start(self) -> None:
        self.log.append(f"start {self.name}")
        if self.name == "b":
            raise NotMeasured("not here")


@pytest.mark.parametrize("at_once", [True, False])
def test_on_gpus_the_others_come_up_together(at_once: bool) -> None:
    log: list[str] = []
    made = {name: LoggedPool(name, log) for name in ("fastcoll", "a", "b")} | {"c": "refused"}
    started = list(session._started(made, at_once, lambda library, size: None))
    assert started == [
        ("fastcoll", made["fastcoll"], None),
        ("a", made["a"], None),
        ("b", None, "not here"),
        ("c", None, "refused"),
    ]
    launched = ["launch a", "launch b"] if at_once else []
    assert log == ["start fastcoll", *launched, "start a", "start b"]


GREETING = """
import sys
from fastcoll.measure.protocol import connect
line = connect(sys.argv[1], 0)
line.send_reply({"version": sys.argv[2], "pid": 0})
line.receive()
"""


@pytest.mark.slow
def test_a_pool_that_was_launched_is_not_launched_again(tmp_path: Path) -> None:
    pools = []
    for name in ("a", "b"):
        path = str(tmp_path / name)
        command = [sys.executable, "-c", GREETING, path, name]
        pools.append(Pool(name, 1, path, [command]))
    try:
        pools[0].launch()
        for pool in pools:
            pool.start()
            assert pool.version == pool.name
            assert len(pool.processes) == 1
    finally:
        for pool in pools:
            pool.close()
