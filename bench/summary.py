# SPDX-License-Identifier: Apache-2.0
"""Write the figures of all result files into one page: `python bench/summary.py`.

The page is bench/results/README.md. No figure in it is typed by hand, nor in the README's table,
which `first_screen` makes. Medians throughout, as in bench/targets.py, which says how the goals
stand.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from targets import verdicts

from fastcoll.measure.sizes import format_number, format_size, parse_sizes

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
# Facts about a machine that its files do not hold.
MACHINES = {
    "xeon-amx-2core": "Intel Xeon with AMX: AVX-512",
    "xeon-emr-2core": "Intel Xeon with AMX, model 207 (rows and coded elements alone)",
    "xeon-icx-2core": "Intel Xeon, Ice Lake: AVX-512 (not measured: verbs in Python, vLLM, hosts)",
    "epyc-zen5-2core": "AMD EPYC, Zen 5: AVX-512 (all_reduce, choices, and verbs in C alone)",
    "epyc-zen4-2core": "AMD EPYC, Zen 4: AVX-512",
    "epyc-zen3-2core": "AMD EPYC, Zen 3: AVX2",
}
SIZES = parse_sizes("8,512,2K,32K,512K,8M,128M")
FIRST_SIZES = parse_sizes("8,2K,32K,512K,8M,128M")
ASYNC_SIZES = parse_sizes("8,512,2K,32K,128K,512K,8M")
VERB_SIZES = parse_sizes("4K,1M,64M")
C_SIZES = parse_sizes("4K,64K,1M,16M,64M")
VERBS = ("reduce_scatter", "reduce", "all_gather", "gather", "scatter", "all_to_all", "broadcast")
GLOO, OURS = "gloo", "fastcoll"
MPIS = ("openmpi", "mpich", "intelmpi")
NAMES = {GLOO: "Gloo", "openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
# Row's name, file, library; its ratio to fastcoll stands in the table.
AGAINST = (
    ("Gloo, Python", "python-float32", GLOO),
    ("Gloo, Python, bfloat16", "python-bfloat16", GLOO),
    ("Gloo, Python, symmetric tensors", "python-symmetric", GLOO),
    ("Gloo, Python, 4 ranks on the 2 cores", "python-4ranks", GLOO),
    *((f"{NAMES[mpi]} {{version}}, C", "c-float32", mpi) for mpi in MPIS),
)
WARNING = "<!-- Written by bench/summary.py: change that, or the result files. -->"


class Results:
    """The result files of one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents: dict[str, Json] = {
            path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
        }

    def row(self, name: str, size_bytes: int) -> Json | None:
        """Return the row of one size in a file of `fastcoll bench`."""
        rows = self.documents.get(name, {}).get("rows", [])
        return next((row for row in rows if row["size_bytes"] == size_bytes), None)

    def time(self, name: str, size_bytes: int) -> str:
        """Return how long a call of fastcoll's takes there, in us."""
        row = self.row(name, size_bytes)
        for cell in row["cells"] if row else ():
            if cell["library"] == OURS and "time_us" in cell:
                return format_number(cell["time_us"])
        return ""

    def ratio(self, name: str, size_bytes: int, libraries: Sequence[str]) -> str:
        """Return how many times longer the quickest of these takes, and which, of several."""
        row = self.row(name, size_bytes)
        found = {
            library: row["ratios"][library]["median"]
            for library in libraries
            if row and library in row["ratios"]
        }
        if not found:
            return ""
        best = min(found, key=lambda library: found[library])
        named = f" {NAMES[best]}" if len(libraries) > 1 else ""
        digits = 2 if found[best] < 1 else 1 if found[best] < 10 else 0
        return f"{found[best]:.{digits}f}x{named}"

    def spread(self, name: str, size_bytes: int) -> str:
        """Return fastcoll's time there with its 10th and 90th percentile, in us."""
        row = self.row(name, size_bytes)
        for cell in row["cells"] if row else ():
            if cell["library"] == OURS and "time_us" in cell:
                low, high = (format_number(cell[key]) for key in ("p10_us", "p90_us"))
                return f"{format_number(cell['time_us'])} ({low}-{high})"
        return ""

    def commit(self, name: str) -> str:
        """Return the commit that a file was measured at."""
        return str(self.documents[name]["commit"]["hash"][:7]) if name in self.documents else ""

    def version(self, name: str, library: str) -> str:
        """Return the version that a library had in a file."""
        every = self.documents.get(name, {}).get("libraries", [])
        said = next((one["version"] or "" for one in every if one["name"] == library), "")
        numbers = re.search(r"\d+(\.\d+)+", said)
        return numbers[0] if numbers else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, but for rows of nothing but their name; of no rows: none."""
    lines = [f"| {' | '.join(row)} |".replace("|  ", "| ") for row in rows if any(row[1:])]
    if lines:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        yield from lines
        yield ""


def all_reduce(of: Results) -> Iterator[str]:
    """Yield every library's times of all_reduce."""
    rows = [["fastcoll from Python, us", *(of.time("python-float32", size) for size in SIZES)]]
    for what, name, library in AGAINST:
        title = what.format(version=of.version(name, library))
        rows.append([title, *(of.ratio(name, size, [library]) for size in SIZES)])
    yield from _table(["all_reduce, 2 ranks", *map(format_size, SIZES)], rows)


