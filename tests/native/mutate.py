# SPDX-License-Identifier: Apache-2.0
"""Mutates the C++ protocol, one change at a time, and shows which change no native check sees.

    python tests/native/mutate.py                          # every mutation of csrc/cpu: hours
    python tests/native/mutate.py --only p2p.h --seconds 600

All mutations are compiled into a copy of the sources at once, each with a switch (mutant.h): each
then costs a run and no compilation. A check runs for those mutations only that it comes past, the
quickest check first. Decides what is run and what a result means. What a mutation is stands in
mutation_points.py, and which ones may survive, with the reason, in mutation_survivors.toml. Fails
if another one survives, or if one that is named there is killed or is no more.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from mutation_points import Mutation, mutate  # noqa: E402
from test_native import BUILDS, CASES, ROOT, Case, Compiler  # noqa: E402

from programs import run  # noqa: E402

SURVIVORS = HERE / "mutation_survivors.toml"
# Arithmetic on elements: no protocol, and test_reduce holds it against an oracle.
LEFT_OUT = ("reduce", "convert")
BASELINE_LIMIT_S = 600
# Of a wait, in place of the minute that a program allows: many mutations leave a rank waiting.
WAIT_LIMIT_S = {"plain": "4", "address": "15", "thread": "15"}


@dataclass(frozen=True)
class Check:
    """A check, how long it takes without a mutation, and the mutations that it comes past."""

    name: str
    command: tuple[str, ...]
    seconds: float
    reached: frozenset[int]

    @property
    def limit_s(self) -> float:
        return 10 + 4 * self.seconds


def mutate_tree(tree: Path) -> list[Mutation]:
    """Write all mutations into the sources of a tree; the number of each is its index."""
    found: list[Mutation] = []
    for path in sorted((tree / "csrc/cpu").iterdir()):
        if path.suffix in (".h", ".cpp") and not path.name.startswith(LEFT_OUT):
            mutations, text = mutate(path.name, path.read_text(), len(found))
            found += mutations
            path.write_text(text)
    return found


def copy_sources(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("csrc", "kernels", "tests/native"):
        shutil.copytree(ROOT / name, tree / name)


def checks_of(cases: list[Case], compiler: Compiler, folder: Path) -> list[Check]:
    """Compile the programs, and run each case once, without a mutation; the quickest first."""
    checks = []
    for case in cases:
        build = BUILDS[case.build]
        args = case.args
        if case.program in ("test_protocol", "test_p2p"):
            args = (*args[:2], WAIT_LIMIT_S[case.build], *args[3:])
        command = (*build.runner, str(compiler.program(case.program, case.build)), *args)
        trace = folder / "trace"
        began = time.monotonic()
        done = run(["env", f"MUTANT_TRACE={trace}", *command], BASELINE_LIMIT_S)
        if done.returncode != 0:
            message = f"{' '.join(command)} fails without a mutation:\n{done.stdout[-4000:]}"
            raise RuntimeError(message)
        seconds = time.monotonic() - began
        reached = frozenset(map(int, trace.read_text().split()))
        name = " ".join((case.program, case.build, *args))
        print(f"{name}: {seconds:.1f} s, past {len(reached)} mutations", flush=True)
        checks.append(Check(name, command, seconds, reached))
    return sorted(checks, key=lambda check: check.seconds)


def passing_cases() -> list[Case]:
    """The cases of test_native.py that are for the protocol, and for this machine.

    Under AddressSanitizer only what ends in errors: the others take long there.
    """
    return [
        case
        for case in CASES
        if not case.caught_by
        and case.build != "aarch64"
        and case.program != "test_reduce"
        and (case.build != "address" or case.program in ("test_damage", "test_failure"))
    ]


def killer(number: int, checks: list[Check]) -> str | None:
    """Return the check that sees a mutation, or None if none does."""
    for check in checks:
        if number not in check.reached:
            continue
        command = ["env", f"MUTANT={number}", *check.command]
        try:
            if run(command, check.limit_s).returncode != 0:
                return check.name
        except subprocess.TimeoutExpired:
            return f"{check.name}, which does not end"
    return None


@dataclass(frozen=True)
class Allowed:
    """What may survive.

    Attributes:
        listed: The section, "equivalent" or "open", of every mutation that is listed.
        unsettled: Files of which nobody has gone through the survivors yet: all count as open.
    """

    listed: dict[str, str]
    unsettled: frozenset[str]

    def section(self, mutation: Mutation) -> str | None:
        default = "open" if mutation.file in self.unsettled else None
        return self.listed.get(mutation.key, default)


def read_survivors(path: Path = SURVIVORS) -> Allowed:
    with path.open("rb") as file:
        sections = tomllib.load(file)
    unsettled = frozenset(sections.pop("unsettled"))
    listed = {
        key: section
        for section, entries in sections.items()
        for entry in entries
        for key in entry["mutations"]
    }
    return Allowed(listed, unsettled)


def findings(
    seen: dict[Mutation, str | None], mutations: list[Mutation], allowed: Allowed
) -> list[str]:
    """Return where the run and the list of survivors differ."""
    found = []
    for mutation, by in seen.items():
        if by is None and allowed.section(mutation) is None:
            found.append(f"{mutation.key}: survived, and is not in {SURVIVORS.name}")
        if by is not None and mutation.key in allowed.listed:
            found.append(f"{mutation.key}: is killed; take it out of {SURVIVORS.name}")
    for key in sorted(allowed.listed.keys() - {mutation.key for mutation in mutations}):
        found.append(f"{key}: is no more; take it out of {SURVIVORS.name}")
    return found


def chosen(
    mutations: list[Mutation], only: list[str], shard: tuple[int, int]
) -> Iterator[tuple[int, Mutation]]:
    index, count = shard
    picked = [pair for pair in enumerate(mutations) if not only or pair[1].file in only]
    yield from picked[index::count]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", default=[], help="a file of csrc/cpu")
    parser.add_argument("--shard", default="0/1", help="i/n: each n-th mutation from the i-th on")
    parser.add_argument("--folder", type=Path, help="where the programs stay, for ccache to know")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    return parser.parse_args()


def run_mutations(
    picked: Iterator[tuple[int, Mutation]], checks: list[Check], end: float
) -> dict[Mutation, str | None]:
    """Run mutations until all are through or the time is over; return what kills each."""
    seen: dict[Mutation, str | None] = {}
    for number, mutation in picked:
        began = time.monotonic()
        if began > end:
            break
        by = seen[mutation] = killer(number, checks)
        state = f"killed by {by}" if by else "survived"
        where = f"{mutation.file}:{mutation.line}"
        took = time.monotonic() - began
        print(f"{where}: [{mutation.what}] {mutation.text}: {state} ({took:.1f} s)", flush=True)
    return seen


def main() -> int:
    arguments = parse_arguments()
    index, count = map(int, arguments.shard.split("/"))
    end = time.monotonic() + arguments.seconds
    allowed = read_survivors()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tree = folder / "tree"
        copy_sources(tree)
        mutations = mutate_tree(tree)
        flags = ("-w", "-include", str(tree / "tests/native/mutant.h"))
        checks = checks_of(passing_cases(), Compiler(folder, tree, flags), folder)
        picked = chosen(mutations, arguments.only, (index, count))
        seen = run_mutations(picked, checks, end)

    found = findings(seen, mutations, allowed)
    for text in found:
        print(f"FINDING: {text}")
    sections = [allowed.section(mutation) for mutation, by in seen.items() if by is None]
    print(
        f"{len(mutations)} mutations, {len(seen)} of them run: {len(seen) - len(sections)} killed, "
        f"{sections.count('equivalent')} proven equivalent, {sections.count('open')} not yet killed"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
