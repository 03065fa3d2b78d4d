# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own DistributedTest cases on the backend "fastcoll", compared with Gloo.

    python -m tests.torch.torch_suite              all cases, 2 and 4 ranks, both backends
    python -m tests.torch.torch_suite --world 2 test_all_reduce_sum test_gather

With `--world 4 --nodes aabb` they are ranks of two nodes.
fastcoll is the group of Python or the compiled one, as FASTCOLL_TORCH_BACKEND says. With
FASTCOLL_AS_GLOO=1 its cases ask for groups by the name "gloo". Both backends see the same source
(torch_cases.py). A case that passes on Gloo and not here is lost: then the exit status is 1.

Decides which cases run, and how. Ranks are forked from a process that has imported torch but run
nothing: this module must not be imported by a process that has.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.torch import torch_cases

ROOT = Path(__file__).parents[2]
BACKENDS = ("gloo", "fastcoll")
DEADLINE_S = 90.0


# ---- running one case ----------------------------------------------------------------------------


def _rank_main(cases: Any, name: str, rank: int, rendezvous: str, log: str, node: str) -> None:
    with open(log, "w") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    faulthandler.dump_traceback_later(DEADLINE_S - 5)  # where a rank hangs that will be killed
    status = 1
    if node:
        os.environ["FASTCOLL_NODE_ID"] = node
    try:
        import torch

        torch.set_num_threads(1)
        ours, theirs = multiprocessing.Pipe()
        cases._run(rank, name, rendezvous, theirs)
        del ours
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_case(
    cases: Any, name: str, world: int, skips: Sequence[int], nodes: str
) -> tuple[str, str]:
    """Run a case on `world` forked ranks; return "pass", "skip" or "fail", and the end of a log."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        os.environ["TEMP_DIR"] = folder
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"
        logs = [os.path.join(folder, f"rank{rank}.log") for rank in range(world)]
        pids = []
        for rank, log in enumerate(logs):
            pid = os.fork()
            if pid == 0:
                node = nodes[rank : rank + 1]
                _rank_main(cases, name, rank, os.path.join(folder, "rendezvous"), log, node)
            pids.append(pid)
        codes = _reap(pids)
        texts = [Path(log).read_text(errors="replace") for log in logs]
    if all(code == 0 for code in codes):
        return "pass", ""
    bad = [rank for rank, code in enumerate(codes) if code not in skips and code != 0]
    if not bad:
        return "skip", ""
    return "fail", "\n".join(f"rank {rank} ended with {codes[rank]}\n{texts[rank]}" for rank in bad)


def _reap(pids: Sequence[int]) -> list[int]:
    """Return the exit codes; ranks that are left over after the deadline are killed."""
    codes: dict[int, int] = {}
    end, failed_at = time.monotonic() + DEADLINE_S, 0.0
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if any(code not in (0, *_skip_codes()) for code in codes.values()):
            failed_at = failed_at or time.monotonic()
            end = min(end, failed_at + 1)  # the others may report what they saw
        if time.monotonic() > end:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


@functools.cache
def _skip_codes() -> tuple[int, ...]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return tuple(skip.exit_code for skip in TEST_SKIPS.values())


# ---- running all of them, in a process for each backend and world ------------------------------


@contextlib.contextmanager
def _corrupting(method: str) -> Iterator[None]:
    """Let a method of the Python group bring rank 1 a wrong element."""
    from fastcoll.integrations.torch_group import FastcollProcessGroup as Group

    right = getattr(Group, method)

    def wrong(self: Any, outputs: Any, *args: Any) -> Any:
        work = right(self, outputs, *args)
        if self.rank() == 1:
            if work is not None:
                work.wait()
            while isinstance(outputs, list) and outputs:
                outputs = outputs[0]
            if not isinstance(outputs, list) and outputs.numel():
                outputs.view(-1)[0] += 1
        return work

    setattr(Group, method, wrong)
    yield
    setattr(Group, method, right)


def _refuse_gloo() -> None:
    """Let no group be torch's own Gloo: a case that needs it fails.

    But for the helper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts beside a group of any backend.
    """
    from torch.distributed import distributed_c10d as c10d

    class Refused(c10d.ProcessGroupGloo):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if sys._getframe(1).f_code.co_name != c10d._create_process_group_wrapper.__name__:
                raise RuntimeError("a group is torch's own Gloo")
            super().__init__(*args, **kwargs)

    c10d.ProcessGroupGloo = Refused  # type: ignore[misc]


def _run_here(backend: str, world: int, wanted: Iterable[str], nodes: str) -> None:
    """Run cases in this process's children; a line of JSON for each to stdout.

    "method:case" runs a case on the Python group with a method that is wrong.
    """
    name = backend
    os.environ.update(WORLD_SIZE=str(world), CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1")
    with contextlib.redirect_stdout(sys.stderr):
        if backend == "fastcoll":
            from fastcoll import env  # registers the backend
            from fastcoll.integrations import c10d_build

            if env.AS_GLOO.get():
                name = "gloo"
                _refuse_gloo()

            # Not by the ranks of a case: they are killed at its deadline, each leaves a compiler.
            if env.TORCH_BACKEND.get() == "compiled":
                c10d_build.build()
        os.environ["BACKEND"] = name
        cases = torch_cases.load(name)
        chosen = list(wanted) or torch_cases.names(cases)
    for name in chosen:
        start = time.monotonic()
        method, _, case = name.rpartition(":")
        with _corrupting(method) if method else contextlib.nullcontext():
            outcome, log = run_case(cases, case, world, _skip_codes(), nodes)
        row = {"case": name, "outcome": outcome, "log": log[-6000:]}
        print(json.dumps(row | {"seconds": round(time.monotonic() - start, 2)}), flush=True)


Outcomes = dict[str, dict[str, Any]]


def run(
    backend: str,
    world: int,
    wanted: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    nodes: str = "",
) -> Outcomes:
    """Run cases on a backend in a fresh process; return what came of each."""
    module = ["-m", "tests.torch.torch_suite"]
    where = ["--here", backend, "--world", str(world), "--nodes", nodes]
    command = [sys.executable, *module, *where, *wanted]
    outcomes: Outcomes = {}
    variables = os.environ | dict(env or {})
    if backend == "gloo":
        variables["FASTCOLL_AS_GLOO"] = "0"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            outcomes[row["case"]] = row
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return outcomes


def lost(gloo: Outcomes, ours: Outcomes) -> list[str]:
    """Return the cases that pass on Gloo and not here."""
    return [
        name
        for name, row in gloo.items()
        if row["outcome"] == "pass" and ours.get(name, {}).get("outcome") != "pass"
    ]


def _summary(outcomes: Outcomes) -> dict[str, Any]:
    """Return how many cases passed, and which did not."""
    by_kind: dict[str, list[str]] = {"pass": [], "fail": [], "skip": []}
    for name, row in outcomes.items():
        by_kind[row["outcome"]].append(name)
    return {"passed": len(by_kind["pass"]), "failed": by_kind["fail"], "skipped": by_kind["skip"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, action="append", help="ranks; default 2 and 4")
    parser.add_argument("--here", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", default="", help='the node of each rank, as "aabb"')
    parser.add_argument("--json", type=Path, help="where to record the outcomes")
    parser.add_argument("cases", nargs="*", help="default: all")
    args = parser.parse_args()
    if args.here:
        _run_here(args.here, args.world[0], args.cases, args.nodes)
        return 0
    from bench.records import write
    from fastcoll import env
    from fastcoll.measure.results import provenance

    origin, worlds, num_lost = provenance(), args.world or [2, 4], 0
    recorded = {}
    for world in worlds:
        results = {name: run(name, world, args.cases, nodes=args.nodes) for name in BACKENDS}
        for backend, outcomes in results.items():
            kinds = [row["outcome"] for row in outcomes.values()]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("pass", "fail", "skip"))
            seconds = sum(row["seconds"] for row in outcomes.values())
            print(f"{world} ranks, {backend}: {counts} ({seconds:.0f} s)")
        missing = lost(results["gloo"], results["fastcoll"])
        won = lost(results["fastcoll"], results["gloo"])
        num_lost += len(missing)
        both = [name for name in results["gloo"] if name not in (*won, *missing)]
        both = [name for name in both if results["gloo"][name]["outcome"] == "fail"]
        print(f"  fail on both: {' '.join(both) or 'none'}")
        print(f"  pass here only: {' '.join(won) or 'none'}")
        print(f"  LOST: {' '.join(missing) or 'none'}")
        for name in missing:
            print(f"---- {name}\n{results['fastcoll'][name]['log']}")
        summaries = {backend: _summary(outcomes) for backend, outcomes in results.items()}
        recorded[str(world)] = summaries | {"lost": missing, "passed_here_only": won}
    if args.json:
        settings = {"world_size": max(worlds), "torch_backend": env.TORCH_BACKEND.get()}
        settings |= {"as_gloo": env.AS_GLOO.get(), "nodes": args.nodes}
        write(
            {"kind": "torch_suite", **origin, "settings": settings, "worlds": recorded}, args.json
        )
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
