# SPDX-License-Identifier: Apache-2.0
"""Times steps of compute and a collective in company: on busy cores, with late or many ranks.

    python bench/company.py [FILE.json] [--situations hogs-1,late-10ms] [--ways sync] [--sizes 8]

fastcoll and Gloo take turns within the same processes. A cell's figure is the ratio of the medians
of their steps a second. Beside it stand a step's CPU time and the percentiles of its time. Steps
that communicate nothing show the most that any library could reach. Those of DDP copy the gradients
into DDP's buckets and back, as every backend's do. A file that is there keeps the situations and
ways that are not measured now. All cells take 20 minutes. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from records import write
from strangers import quota, strangers

from fastcoll.measure.results import provenance

Json = dict[str, Any]
CORES = os.cpu_count() or 1
LIMIT_S = 120  # of the ranks of a situation


@dataclass(frozen=True)
class Situation:
    """The company in which ranks run.

    Attributes:
        name: Of the option and of the result's rows.
        ranks: Their number.
        threads: Of torch in each rank.
        wait_policy: OMP_WAIT_POLICY of the ranks; "": not set, OpenMP's default.
        strangers: Kinds of processes that run beside the ranks.
        quota: Share of all CPUs' time that the ranks have together; 0: no limit.
        late_s: Seconds by which the last rank comes late to each step.
        batch: Whether the ranks have the policy SCHED_BATCH.
    """

    name: str
    ranks: int = 2
    threads: int = 1
    wait_policy: str = ""
    strangers: tuple[str, ...] = ()
    quota: float = 0
    late_s: float = 0
    batch: bool = False


SITUATIONS = (
    Situation("alone"),
    Situation("hogs-1", strangers=("hog",) * CORES),
    Situation("hogs-2", strangers=("hog",) * (2 * CORES)),
    Situation("openmp-default", threads=CORES),
    Situation("openmp-active", threads=CORES, wait_policy="active"),
    Situation("openmp-passive", threads=CORES, wait_policy="passive"),
    Situation("engine", strangers=("engine",)),
    Situation("quota-50%", quota=0.5),
    Situation("late-1ms", late_s=0.001),
    Situation("late-10ms", late_s=0.01),
    Situation("late-100ms", late_s=0.1),
    Situation("batch", batch=True),
    Situation("ranks-4", ranks=4),
    Situation("ranks-8", ranks=8),
)
# The backend of torch.distributed, and the ways that one start of the ranks measures with it.
WAYS = {"sync": "python", "async": "python", "ddp-python": "python", "ddp-compiled": "compiled"}
SIZES = (8, 64 << 10, 1 << 20, 16 << 20)


def _start_rank(situation: Situation, rank: int, task: Json, backend: str, folder: str) -> Any:
    environment = os.environ | {
        "FASTCOLL_TORCH_BACKEND": backend,
        "OMP_NUM_THREADS": str(situation.threads),
    }
    environment.pop("OMP_WAIT_POLICY", None)
    if situation.wait_policy:
        environment["OMP_WAIT_POLICY"] = situation.wait_policy
    argv = [sys.executable, __file__, "--rank", str(rank), "--folder", folder]
    policy = os.SCHED_BATCH if situation.batch else os.SCHED_OTHER
    return subprocess.Popen(
        [*argv, "--task", json.dumps({**task, "ranks": situation.ranks, "policy": policy})],
        env=environment,
    )


def _measure_together(situation: Situation, ways: list[str], task: Json) -> list[Json]:
    """Return the rows of the ways that have the same backend of torch.distributed."""
    backend = WAYS[ways[0]]
    task = {**task, "ways": [way.split("-")[0] for way in ways]}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as company:
        limit = company.enter_context(quota(situation.quota)) if situation.quota else None
        company.enter_context(strangers(situation.strangers))
        ranks = []
        try:
            for rank in range(situation.ranks):
                ranks.append(_start_rank(situation, rank, task, backend, folder))
                if limit is not None:
                    (limit / "cgroup.procs").write_text(str(ranks[-1].pid))
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"{situation.name}: ranks ended with {codes}")
        found = json.loads(Path(folder, "rows.json").read_text())
    if found["backend"] not in ("", backend):
        raise SystemExit(f"the backend is {found['backend']}, not {backend}")
    named = {"ddp": f"ddp-{backend}"}
    return [{**row, "way": named.get(row["way"], row["way"])} for row in found["rows"]]


def _measure(situation: Situation, ways: list[str], task: Json) -> list[Json]:
    rows: list[Json] = []
    task = {**task, "threads": situation.threads, "late_s": situation.late_s}
    for backend in dict.fromkeys(WAYS[way] for way in ways):
        same = [way for way in ways if WAYS[way] == backend]
        try:
            found = _measure_together(situation, same, task)
            rows += [{"situation": situation.name, "status": "measured", **row} for row in found]
        except OSError as error:
            reason = f"no quota of CPU time for the ranks: {error.strerror}"
            rows += [
                {"situation": situation.name, "status": "not measured", "reason": reason}
                | {"way": way, "size_bytes": size}
                for way in same
                for size in task["sizes"]
            ]
    return rows


def _print(row: Json) -> None:
    name = f"{row['situation']:15s} {row['way']:13s} {row['size_bytes']:9d}"
    if row["status"] != "measured":
        print(f"{name} not measured: {row['reason']}", flush=True)
        return
    ours, theirs, alone = (row["libraries"][one] for one in ("fastcoll", "gloo", "compute"))
    text = "  ".join(
        f"{one['per_s']:8.1f}/s {one['cpu_ms']:8.3f} ms CPU p99 {one['step_ms']['p99']:8.2f} ms"
        for one in (ours, theirs)
    )
    print(
        f"{name} {row['gloo_over_fastcoll']:6.2f}x  {text}  alone {alone['per_s']:8.1f}/s",
        flush=True,
    )


def _kept(file: Path | None, names: list[str], ways: list[str]) -> list[Json]:
    """Return the rows of a file that are not measured now."""
    if file is None or not file.exists():
        return []
    rows: list[Json] = json.loads(file.read_text())["rows"]
    return [row for row in rows if row["situation"] not in names or row["way"] not in ways]


def _be_rank(options: argparse.Namespace) -> None:
    from company_rank import Task, run

    settings = json.loads(options.task)
    os.sched_setscheduler(0, settings.pop("policy"), os.sched_param(0))
    world_size = settings.pop("ranks")
    settings |= {"ways": tuple(settings["ways"]), "sizes": tuple(settings["sizes"])}
    run(options.rank, world_size, Path(options.folder), Task(**settings))


def _listed(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    every = [situation.name for situation in SITUATIONS]
    parser.add_argument("--situations", type=_listed, default=every, help=", ".join(every))
    parser.add_argument("--ways", type=_listed, default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--sizes", type=_listed, default=[str(size) for size in SIZES])
    parser.add_argument("--matmul", type=int, default=256)
    parser.add_argument("--window-s", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _be_rank(options)
        return
    task = {
        "sizes": [int(size) for size in options.sizes],
        "matmul": options.matmul,
        "window_s": options.window_s,
        "rounds": options.rounds,
    }
    origin = provenance()
    rows = _kept(options.file, options.situations, options.ways)
    for situation in SITUATIONS:
        if situation.name in options.situations:
            for row in _measure(situation, options.ways, task):
                _print(row)
                rows.append(row)
    if options.file is not None:
        rows.sort(key=lambda row: every.index(row["situation"]))  # stable: ways keep their order
        settings = {**task, "world_size": 2, "cores": CORES}
        settings["situations"] = [asdict(situation) for situation in SITUATIONS]
        write({"kind": "company", **origin, "settings": settings, "rows": rows}, options.file)


if __name__ == "__main__":
    main()
