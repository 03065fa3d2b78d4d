# SPDX-License-Identifier: Apache-2.0
"""Hold the results in a folder against the goals: `python bench/targets.py bench/results/MACHINE`.

Reads the output of bench/publish.sh. Of each goal it shows the worst size: by medians, which
decide, and by best windows, which show an undisturbed machine.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from fastcoll.measure.sizes import format_number, format_size, parse_size

Json = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """`peers` slower by `least` at every size from `begin` to `end` in `file`.

    With several peers the fastest of them counts at each size.
    """

    what: str
    file: str
    peers: tuple[str, ...]
    begin: str
    end: str
    least: float


_MPIS = ("openmpi", "mpich", "intelmpi")
_REDUCTIONS = ("reduce_scatter", "reduce")
_MOVES = ("all_gather", "gather", "scatter", "all_to_all", "broadcast")
GOALS = (
    Goal("float32, Python", "python-float32", ("gloo",), "8", "512", 150),
    Goal("float32, Python", "python-float32", ("gloo",), "2K", "2K", 100),
    Goal("float32, Python", "python-float32", ("gloo",), "32K", "128K", 15),
    Goal("float32, Python", "python-float32", ("gloo",), "512K", "512K", 6),
    Goal("float32, Python", "python-float32", ("gloo",), "2M", "256M", 4),
    Goal("bfloat16, Python", "python-bfloat16", ("gloo",), "2M", "256M", 5),
    Goal("symmetric, Python", "python-symmetric", ("gloo",), "512K", "256M", 10),
    Goal("C against C", "c-float32", ("openmpi",), "8", "256M", 1.0),
    Goal("C against C", "c-float32", ("intelmpi",), "2K", "512K", 0.9),
    Goal("C against C", "c-float32", ("intelmpi",), "8", "512", 1.0),
    Goal("C against C", "c-float32", ("intelmpi",), "2M", "256M", 1.0),
    Goal("symmetric, C, best MPI", "c-symmetric", _MPIS, "128K", "256M", 2.0),
    Goal("4 ranks, Python", "python-4ranks", ("gloo",), "8", "512", 100),
    Goal("4 ranks, Python", "python-4ranks", ("gloo",), "8M", "32M", 4),
    *(
        Goal(f"{verb}, Python", verb, ("gloo",), size, size, least)
        for verb in (*_REDUCTIONS, *_MOVES, "sendrecv")
        for size, least in (
            ("4K", 100),
            ("1M", 5 if verb in ("all_to_all", "broadcast") else 6),
            ("64M", 2),
        )
    ),
    *(
        Goal(f"{verb}, C against C, best MPI", f"c-{verb}", _MPIS, "4K", "64M", 1.0)
        for verb in (*_REDUCTIONS, *_MOVES, "sendrecv")
    ),
)
MOST_FLAGS, MOST_REGION_MIB, LEAST_DEMO_RATIO, MOST_PYTHON_US = 1.5, 4.0, 3.5, 0.15
LEAST_LIST_RATIO, MOST_LIST_COST, MOST_VERB_US = 7.0, 1.15, 0.3
MOST_TORCH_US, LEAST_DDP_RATIOS = 4.0, {"100K": 5.0, "25M": 3.0}
LEAST_GOOD_CHOICES = 0.95
# Up to 32 KiB, and above.
LEAST_JAX_RATIOS = (
    ("small", range((32 << 10) + 1), 10),
    ("large", range((32 << 10) + 1, 1 << 40), 3),
)
LEAST_VLLM_RATIOS = {"gloo": 5, "vllm": 1}  # vllm: its own shared memory
LEAST_COMPANY_RATIO = 1.5  # in four fifths of the cells
LEAST_OVER_NODES = {
    ("contiguous", "64"): 2.2,
    ("contiguous", "64K"): 1.8,
    ("contiguous", "64M"): 1.3,
    ("interleaved", "64M"): 2.0,
}
MOST_OF_SUM = 0.7


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    what: str
    goal: str
    found: str
    passed: bool | None


def _load(folder: Path, name: str) -> Json | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _ratio(row: Json, peers: tuple[str, ...], kind: str) -> float | None:
    found = [row["ratios"][peer][kind] for peer in peers if peer in row["ratios"]]
    return min(found) if found else None


def judge(goal: Goal, document: Json | None, memory: Json | None = None) -> Verdict:
    """Return how a goal stands, and the bound of memory alone where that was measured."""
    what = f"{goal.what}, {goal.begin}..{goal.end} against {' '.join(goal.peers)}"
    text = f">= {goal.least:g}x"
    sizes = range(parse_size(goal.begin), parse_size(goal.end) + 1)
    rows = [row for row in (document or {}).get("rows", []) if row["size_bytes"] in sizes]
    ratios = [(_ratio(row, goal.peers, "median"), row["size_bytes"]) for row in rows]
    known = [(ratio, size) for ratio, size in ratios if ratio is not None]
    if not known or len(known) < len(rows):
        return Verdict(what, text, "not measured", None)
    worst, size_bytes = min(known)
    best = min(_ratio(row, goal.peers, "best") or 0.0 for row in rows)
    found = f"{format_number(worst)}x at {format_size(size_bytes)}"
    found += f" (best windows {format_number(best)}x"
    read_us = (memory or {}).get("read_us", {}).get(str(size_bytes))
    if read_us is not None and goal.file == "python-symmetric":
        cells = next(row for row in rows if row["size_bytes"] == size_bytes)["cells"]
        peer_us = min(cell["time_us"] for cell in cells if cell["library"] in goal.peers)
        found += f"; only to read the inputs {format_number(peer_us / read_us)}x"
    return Verdict(what, text, found + ")", worst >= goal.least)


def _core_verdicts(folder: Path) -> Iterator[Verdict]:
    core, python = _load(folder, "c-float32"), _load(folder, "python-float32")
    if core and core["one_way_flag_us"]:
        # Medians: the best window of either may have found both CPUs on one physical core.
        call_us, flag_us = core["rows"][0]["cells"][0]["time_us"], median(core["one_way_flag_us"])
        flags = call_us / flag_us
        found = f"{flags:.2f} ({call_us:.3f} us of {flag_us:.3f} us)"
        yield Verdict(
            "8-byte core call, in one-way flags", f"<= {MOST_FLAGS}", found, flags <= MOST_FLAGS
        )
        mib = core["settings"]["region_bytes"] / 2**20
        yield Verdict(
            "staging memory per rank",
            f"<= {MOST_REGION_MIB:g} MiB",
            f"{mib:.2f} MiB",
            mib <= MOST_REGION_MIB,
        )
    if python:
        cells = {cell["library"]: cell for cell in python["rows"][0]["cells"]}
        if "time_us" in cells.get("core", {}):
            added_us = cells["fastcoll"]["time_us"] - cells["core"]["time_us"]
            yield Verdict(
                "Python's part of an 8-byte call",
                f"<= {MOST_PYTHON_US} us",
                f"{added_us:.3f} us",
                added_us <= MOST_PYTHON_US,
            )


def _choice_verdicts(folder: Path) -> Iterator[Verdict]:
    for name, by in (("regret", "the model"), ("regret-tuned", "a tuning table")):
        if regret := _load(folder, name):
            share = regret["share_within"]
            yield Verdict(
                f"choices by {by} within 10 % of the best",
                f">= {LEAST_GOOD_CHOICES:.0%}",
                f"{share:.1%} of {regret['num_points']}",
                share >= LEAST_GOOD_CHOICES,
            )


def _list_verdicts(folder: Path) -> Iterator[Verdict]:
    what = "all_reduce_coalesced of 500 tensors"
    lists = _load(folder, "lists")
    if lists is None:
        yield Verdict(f"{what}; small calls", "several", "not measured", None)
        return
    gloo, one_call = lists["gloo_over_coalesced"], lists["coalesced_over_one_call"]
    yield Verdict(
        f"{what}, against Gloo's",
        f">= {LEAST_LIST_RATIO:g}x",
        f"{format_number(gloo)}x",
        gloo >= LEAST_LIST_RATIO,
    )
    yield Verdict(
        f"{what}, against one call of their size",
        f"<= {MOST_LIST_COST:g}x",
        f"{format_number(one_call)}x",
        one_call <= MOST_LIST_COST,
    )
    calls_ns = lists["calls_ns"]
    slowest = max(calls_ns, key=calls_ns.get)
    added_us = (calls_ns[slowest] - calls_ns["all_reduce"]) / 1e3
    yield Verdict(
        "a call of any verb, beyond one of all_reduce",
        f"<= {MOST_VERB_US} us",
        f"{added_us:.3f} us: {slowest}",
        added_us <= MOST_VERB_US,
    )


def _node_verdicts(folder: Path) -> Iterator[Verdict]:
    nodes, pipelining = _load(folder, "hierarchical"), _load(folder, "pipelining")
    if nodes is None or pipelining is None:
        yield Verdict("2 hosts of 2 ranks", "several", "not measured", None)
        return
    for (order, size), least in LEAST_OVER_NODES.items():
        ratio = nodes["orders"][order]["gloo_over_fastcoll"][str(parse_size(size))]
        yield Verdict(
            f"2 hosts of 2 ranks, {order}, {size} against gloo",
            f">= {least:g}x",
            f"{format_number(ratio)}x",
            ratio >= least,
        )
    # None, or not there in files of a time when the phases alone were other calls.
    whole, ratio = pipelining.get("whole_over_sum"), pipelining["hop_over_intra"]
    found = "not measured" if whole is None else f"{whole:.2f}x"
    yield Verdict(
        f"2 hosts of {pipelining['settings']['world_size'] // 2} ranks, all_reduce over the sum "
        "of its phases alone",
        f"<= {MOST_OF_SUM:g}x",
        f"{found} (the hop takes {ratio:.2g} times as long as the phases within hosts)",
        None if whole is None else whole <= MOST_OF_SUM,
    )


def _torch_verdicts(folder: Path) -> Iterator[Verdict]:
    torch = _load(folder, "torch")
    if torch is None:
        yield Verdict("through torch.distributed", "several", "not measured", None)
        return
    times_us = torch["times_us"]
    calls_us = times_us["all_reduce, 8 B"]
    # The time of torch with a backend whose all_reduce does nothing; older files lack it.
    alone = f", torch alone {calls_us['fake']:.3g} us" if "fake" in calls_us else ""
    for backend in ("compiled", "python"):
        call_us = calls_us[backend]
        yield Verdict(
            f"dist.all_reduce of 8 B, {backend}",
            f"<= {MOST_TORCH_US:g} us",
            f"{call_us:.3g} us{alone}",
            call_us <= MOST_TORCH_US,
        )
        for size, least in LEAST_DDP_RATIOS.items():
            times = times_us[f"DDP's communication, {size} parameters"]
            # Less than nothing: hidden behind the backward pass, or lost in the noise.
            is_lost = times[backend] <= 0
            ratio = math.inf if is_lost else times["gloo"] / times[backend]
            found = "nothing beyond its noise" if is_lost else f"{format_number(ratio)}x"
            yield Verdict(
                f"DDP, {size} parameters, {backend}, against Gloo",
                f">= {least:g}x",
                f"{found} ({times[backend]:.0f} us)",
                ratio >= least,
            )


def _company_verdicts(folder: Path) -> Iterator[Verdict]:
    what = "steps a second in company, against Gloo"
    company = _load(folder, "company")
    if company is None:
        yield Verdict(what, "several", "not measured", None)
        return
    rows = [row for row in company["rows"] if row["status"] == "measured"]
    ratios = [row["gloo_over_fastcoll"] for row in rows]
    cpus = [
        row["libraries"]["fastcoll"]["cpu_ms"] / row["libraries"]["gloo"]["cpu_ms"] for row in rows
    ]
    absent = len(company["rows"]) - len(rows)
    slow = sum(ratio < 1 for ratio in ratios)
    fast = sum(ratio >= LEAST_COMPANY_RATIO for ratio in ratios)
    # Steps that communicate nothing show the cells in which no library could reach the ratio.
    bounds = [
        row["libraries"]["compute"]["per_s"] / row["libraries"]["gloo"]["per_s"] for row in rows
    ]
    possible = sum(bound >= LEAST_COMPANY_RATIO for bound in map(max, ratios, bounds))
    dear = sum(cpu > 1 for cpu in cpus)
    of_all = f"of {len(rows)} cells" + (f" ({absent} not measured)" if absent else "")
    yield Verdict(
        f"{what}, every cell", ">= 1x", f"{min(ratios):.2f}x; {slow} {of_all} below", slow == 0
    )
    share = fast / len(rows)
    found = f"{share:.0%} {of_all}; {fast} of {possible} where any library could"
    yield Verdict(f"{what}, >= {LEAST_COMPANY_RATIO}x", ">= 80%", found, share >= 0.8)
    yield Verdict(
        "CPU time of a step in company, against Gloo's",
        "<= 1x",
        f"{max(cpus):.2f}x; {dear} {of_all} above",
        dear == 0,
    )


def _jax_verdicts(folder: Path) -> Iterator[Verdict]:
    jax = _load(folder, "jax")
    for verb in ("all_reduce", "all_gather"):
        for what, sizes, least in LEAST_JAX_RATIOS:
            name = f"JAX, {verb}, in a loop, {what}"
            if jax is None:
                yield Verdict(name, f">= {least}x", "not measured", None)
                continue
            ratios = [
                times["JAX's Gloo, in a loop"] / times["fastcoll, in a loop"]
                for size, times in jax["times_us"][verb].items()
                if int(size) in sizes
            ]
            found = f"{format_number(min(ratios))}x"
            yield Verdict(name, f">= {least}x", found, min(ratios) >= least)


def _vllm_verdicts(folder: Path) -> Iterator[Verdict]:
    vllm = _load(folder, "vllm")
    for library, least in LEAST_VLLM_RATIOS.items():
        what = f"vLLM, tokens a second, against {library}"
        if vllm is None or library not in vllm["points"][0]["fastcoll_over"]:
            yield Verdict(what, f">= {least}x", "not measured", None)
            continue
        worst = min(vllm["points"], key=lambda one: one["fastcoll_over"][library])
        ratio = worst["fastcoll_over"][library]
        yield Verdict(what, f">= {least}x", f"{ratio:.2f}x, {worst['point']}", ratio >= least)


def _program_verdicts(folder: Path) -> Iterator[Verdict]:
    points = (_load(folder, "programs") or {"points": []})["points"]
    for way in ("compiled", "python"):
        what = f"other people's programs, steps a second against Gloo, {way}"
        mine = [one for one in points if way in one["gloo_over"]]
        if not mine:
            yield Verdict(what, ">= 1x", "not measured", None)
            continue
        worst = min(mine, key=lambda one: one["gloo_over"][way])
        ratio = worst["gloo_over"][way]
        yield Verdict(what, ">= 1x", f"{ratio:.2f}x, {worst['point']}", ratio >= 1)


def _suite_verdicts(folder: Path) -> Iterator[Verdict]:
    for backend, name in itertools.product(("compiled", "python"), ("", "-as-gloo")):
        by_name = ', by the name "gloo"' if name else ""
        what = f"PyTorch's own cases that pass on Gloo, {backend}{by_name}"
        suite = _load(folder, f"torch-suite-{backend}{name}")
        if suite is None:
            yield Verdict(what, "all pass", "not measured", None)
            continue
        worlds = suite["worlds"]
        lost = [name for world in worlds.values() for name in world["lost"]]
        passed = ", ".join(
            f"{world['fastcoll']['passed']} ({world['gloo']['passed']} on Gloo) of {ranks} ranks"
            for ranks, world in worlds.items()
        )
        yield Verdict(what, "all pass", f"{len(lost)} lost; passed: {passed}", not lost)


def verdicts(folder: Path) -> Iterator[Verdict]:
    """Yield how every goal stands."""
    memory = _load(folder, "memory")
    for goal in GOALS:
        yield judge(goal, _load(folder, goal.file), memory)
    yield from _core_verdicts(folder)
    yield from _list_verdicts(folder)
    yield from _torch_verdicts(folder)
    yield from _jax_verdicts(folder)
    yield from _vllm_verdicts(folder)
    yield from _program_verdicts(folder)
    yield from _company_verdicts(folder)
    yield from _suite_verdicts(folder)
    yield from _node_verdicts(folder)
    yield from _choice_verdicts(folder)
    demo = _load(folder, "demo-25M")
    if demo:
        ratio = demo["communication_ratio"]
        checks = all(check["passed"] for check in demo["checks"])
        yield Verdict(
            "demo --params 25M, communication against Gloo",
            f">= {LEAST_DEMO_RATIO}x",
            f"{format_number(ratio)}x, checks {'passed' if checks else 'FAILED'}",
            checks and ratio >= LEAST_DEMO_RATIO,
        )


def main() -> None:
    """Print the table; the exit status says whether every goal is reached."""
    folder = Path(sys.argv[1])
    table = Table(title=f"goals, {folder}", title_justify="left")
    for name in ("what", "goal", "found: worst size by medians", ""):
        table.add_column(name, overflow="fold")
    marks = {True: "[green]reached[/green]", False: "[red]missed[/red]", None: "not measured"}
    found = list(verdicts(folder))
    for verdict in found:
        table.add_row(verdict.what, verdict.goal, verdict.found, marks[verdict.passed])
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    sys.exit(not all(verdict.passed for verdict in found))


if __name__ == "__main__":
    main()