def first_screen(of: Results) -> Iterator[str]:
    """Yield the table that the README shows of one machine: three rows."""
    rows = (
        ["fastcoll, us", *(of.time("python-float32", size) for size in FIRST_SIZES)],
        ["Gloo takes", *(of.ratio("python-float32", size, [GLOO]) for size in FIRST_SIZES)],
        ["the quickest MPI, in C", *(of.ratio("c-float32", size, MPIS) for size in FIRST_SIZES)],
    )
    yield from _table(["all_reduce, 2 ranks", *map(format_size, FIRST_SIZES)], rows)


def _asynchronous(of: Results) -> Iterator[str]:
    name = "python-async"
    rows = [["fastcoll, us", *(of.time(name, size) for size in ASYNC_SIZES)]]
    for library in (GLOO, *MPIS):
        ratios = (of.ratio(name, size, [library]) for size in ASYNC_SIZES)
        rows.append([NAMES[library], *ratios])
    yield from _table(["all_reduce, async_op and wait", *map(format_size, ASYNC_SIZES)], rows)


def _verbs(of: Results) -> Iterator[str]:
    head = ["from Python, 2 ranks"]
    for size in VERB_SIZES:
        head += [f"{format_size(size)}, us", "Gloo", "quickest MPI"]
    rows = []
    for verb in (*VERBS, "sendrecv"):
        rows.append([verb])
        for size in VERB_SIZES:
            rows[-1] += [of.time(verb, size), of.ratio(verb, size, [GLOO])]
            rows[-1].append(of.ratio(verb, size, MPIS))
    yield from _table(head, rows)
    yield from _table(
        ["C against C: us (10th-90th percentile), quickest MPI", *map(format_size, C_SIZES)],
        (
            [
                f"{verb} {of.commit(f'c-{verb}')}".rstrip(),
                *(
                    f"{of.spread(f'c-{verb}', size)} {of.ratio(f'c-{verb}', size, MPIS)}".strip()
                    for size in C_SIZES
                ),
            ]
            for verb in (*VERBS, "sendrecv")
        ),
    )


def _torch(of: Results) -> Iterator[str]:
    times_us = of.documents.get("torch", {}).get("times_us", {})
    backends = ("compiled", "python", GLOO, "fake")
    yield from _table(
        ["through torch.distributed, us", "compiled", "Python", "Gloo", "torch alone"],
        (
            [what, *(format_number(times[one]) if one in times else "" for one in backends)]
            for what, times in times_us.items()
        ),
    )


def _forms(of: Results) -> Iterator[str]:
    times_us = of.documents.get("forms", {}).get("times_us", {})
    yield from _table(
        ["16 KiB, however a call is made, us", "fastcoll", "Gloo"],
        (
            [
                form,
                format_number(times[OURS]),
                format_number(times[GLOO]) if times[GLOO] else "none",
            ]
            for form, times in times_us.items()
        ),
    )


def _rows(of: Results) -> Iterator[str]:
    """Yield what a norm behind a sum takes, by itself and in compiled programs."""
    for name, head, ways, ratio in (
        (
            "rows",
            ["all_reduce, addition, RMSNorm, us", "three calls", "one call", "sum alone", "ratio"],
            ("steps", "fused", "all_reduce"),
            "steps_over_fused",
        ),
        (
            "compiled",
            ["the same compiled, each of 8, us", "unfused", "fused", "sum alone", "ratio"],
            ("unfused", "fused", "all_reduce"),
            "unfused_over_fused",
        ),
    ):
        points = of.documents.get(name, {}).get("points", [])
        rows = []
        for one in points:
            times = (format_number(one["median_us"][way]) for way in ways)
            mode = f", {one['mode']}" if "mode" in one else ""
            rows.append([f"{one['dtype']} {one['shape']}{mode}", *times, f"{one[ratio]:g}x"])
        yield from _table(head, rows)


def _coding(of: Results) -> Iterator[str]:
    """Yield the speed of coding elements that cross between nodes, by SIMD level."""
    steps = ("code", "add 2", "decode", "copy")

    def cell(speeds: Json, step: str) -> str:
        return format_number(speeds[step]) if step in speeds else ""

    rows = [
        [f"{wire}, {level}", *(cell(speeds, step) for step in steps)]
        for level, formats in of.documents.get("coding", {}).get("gbps", {}).items()
        for wire, speeds in formats.items()
    ]
    yield from _table(["one core, GB/s of float32 elements", *steps], rows)


def _jax(of: Results) -> Iterator[str]:
    """Yield the times of JAX's collectives and of fastcoll's, in a loop and as programs."""
    names = ("JAX's Gloo, in a loop", "fastcoll, in a loop")
    names += ("JAX's Gloo, a program", "fastcoll, a program of jax.jit")
    for verb, times_us in of.documents.get("jax", {}).get("times_us", {}).items():
        yield from _table(
            [f"JAX, {verb}, us", *names],
            (
                [format_size(int(size)), *(format_number(one[name]) for name in names)]
                for size, one in times_us.items()
            ),
        )


