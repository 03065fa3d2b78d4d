# SPDX-License-Identifier: Apache-2.0
"""Puts the results of check.sh into one JSON, one table and one picture, and prints a page.

`python report.py WORK [OUT [COMMIT]]`: WORK holds steps.tsv, tests-*.jsonl, clocks.csv and the JSON
of each step that measures, as far as the steps came, whole or cut off. Without OUT the results go
to bench/results/<gpu>; COMMIT is the tested commit where there is no git.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import live_results

from fastcoll.machine import gpu
from fastcoll.measure.machine import now, read_commit, read_machine, read_versions

HERE = Path(__file__).parent
PACKAGES = ("fastcoll", "torch", "numpy", "triton", "cupy-cuda13x", "nvidia-nccl-cu13")


def steps(work: Path) -> list[dict[str, Any]]:
    path = work / "steps.tsv"
    states = {
        "0": "passed",
        "skip": "skipped: not there",
        "late": "not run: out of time",
        "124": "stopped: out of time",
    }
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        name, code, seconds = line.split("\t")
        result = states.get(code, f"failed ({code})")
        rows.append({"step": name, "result": result, "seconds": int(seconds)})
    return rows


def tests(work: Path) -> dict[str, Any]:
    """Count the results that pytest wrote; tests that it did not start are missing."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": [], "seconds": {}}
    for path in sorted(work.glob("tests-*.jsonl")):
        for row in live_results.read(path):
            name = f"{path.stem}: {row['test'].split('/')[-1]}"
            if row["result"] == "passed":
                found["passed"] += 1
                found["seconds"][name] = row["seconds"]
            elif row["result"] == live_results.BEGUN:
                found["failed"].append(f"{name}: crashed, or hung to the limit")
            else:
                found[row["result"]].append(f"{name}: {row['text']}")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # it was never written, or not to its end
        return None


