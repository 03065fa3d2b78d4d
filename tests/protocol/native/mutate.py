# SPDX-License-Identifier: Apache-2.0
"""Mutates the C++ protocol, one change at a time, and shows which change no native check sees.

    python -m tests.protocol.native.mutate    # every mutation of csrc/cpu: hours
    python -m tests.protocol.native.mutate --only p2p.h --seconds 600

All mutations are compiled into a copy of the sources at once, each with a switch (mutant.h): each
then costs a run and no compilation. A check runs for those mutations only that it comes past. The
quick checks run for all mutations before another one is compiled; the checks that killed the most
per second run first. A survivor has passed every check that comes past it; one that is proven
equivalent has passed the quick ones, unless --doubt is given.

Decides the runs and the meaning of a result. mutation_points.py defines the mutations, and
mutation_survivors.toml lists those that may survive, with the reason. Fails if another one
survives, or if one that is named there is killed or is no more.
"""

import argparse
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.protocol.native.mutation_points import Mutation, mutate
from tests.protocol.native.test_native import BUILDS, CASES, LONG_IDLE, ROOT, Case, Compiler
from tests.support.programs import run

SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
# Arithmetic on elements: no protocol, and oracles hold it. Python's tests alone call local_reduce,
# and rows.h tells the dtypes of rows to the checks of arguments.
LEFT_OUT = ("reduce", "convert", "local_reduce", "rows")
BASELINE_LIMIT_S = 600
# Of a wait, in place of the minute that a program allows: many mutations leave a rank waiting.
WAIT_LIMIT_S = {"plain": "4", "address": "15", "thread": "15"}
# Where a case of each program has the limit of a wait.
WAIT_LIMIT_AT = {"test_protocol": 2, "test_p2p": 2, "test_failure": 1}


@dataclass(frozen=True)
class Check:
    """A check, how long it takes without a mutation, and the mutations that it comes past."""

    name: str
    command: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    reached: frozenset[int]

    def kills(self, number: int) -> str | None:
        """Return how the check ends under a mutation, or None if it passes.

        An endless loop ends at a limit of CPU time, which another program's load hardly touches.
        """
        cpu_s = 2 + math.ceil(4 * self.cpu_seconds)
        limited = ["prlimit", f"--cpu={cpu_s}:{cpu_s + 1}"]  # soft and hard: the soft one tells
        command = [*limited, "env", f"MUTANT={number}", *self.command]
        try:
            done = run(command, 30 + 4 * self.seconds)
        except subprocess.TimeoutExpired:
            return "it does not end"
        if done.returncode == 0:
            return None
        if done.returncode == -signal.SIGXCPU:
            return "it does not end"
        return "a wait" if " waited " in done.stdout else "it fails"


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
    for name in ("csrc", "kernels", "tests/protocol/native"):
        shutil.copytree(ROOT / name, tree / name)


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def checks_of(cases: list[Case], compiler: Compiler, folder: Path) -> list[Check]:
    """Compile the programs, and run each case once, without a mutation."""
    checks = []
    for case in cases:
        build = BUILDS[case.build]
        args = case.args
        if at := WAIT_LIMIT_AT.get(case.program):
            args = (*args[:at], WAIT_LIMIT_S[case.build], *args[at + 1 :])
        command = (*build.runner, str(compiler.program(case.program, case.build)), *args)
        trace = folder / "trace"
        began, cpu_began = time.monotonic(), cpu_seconds_of_children()
        done = run(["env", f"MUTANT_TRACE={trace}", *command], BASELINE_LIMIT_S)
        if done.returncode != 0:
            message = f"{' '.join(command)} fails without a mutation:\n{done.stdout[-4000:]}"
            raise RuntimeError(message)
        seconds = time.monotonic() - began
        reached = frozenset(map(int, trace.read_text().split()))
        name = " ".join((case.program, case.build, *args))
        print(f"{name}: {seconds:.1f} s, past {len(reached)} mutations", flush=True)
        cpu_seconds = cpu_seconds_of_children() - cpu_began
        checks.append(Check(name, command, seconds, cpu_seconds, reached))
    return checks


def is_quick(case: Case) -> bool:
    """Return whether a case is of the first round, in which one stress test is enough."""
    is_stress = case.program == "test_protocol"
    return case.build == "plain" and (not is_stress or case.args[3:] == (LONG_IDLE,))


def passing_cases() -> list[Case]:
    """Return the cases of test_native.py that are for the protocol, and for this machine.

    Under AddressSanitizer the stress tests take too long.
    """
    return [
        case
        for case in CASES
        if not case.caught_by
        and case.build != "aarch64"
        and case.program != "test_reduce"
        and (case.build != "address" or case.program not in ("test_protocol", "test_p2p"))
    ]


@dataclass
class Outcome:
    """The result of a mutation: the check that killed it, and those that it survived."""

    killed_by: str | None = None
    survived: list[str] = field(default_factory=list)


class Killer:
    """Runs checks against mutations, those first that have killed the most per second."""

    def __init__(self, checks: list[Check]) -> None:
        self.checks = checks
        self.runs: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    def kills_per_second(self, check: Check) -> float:
        return (1 + self.kills[check.name]) / (2 + self.runs[check.name]) / check.seconds

    def try_kill(self, number: int, outcome: Outcome) -> None:
        """Run the checks that the mutation has not survived, until one of them kills it."""
        for check in sorted(self.checks, key=self.kills_per_second, reverse=True):
            is_due = number in check.reached and check.name not in outcome.survived
            if outcome.killed_by is not None or not is_due:
                continue
            self.runs[check.name] += 1
            how = check.kills(number)
            if how is not None and how != "it fails":
                how = check.kills(number)  # on a loaded machine time may be over by itself
            if how is None:
                outcome.survived.append(check.name)
            else:
                outcome.killed_by = f"{check.name}: {how}"
                self.kills[check.name] += 1