def _vllm(of: Results) -> Iterator[str]:
    """Yield the tokens a second of vLLM's engine, by library."""
    points = of.documents.get("vllm", {}).get("points", [])
    libraries = [OURS, "fastcoll, fused", "vllm", GLOO, "silent"]

    def cell(point: Json, library: str) -> str:
        if library not in point["median_tokens_s"]:
            return "not measured"
        ratio = point["fastcoll_over"].get(library)
        rate = format_number(point["median_tokens_s"][library])
        return f"{rate} ({ratio:.2f}x)" if ratio else rate

    yield from _table(
        [
            "vLLM, tokens/s (fastcoll's over it)",
            OURS,
            "fused",
            "its shared memory",
            "Gloo",
            "no communication",
        ],
        ([one["point"], *(cell(one, library) for library in libraries)] for one in points),
    )


def _programs(of: Results) -> Iterator[str]:
    """Yield the times of other people's programs, by torch's backend, and Gloo's over them."""
    points = of.documents.get("programs", {}).get("points", [])
    ways = ("compiled", "python", OURS)

    def cell(point: Json, way: str) -> str:
        if way not in point["median_us"]:
            return ""
        middle, late = (format_number(point[field][way]) for field in ("median_us", "p90_us"))
        ratio = point["gloo_over"].get(way)
        return f"{middle}, {late}" + (f" ({ratio:.2f}x)" if ratio else "")

    yield from _table(
        ["a step or a call, us: median, 9 of 10 (Gloo's over it)", GLOO, *ways],
        ([one["point"], *(cell(one, way) for way in ("gloo", *ways))] for one in points),
    )


def _company(of: Results) -> Iterator[str]:
    """Yield the steps a second on busy cores, against Gloo's."""
    company = of.documents.get("company", {"rows": [], "settings": {"sizes": []}})
    ratios = {
        (row["situation"], row["way"], row["size_bytes"]): row.get("gloo_over_fastcoll")
        for row in company["rows"]
    }
    situations, ways = (list(dict.fromkeys(key[at] for key in ratios)) for at in (0, 1))
    sizes = company["settings"]["sizes"]

    def cell(situation: str, way: str) -> str:
        found = (ratios.get((situation, way, size)) for size in sizes)
        return ", ".join(f"{one:.2f}" if one else "not measured" for one in found)

    yield from _table(
        [f"steps/s over Gloo's, of {', '.join(map(format_size, sizes))}", *ways],
        ([situation, *(cell(situation, way) for way in ways)] for situation in situations),
    )


def _goals(of: Results) -> Iterator[str]:
    """Yield how all goals stand, the missed ones first."""
    found = sorted(verdicts(of.folder), key=lambda one: (False, None, True).index(one.passed))
    if "python-float32" not in of.documents:  # a machine on which publish.sh did not run
        found = [one for one in found if one.passed is not None]
    marks = {False: "**missed**", None: "not measured", True: "reached"}
    rows = ([one.what, one.goal, one.found, marks[one.passed]] for one in found)
    yield from _table(["what", "goal", "found at the worst size", ""], rows)


def _files(of: Results) -> Iterator[str]:
    """Yield where each figure is from: which files are of which commit."""
    by_run: dict[tuple[str, str], list[str]] = {}
    for name, document in of.documents.items():
        commit = document["commit"]
        changed = " with changes" if commit["dirty"] else ""
        run = (document["date"][:10], f"{commit['hash'][:7]}{changed}")
        by_run.setdefault(run, []).append(name)
    rows = ([date, commit, ", ".join(names)] for (date, commit), names in sorted(by_run.items()))
    link = f"files in [{of.folder.name}/]({of.folder.name})"
    yield from _table(["date", "commit", link], rows)


def _machine(of: Results) -> Iterator[str]:
    facts = next(one["machine"] for one in of.documents.values() if "machine" in one)
    kernel, _, _ = facts["kernel"].partition("-")
    yield f"## {MACHINES[of.folder.name]}"
    yield ""
    yield f"{facts['num_cpus']} virtual CPUs: {facts['cpu_model']}; Linux {kernel}."
    yield ""
    for part in (
        all_reduce,
        _asynchronous,
        _verbs,
        _forms,
        _torch,
        _rows,
        _coding,
        _jax,
        _vllm,
        _programs,
        _company,
        _goals,
        _files,
    ):
        yield from part(of)


def page() -> str:
    """Return the whole page."""
    lines = [
        WARNING,
        "",
        "# Results",
        "",
        "All of it, machine by machine, from the files beside this page. A ratio says how many",
        "times longer the other library takes than fastcoll, by medians over windows of one run,",
        "in which the libraries take turns; an empty place was not measured. Every file holds its",
        "command, commit, machine, versions and all windows; [../README.md](../README.md) says",
        "what a number means.",
        "",
    ]
    for name in MACHINES:
        lines += _machine(Results(RESULTS / name))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(page())
