# SPDX-License-Identifier: Apache-2.0
"""Puts what check.sh found into one JSON and one picture, and prints it as a table.

`python report.py WORK [OUT]`: WORK holds steps.tsv, tests-*.xml, measured.json and kernels.json as
far as the steps came. Without OUT the results go to bench/results/<gpu>.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastcoll.measure.machine import now, read_commit, read_machine, read_versions
from fastcoll.topology import gpu

HERE = Path(__file__).parent
PACKAGES = ("fastcoll", "torch", "numpy", "triton", "cupy-cuda13x", "nvidia-nccl-cu13")


def steps(work: Path) -> list[dict[str, Any]]:
    rows = []
    for line in (work / "steps.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        state = {"0": "passed", "skip": "skipped: not there", "124": "stopped: out of time"}
        rows.append(
            {"step": name, "result": state.get(code, f"failed ({code})"), "seconds": int(seconds)}
        )
    return rows


def tests(work: Path) -> dict[str, Any]:
    """Count what pytest wrote; what it did not get to is not there, so a crash counts nothing."""
    paths = sorted(work.glob("tests-*.xml"))
    if not paths:
        return {"passed": 0, "failed": [], "skipped": [], "note": "pytest left no report"}
    failed, skipped, passed = [], [], 0
    for part, case in ((path.stem, case) for path in paths for case in _cases(path)):
        name = f"{part}: {case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _cases(path: Path) -> list[ElementTree.Element]:
    try:
        return list(ElementTree.parse(path).iter("testcase"))
    except ElementTree.ParseError:  # it was stopped while it wrote
        return []


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
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
    figure.suptitle(f"all_reduce float32 on {document['gpus'][0]['name']}: ranks as threads")
    figure.savefig(path, dpi=120)
    return ""


def table(document: dict[str, Any]) -> None:
    print("\n== result")
    for one in document["steps"]:
        print(f"{one['step']:12} {one['result']:24} {one['seconds']:4} s")
    found = document["tests"]
    print(
        f"GPU tests: {found['passed']} passed, {len(found['failed'])} failed, "
        f"{len(found['skipped'])} skipped"
    )
    for name in (*found["failed"][:20], *found["skipped"][:20]):
        print(f"  {name}")
    measured = document["measured"]
    if measured is None:
        print("nothing was measured")
        return
    print(f"copy within the GPU: {measured['copy_gbps']} GB/s (read + written)")
    head = ("verb", "ranks", "bytes", "algorithm", "mode", "us", "of copy")
    print("{:>14} {:>5} {:>10} {:>10} {:>6} {:>9} {:>8}".format(*head))
    for r in measured["rows"]:
        part = f"{r['fraction_of_copy']:.0%}" if "fraction_of_copy" in r else ""
        print(
            f"{r['verb']:>14} {r['ranks']:5} {r['size_bytes']:10} {r['algorithm']:>10} "
            f"{r['mode']:>6} {r['time_us']:9.2f} {part:>8}"
        )
    if measured["left_out"]:
        print(f"not measured, out of time: {len(measured['left_out'])} rows")
    for r in (document["kernels"] or {"rows": []})["rows"]:
        print(f"{r['what']:24} {r['case']:32} {r['value']:10.2f} {r['unit']}")


def main(work: Path, out: Path | None) -> None:
    gpus = gpu.gpus()
    commit = read_commit(HERE)
    document: dict[str, Any] = {
        "command": "bench/gpu/check.sh",
        "commit": asdict(commit) if commit else None,
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
        "versus": _read(work / "versus.json"),
    }
    for one in document["gpus"]:
        del one["uuid"]  # tells one machine from another: nobody's business
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-") if gpus else "unknown"
    folder = out or HERE.parent / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    problem = plot(document, folder / "gpu.png") if document["measured"] else ""
    table(document)
    if problem:
        print(problem)
    print(f"written: {folder / 'gpu.json'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
