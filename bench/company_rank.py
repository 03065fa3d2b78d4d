# SPDX-License-Identifier: Apache-2.0
"""One rank of bench/company.py: steps of compute and a collective, by fastcoll and Gloo in turns.

Knows nothing of the company: the parent process has made it. Windows of the libraries alternate
within the same processes. A barrier over a Gloo group that is not measured stands between them.
"""

import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastcoll
from fastcoll.integrations import c10d_build

Json = dict[str, Any]
LIBRARIES = ("fastcoll", "gloo")
ALONE = "compute"  # steps that communicate nothing
LIMIT = timedelta(seconds=60)
BATCH, LAYERS = 32, 4


@dataclass(frozen=True)
class Task:
    """The cells that the ranks of one start measure.

    Attributes:
        ways: "sync", "async" or "ddp".
        sizes: Bytes that each step reduces.
        threads: Of torch in each rank.
        late_s: Seconds by which the last rank comes late to each step.
        matmul: Rows of the square matrices that a step multiplies; DDP has its own compute.
        window_s: Seconds that a window aims at.
        rounds: Windows of each library.
    """

    ways: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    late_s: float
    matmul: int
    window_s: float
    rounds: int


Steps = dict[str, Callable[[], object]]


def _steps_of_calls(way: str, size: int, matmul: int, gloo: dist.ProcessGroup) -> Steps:
    """Return steps that multiply matrices and reduce a tensor, after or beside that."""
    one, other, product = (torch.ones(matmul, matmul) for _ in range(3))
    tensor = torch.ones(size // 4)
    part = 1.0 / dist.get_world_size()
    calls: Steps = {
        "fastcoll": lambda: fastcoll.all_reduce(tensor, async_op=way == "async"),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo, async_op=way == "async"),
        ALONE: lambda: None,
    }

    def step(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            if way == "sync":
                torch.mm(one, other, out=product)
                call()
            else:
                work = call()
                torch.mm(one, other, out=product)
                if work is not None:
                    work.wait()
            tensor.mul_(part)  # written anew, as by any program; stays 1

        return run

    return {name: step(call) for name, call in calls.items()}


def _keep_gradients(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce nothing. DDP copies all gradients into its buckets and back, as with any backend."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _steps_of_ddp(size: int, groups: dict[str, dist.ProcessGroup]) -> Steps:
    """Return training steps of a network whose gradients have so many bytes."""
    width = max(1, round((size / 4 / LAYERS) ** 0.5))
    shapes = [(1, 1, True)] if size == 8 else [(width, width, False)] * LAYERS
    data = torch.ones(BATCH, shapes[0][0])

    def network(group: dist.ProcessGroup) -> nn.parallel.DistributedDataParallel:
        layers = nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b, bias in shapes))
        assert sum(p.nbytes for p in layers.parameters()) == size
        return nn.parallel.DistributedDataParallel(layers, process_group=group)

    def step(model: nn.parallel.DistributedDataParallel) -> Callable[[], object]:
        return lambda: model(data).sum().backward()

    models = {name: network(group) for name, group in groups.items()}
    models[ALONE] = network(groups["gloo"])
    models[ALONE].register_comm_hook(None, _keep_gradients)
    return {name: step(model) for name, model in models.items()}


@dataclass(frozen=True)
class Window:
    """A library's window: steps a second of the slowest rank, and all ranks' CPU time a step."""

    per_s: float
    cpu_s: float
    switches: float  # of contexts, a step, all ranks
    step_s: list[float]  # of this rank


def _switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def _window(step: Callable[[], object], count: int, late_s: float) -> Window:
    is_late = late_s > 0 and dist.get_rank() == dist.get_world_size() - 1
    dist.barrier()
    cpu_start, switches_start = time.process_time(), _switches()
    times = [time.perf_counter()]
    for _ in range(count):
        if is_late:
            time.sleep(late_s)
        step()
        times.append(time.perf_counter())
    mine = [time.process_time() - cpu_start, float(_switches() - switches_start)]
    sums = torch.tensor(mine, dtype=torch.float64)
    slowest = torch.tensor([times[-1] - times[0]], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    cpu_s, switches = (sums / count).tolist()
    steps = [end - start for start, end in pairwise(times)]
    return Window(count / slowest.item(), cpu_s, switches, steps)


def _summary(windows: list[Window]) -> Json:
    """Return a library's record: medians over windows, and the steps of all ranks."""
    mine = [seconds for window in windows for seconds in window.step_s]
    of_all: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, mine)
    steps = sorted(1e3 * seconds for of_rank in of_all for seconds in of_rank)
    ranks = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "per_s": round(statistics.median(window.per_s for window in windows), 2),
        "cpu_ms": round(1e3 * statistics.median(window.cpu_s for window in windows), 4),
        "switches": round(statistics.median(window.switches for window in windows), 2),
        "step_ms": {
            name: round(steps[int(at * (len(steps) - 1))], 4) for name, at in ranks.items()
        },
        "windows_per_s": [round(window.per_s, 2) for window in windows],
    }


def _measure(steps: Steps, task: Task) -> Json:
    """Time all ways to make a step, in turns; the ranks agree on the number of steps."""
    counts = dict.fromkeys(steps, 3)
    seen: dict[str, list[Window]] = {name: [] for name in steps}
    for turn in range(task.rounds + 2):
        names = list(steps) if turn % 2 else list(steps)[::-1]
        for name in names:
            if name == ALONE and turn % 2 and turn > 2:
                continue
            window = _window(steps[name], counts[name], task.late_s)
            counts[name] = min(5000, max(2, round(window.per_s * task.window_s)))
            if turn >= 2:  # the first ones find the number of steps
                seen[name].append(window)
    found = {name: _summary(windows) for name, windows in seen.items()}
    return {
        "gloo_over_fastcoll": round(found["fastcoll"]["per_s"] / found["gloo"]["per_s"], 3),
        "libraries": found,
    }


def run(rank: int, world_size: int, folder: Path, task: Task) -> None:
    """Measure a task's cells; rank 0 writes them to a file of the folder."""
    torch.set_num_threads(task.threads)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("control", store),
        rank=rank,
        world_size=world_size,
        timeout=LIMIT,
    )
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    assert isinstance(gloo, dist.ProcessGroup)
    groups = {"gloo": gloo}
    backend = ""
    if "ddp" in task.ways:
        ours = dist.new_group(backend="fastcoll", timeout=LIMIT)
        assert isinstance(ours, dist.ProcessGroup)
        groups = {"fastcoll": ours, **groups}
        backend = "python" if c10d_build.load() is None else "compiled"
    if set(task.ways) != {"ddp"}:
        fastcoll.init(
            store=dist.PrefixStore("ours", store), rank=rank, world_size=world_size, timeout_s=60
        )
    rows = []
    for way in task.ways:
        for size in task.sizes:
            if way == "ddp":
                steps = _steps_of_ddp(size, groups)
            else:
                steps = _steps_of_calls(way, size, task.matmul, gloo)
            rows.append({"way": way, "size_bytes": size, **_measure(steps, task)})
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps({"backend": backend, "rows": rows}))
    dist.barrier()
    fastcoll.destroy()
    dist.destroy_process_group()