def clocks(work: Path) -> dict[str, list[float]] | None:
    """Return the least, the median and the most of nvidia-smi's readings while `measure` ran."""
    names = ("sm_mhz", "memory_mhz", "watts", "celsius")
    try:
        lines = (work / "clocks.csv").read_text().splitlines()
        rows = [[float(cell) for cell in line.split(",")] for line in lines]
    except (OSError, ValueError):  # no nvidia-smi, or a card that does not tell
        return None
    rows = [row for row in rows if len(row) == len(names)]
    if not rows:
        return None
    columns = (sorted(column) for column in zip(*rows, strict=True))
    return {
        name: [column[0], median(column), column[-1]]
        for name, column in zip(names, columns, strict=True)
    }


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def plot(document: dict[str, Any], path: Path) -> str:
    """Draw latency and the fraction of the copy bandwidth; return why not, or nothing."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no picture: matplotlib is not installed"
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, fractions) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    rows = document["measured"]["rows"]
    rows = [r for r in rows if r["verb"] == "all_reduce"]
    keys = sorted({(r["ranks"], r["algorithm"], r["mode"]) for r in rows})
    for key in keys:
        mine = [r for r in rows if (r["ranks"], r["algorithm"], r["mode"]) == key]
        sizes = [r["size_bytes"] for r in mine]
        label = f"{key[0]} ranks, {key[1]}, {key[2]}"
        if key[1] == "auto":
            times.loglog(sizes, [r["time_us"] for r in mine], marker="o", ms=3, label=label)
        elif "fraction_of_copy" in mine[0]:
            parts = [r["fraction_of_copy"] for r in mine]
            fractions.semilogx(sizes, parts, marker="o", ms=3, label=label)
    times.set_ylabel("time of a call, us")
    fractions.set_ylabel("memory traffic / copy bandwidth")
    for axis in (times, fractions):
        axis.set_xlabel("bytes")
        axis.legend(frameon=False, fontsize=7)
        axis.grid(visible=True, alpha=0.3)
    name = document["gpus"][0]["name"] if document["gpus"] else "an unknown GPU"
    figure.suptitle(f"all_reduce float32 on {name}: ranks as threads")
    figure.savefig(path, dpi=120)
    return ""


def table(document: dict[str, Any]) -> Iterator[str]:
    """Yield every number, as lines."""
    measured = document["measured"]
    if measured is not None:
        yield f"copy within the GPU: {measured['copy_gbps']} GB/s (read + written)"
        head = ("verb", "ranks", "bytes", "algorithm", "mode", "us", "of copy", "floor", "over it")
        yield "{:>14} {:>5} {:>10} {:>10} {:>6} {:>9} {:>8} {:>8} {:>8}".format(*head)
        for r in measured["rows"]:
            part = f"{r['fraction_of_copy']:.0%}" if "fraction_of_copy" in r else ""
            floor, over = "", ""
            if "floor_us" in r:
                floor, over = f"{r['floor_us']:.2f}", f"{r['over_floor']:.2f} x"
            yield (
                f"{r['verb']:>14} {r['ranks']:5} {r['size_bytes']:10} {r['algorithm']:>10} "
                f"{r['mode']:>6} {r['time_us']:9.2f} {part:>8} {floor:>8} {over:>8}"
            )
        yield judge_floor(measured["rows"])
    for r in (document["tuning"] or {"rows": []})["rows"]:
        ranks = f"{r['world_size']} {r['ranks_are']}, {r['ranks_per_gpu']} on a GPU"
        case = f"{r['algorithm']} {r['size_bytes']} bytes, {ranks}"
        yield f"tune {r['verb']:19} {case:52} {r['time_us']:10.2f} us"
    for part in (document[name] for name in ("queues", "one_grid", "kernels", "fused")):
        for r in (part or {"rows": []})["rows"]:
            yield f"{r['what']:34} {r['case']:36} {r['value']:10.2f} {r['unit']}"
    yield from _beside(document)


# The goal of small calls: an all_reduce in a graph takes at most so many times its floor.
_FLOOR_RANKS, _MOST_OVER_FLOOR = 8, 2.0
_FLOOR_SIZES = (8, 256, 1 << 10, 4 << 10, 16 << 10)
_MOST_LINES, _MOST_CHARACTERS = 12, 180  # of each list on the page
# The key in the document of each step that measures.
_MEASURING = {"measure": "measured", "kernels": "kernels", "fused": "fused", "tune": "tuning"}
_MEASURING |= {"queues": "queues", "one_grid": "one_grid"}
# The keys of the steps that run `fastcoll bench`: all libraries at all sizes.
_BESIDE = {"carrier-1": "carrier_1", "carrier-2": "carrier_2", "versus": "versus"}
_MEASURING |= _BESIDE


def page(document: dict[str, Any]) -> Iterator[str]:
    """Yield a page of the most important results, also after a failure."""
    yield "== result"
    for one in document["steps"]:
        yield f"{one['step']:16} {one['result']:24} {one['seconds']:4} s"
    found = document["tests"]
    failed, skipped = found["failed"], found["skipped"]
    yield f"GPU tests: {found['passed']} passed, {len(failed)} failed, {len(skipped)} skipped"
    yield from _smoke(found)
    for title, lines in (("failed", failed), ("skipped", skipped)):
        yield from (f"  {title}: {line[:_MOST_CHARACTERS]}" for line in lines[:_MOST_LINES])
        if len(lines) > _MOST_LINES:
            yield f"  {title}: {len(lines) - _MOST_LINES} more, see gpu.json"
    yield from _unmeasured(document)
    if found := document["clocks"]:
        yield "while measured, least/median/most: " + ", ".join(
            f"{name} {least:g}/{middle:g}/{most:g}" for name, (least, middle, most) in found.items()
        )
    for r in (document["queues"] or {"rows": []})["rows"]:
        yield f"{r['what']}: {r['value']:g} {r['case']}"
    yield from _one_grid((document["one_grid"] or {"rows": []})["rows"])
    yield from _beside(document)
    measured = document["measured"]
    if measured is None:
        return
    yield from _fused_rows((document["fused"] or {"rows": []})["rows"])
    yield f"copy within the GPU: {measured['copy_gbps']} GB/s (read + written)"
    yield "all_reduce in a graph, us (of the copy bandwidth):"
    yield from _graph_rows(measured["rows"])
    yield judge_floor(measured["rows"])
    for what in ("left_out", "failed"):
        if rows := measured.get(what):
            yield f"measured rows {what.replace('_', ' ')}: {len(rows)}, first {rows[0]}"[
                :_MOST_CHARACTERS
            ]


def _unmeasured(document: dict[str, Any]) -> Iterator[str]:
    """Yield the steps without numbers, or without some of them."""
    results = {one["step"]: one["result"] for one in document["steps"]}
    for step, name in _MEASURING.items():
        found = document[name]
        result = results.get(step, "not run")
        if found is None:
            yield f"not measured: {step} ({result})"
        elif result.startswith("stopped") or not found.get("complete", True):
            yield f"not all measured: {step} ({result}; {len(found.get('rows', ()))} rows)"


def _beside(document: dict[str, Any]) -> Iterator[str]:
    """Yield each library's times, or the first reason why it has none."""
    for step, name in _BESIDE.items():
        if (found := document[name]) is None:
            continue
        rows, ranks = found["rows"], found["settings"]["world_size"]
        yield f"{step}: us of all_reduce, {ranks} ranks; bytes:"
        yield f"{'':22}" + "".join(f"{row['size_bytes']:>10}" for row in rows)
        for library in found["libraries"]:
            cells = [
                one for row in rows for one in row["cells"] if one["library"] == library["name"]
            ]
            reasons = [one["reason"] for one in (library, *cells) if one["reason"]]
            times = [
                f"{one['time_us']:10.2f}" if "time_us" in one else f"{'-':>10}" for one in cells
            ]
            line = f"  {library['name']:20}" + "".join(times)
            line += f" not measured: {reasons[0]}" if reasons else ""
            yield line[:_MOST_CHARACTERS]