def read_survivors() -> dict[str, str]:
    """Return the section, "equivalent" or "open", of every mutation that may survive."""
    sections = tomllib.loads(SURVIVORS.read_text())
    return {
        key: section
        for section, entries in sections.items()
        for keys in entries.values()
        for key in keys
    }


def findings(
    seen: dict[Mutation, str | None], mutations: list[Mutation], allowed: dict[str, str]
) -> list[str]:
    """Return where the run and the list of survivors differ."""
    found = []
    for mutation, by in seen.items():
        if by is None and mutation.key not in allowed:
            found.append(f"{mutation.key}: survived, and is not in {SURVIVORS.name}")
        if by is not None and mutation.key in allowed:
            found.append(f"{mutation.key}: is killed; take it out of {SURVIVORS.name}")
    for key in sorted(allowed.keys() - {mutation.key for mutation in mutations}):
        found.append(f"{key}: is no more; take it out of {SURVIVORS.name}")
    return found


def chosen(
    mutations: list[Mutation], only: list[str], shard: tuple[int, int]
) -> list[tuple[int, Mutation]]:
    """Return the mutations of the files in `only`, in their order there, or else all."""
    index, count = shard
    picked = [pair for pair in enumerate(mutations) if not only or pair[1].file in only]
    if only:
        picked.sort(key=lambda pair: only.index(pair[1].file))
    return picked[index::count]


def without_proven(
    picked: Iterable[tuple[int, Mutation]], allowed: dict[str, str]
) -> list[tuple[int, Mutation]]:
    """Leave out the mutations that are proven equivalent."""
    return [pair for pair in picked if allowed.get(pair[1].key) != "equivalent"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", default=[], help="files of csrc/cpu, in this order")
    parser.add_argument("--shard", default="0/1", help="i/n: each n-th mutation from the i-th on")
    parser.add_argument("--folder", type=Path, help="where the programs stay, for ccache to know")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--jobs", type=int, default=1, help="checks that run at once")
    parser.add_argument(
        "--doubt", action="store_true", help="run the slow checks on proven equivalents, too"
    )
    parser.add_argument(
        "--results", type=Path, help="append to this file, and don't run again what is in there"
    )
    return parser.parse_args()


class Results:
    """The outcomes so far, which a file keeps from one run to the next."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                key, killed_by, survived = json.loads(line)
                self.outcomes[key] = Outcome(killed_by, survived)

    def outcome(self, mutation: Mutation) -> Outcome:
        return self.outcomes.setdefault(mutation.key, Outcome())

    def keep(self, mutation: Mutation) -> None:
        if self.path:
            outcome = self.outcome(mutation)
            with self.path.open("a") as file:
                print(json.dumps((mutation.key, outcome.killed_by, outcome.survived)), file=file)


def run_round(
    picked: Iterable[tuple[int, Mutation]],
    killer: Killer,
    results: Results,
    end: float,
    jobs: int,
) -> Iterator[tuple[Mutation, str | None]]:
    """Run the checks of a killer; yield the check that kills each mutation, in order."""

    def run_one(pair: tuple[int, Mutation]) -> tuple[Mutation, str | None] | None:
        number, mutation = pair
        outcome = results.outcome(mutation)
        began = time.monotonic()
        if began > end and outcome.killed_by is None:
            return None
        known = (outcome.killed_by, len(outcome.survived))
        killer.try_kill(number, outcome)
        if known != (outcome.killed_by, len(outcome.survived)):
            results.keep(mutation)
            state = f"killed by {outcome.killed_by}" if outcome.killed_by else "survived"
            where = f"{mutation.file}:{mutation.line}"
            took = time.monotonic() - began
            print(f"{where}: [{mutation.what}] {mutation.text}: {state} ({took:.1f} s)", flush=True)
        return mutation, outcome.killed_by

    with ThreadPoolExecutor(jobs) as pool:
        yield from filter(None, pool.map(run_one, picked))


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
        # -O1: the switches leave little to optimise, and it compiles in half the time.
        flags = ("-O1", "-w", "-include", str(tree / "tests/protocol/native/mutant.h"))
        compiler = Compiler(folder, tree, flags)
        picked = chosen(mutations, arguments.only, (index, count))
        results = Results(arguments.results)
        quick = [case for case in passing_cases() if is_quick(case)]
        killer = Killer(checks_of(quick, compiler, folder))
        seen = dict(run_round(picked, killer, results, end, arguments.jobs))
        due = without_proven(picked, {} if arguments.doubt else allowed)
        for _, mutation in due:
            seen.pop(mutation, None)
        slow = [case for case in passing_cases() if not is_quick(case)]
        killer = Killer(checks_of(slow, compiler, folder))
        seen.update(run_round(due, killer, results, end, arguments.jobs))

    found = findings(seen, mutations, allowed)
    for text in found:
        print(f"FINDING: {text}")
    sections = [allowed.get(mutation.key) for mutation, by in seen.items() if by is None]
    print(
        f"{len(mutations)} mutations, {len(seen)} of them run: {len(seen) - len(sections)} killed, "
        f"{sections.count('equivalent')} proven equivalent, {sections.count('open')} not yet killed"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