def _one_grid(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the times of all_reduce with all ranks in one grid, a line for each way."""
    times = {(r["ranks"], r["what"], r["size_bytes"]): r["value"] for r in rows if "ranks" in r}
    for ranks in sorted({key[0] for key in times}):
        sizes = sorted({key[2] for key in times if key[0] == ranks})
        yield f"all_reduce in one grid, us, {ranks} ranks; bytes:"
        yield f"{'':34}" + "".join(f"{size:>10}" for size in sizes)
        for what in dict.fromkeys(key[1] for key in times if key[0] == ranks):
            cells = (times.get((ranks, what, size)) for size in sizes)
            yield f"{what:34}" + "".join(
                f"{'-' if us is None else f'{us:.2f}':>10}" for us in cells
            )


def _smoke(found: dict[str, Any]) -> Iterator[str]:
    """Yield the tests of the smoke step that passed, by number of ranks."""
    works: dict[str, list[str]] = {}
    for name in found["seconds"]:
        if match := re.fullmatch(r"tests-smoke: .*::test_(\w+)\[(\d+)-?(.*)\]", name):
            works.setdefault(match[2], []).append(match[3] or match[1])
    for world, names in works.items():
        yield f"  works with {world} ranks: {', '.join(names)}"


def _fused_rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    times: dict[str, list[str]] = {}
    for r in rows:
        if not r["what"].startswith(("Triton", "CUDA")):
            times.setdefault(r["case"], []).append(f"{r['what']} {r['value']:.2f} us")
    yield from (f"  {case}: {', '.join(found)}" for case, found in times.items())


def judge_floor(rows: list[dict[str, Any]]) -> str:
    """Return whether small calls reach their goal, by the worst of them."""
    what = f"{_FLOOR_RANKS} ranks in a graph, up to {_FLOOR_SIZES[-1]} bytes"
    times = {
        r["size_bytes"]: r["over_floor"]
        for r in rows
        if (r["verb"], r["mode"], r["algorithm"]) == ("all_reduce", "graph", "auto")
        and r["ranks"] == _FLOOR_RANKS
        and "over_floor" in r
    }
    if missing := [size for size in _FLOOR_SIZES if size not in times]:
        return f"{what}: not measured against the floor at {missing} bytes"
    worst = max(_FLOOR_SIZES, key=lambda size: times[size])
    kept = "kept" if times[worst] <= _MOST_OVER_FLOOR else "MISSED"
    return (
        f"{what}: at most {times[worst]:.2f} x the floor, at {worst} bytes; "
        f"{_MOST_OVER_FLOOR:.0f} x are allowed: {kept}"
    )


def _graph_rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    mine = [r for r in rows if (r["verb"], r["mode"]) == ("all_reduce", "graph")]
    keys = sorted({(r["ranks"], r["algorithm"]) for r in mine})
    sizes = sorted({r["size_bytes"] for r in mine})
    yield "{:>10}".format("bytes") + "".join(f"{f'{n} {name}':>16}" for n, name in keys)
    for size in sizes:
        line = f"{size:10}"
        for key in keys:
            cell = ""
            for r in mine:
                if (r["ranks"], r["algorithm"], r["size_bytes"]) == (*key, size):
                    part = f" ({r['fraction_of_copy']:.0%})" if "fraction_of_copy" in r else ""
                    cell = f"{r['time_us']:.2f}{part}"
            line += f"{cell:>16}"
        yield line


def main(work: Path, out: Path | None, told: str = "") -> None:
    gpus = gpu.gpus()
    commit = read_commit(HERE)
    document: dict[str, Any] = {
        "command": "bench/gpu/check.sh",
        "commit": asdict(commit) if commit else told or None,
        "date": now(),
        "gpus": [asdict(one) for one in gpus],
        "driver": driver(),
        "driver_cuda": gpu.driver_version(),
        "versions": read_versions(PACKAGES),
        "machine": asdict(read_machine()),
        "steps": steps(work),
        "tests": tests(work),
        "measured": _read(work / "measured.json"),
        "kernels": _read(work / "kernels.json"),
        "fused": _read(work / "fused.json"),
        "queues": _read(work / "queues.json"),
        "one_grid": _read(work / "one_grid.json"),
        "clocks": clocks(work),
        **{name: _read(work / f"{step}.json") for step, name in _BESIDE.items()},
        "tuning": (_read(work / "tuning.json") or {}).get("gpu"),
    }
    for one in document["gpus"]:
        del one["uuid"]  # tells one machine from another: private
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-") if gpus else "unknown"
    folder = out or HERE.parent / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "gpu.txt").write_text("\n".join(table(document)) + "\n")
    print("\n" + "\n".join(page(document)))
    rows = (document["measured"] or {}).get("rows")
    if rows and (problem := plot(document, folder / "gpu.png")):
        print(problem)
    print(f"written: {folder / 'gpu.json'}")


if __name__ == "__main__":
    given = [*sys.argv[2:], "", ""]
    main(Path(sys.argv[1]), Path(given[0]) if given[0] else None, given[1])
