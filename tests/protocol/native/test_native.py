# SPDX-License-Identifier: Apache-2.0
"""Compiles the stand-alone C++ programs of this folder and runs them under sanitizers and qemu.

Decides how each program is compiled and which run must pass or be caught. A program's own source
says what it checks. Exit code 0 means "all well"; any other comes with a reason on its output.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.support.programs import UNDER_THREAD_SANITIZER, assert_caught, mutations, need, run

ROOT = Path(__file__).parents[3]
COMPILE_LIMIT_S = 300
RUN_LIMIT_S = 240

# The library for the ranks of lone_world.h, on this operating system or on that of lone_machine.h.
LONE = "tests/protocol/native/lone_world.cpp"
ON_SYSTEM = (LONE, "csrc/cpu/*.cpp")
ON_MACHINE = (LONE, "csrc/cpu/reduce*.cpp", "csrc/cpu/strided.cpp")
SYSTEM = ("csrc/cpu/wait.cpp", "csrc/cpu/process_memory.cpp")
LONE_ON_SYSTEM = ["timeouts", "verdicts", "transfers", "messages", "bays", "steps", "halves"]
LONE_ON_MACHINE = ["moves", "waits", "transfer_spins", "transfer_waits", "driving", "ends"]
# program -> the sources it links besides its own; a pattern that matches nothing is an error.
# The errors of the first ones show in a plain run, or under AddressSanitizer.
IN_TWO_BUILDS: dict[str, tuple[str, ...]] = {
    **{f"test_{name}": ON_SYSTEM for name in LONE_ON_SYSTEM},
    **{f"test_{name}": ON_MACHINE for name in LONE_ON_MACHINE},
    "test_copies": (),
    "test_parts": ("csrc/cpu/strided.cpp",),
    "test_text": ("csrc/cpu/wait.cpp",),
    "test_system": SYSTEM,
    "test_other_system": SYSTEM,
    "test_peer_process": ("csrc/group/peer_process.cpp", "csrc/cpu/process_memory.cpp"),
}
PROGRAMS = {
    **IN_TWO_BUILDS,
    "test_reduce": ("csrc/cpu/reduce*.cpp",),
    "test_rows": ("csrc/cpu/reduce*.cpp",),  # run by test_rows.py
    "test_wire": ("csrc/cpu/reduce*.cpp",),
    "test_protocol": ("csrc/cpu/*.cpp",),
    "test_p2p": SYSTEM,
    "test_failure": ("csrc/cpu/*.cpp",),
    "test_relacy": (
        "tests/protocol/native/relacy_machine.cpp",
        "csrc/cpu/reduce*.cpp",
        "csrc/cpu/strided.cpp",
    ),
}


@dataclass(frozen=True)
class Build:
    """How a program is compiled, the tools for that, and the command that runs the result."""

    flags: tuple[str, ...]
    compiler: str = "g++"
    runner: tuple[str, ...] = ()
    # Only for code that the machine of relacy_machine.h watches, not for the machine itself.
    watched: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    header: str = ""


AS_SHIPPED = "-DAS_SHIPPED"  # no bug of planted.h is caught by the build, so none is compiled
MOVES = ("memcpy", "memmove", "memset")  # which the compiler must not turn into plain accesses

# A report's lines need no more than -g1, and the compiler takes longer with -g.
# AddressSanitizer's checks at -Og are those at -O1, for half of the compiler's time.
# Not -Werror under sanitizers: with them the compiler warns of loops that it can't vectorise.
BUILDS = {
    "plain": Build(("-O3", "-Werror")),
    "thread": Build(("-O1", "-g1", "-fsanitize=thread"), runner=UNDER_THREAD_SANITIZER),
    "address": Build(
        (
            "-Og",
            "-g1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-D_GLIBCXX_ASSERTIONS",
            AS_SHIPPED,
        ),
    ),
    "relacy": Build(
        ("-O1", "-g1"),
        watched=("-fsanitize=thread", *(f"-fno-builtin-{name}" for name in MOVES)),
        link=("-Wl," + ",".join(f"--wrap={name}" for name in MOVES),),
        header="/usr/include/relacy/relacy.hpp",
    ),
    "aarch64": Build(
        ("-O3", "-Werror", "-static", AS_SHIPPED), "aarch64-linux-gnu-g++", ("qemu-aarch64",)
    ),
}

# The names in kernels/README.md of the builds that catch planted bugs.
CHECKERS = {
    "thread": "ThreadSanitizer",
    "plain": "stress",
    "address": "AddressSanitizer",
    "relacy": "relacy",
}


@dataclass(frozen=True)
class Case:
    """One run. `caught_by`: the output with which the planted bug must be caught; "" must pass."""

    program: str
    build: str
    args: tuple[str, ...] = ()
    caught_by: str = ""

    @property
    def variant(self) -> str:
        return self.args[1 if self.program == "test_relacy" else 0]


# Published with release, by their owner, and by a pair's sender and receiver.
PUBLISHED = ["arrive", "inlined", "staged", "reduced", "signals", "done"]
PAIRS = ["offer", "message", "sent", "received", "taken"]

# scenario of test_relacy -> the words whose orders it needs
WEAK_MEMORY = {
    "calls2": PUBLISHED,
    "calls3": (),
    "verdict": ("poison",),
    "status": ("sequence", "descriptor"),
    "waits": ("timed",),
    "sleep": (),
    "messages": ("offer", "message", "sent", "taken"),
    "chunks": ("received",),
    "either": (),
    "rest": (),
    "single_copy": ("sample", "single_copy"),
}

# Numbers of the first call. At the first the epoch wraps after 32 more. At the second all progress
# words have been idle for long: in 32 bits they seem ahead (128 steps a segment: Group::progress).
SHORT_OF_WRAP = "0xffffffe0"
LONG_IDLE = "0x81800000"

# test_protocol's arguments: variant, seeds, limit of a wait in seconds, number of the first call
CASES = [
    *(
        Case(program, build)
        for program in ("test_reduce", "test_wire")
        for build in ("plain", "address", "aarch64")
    ),
    Case("test_protocol", "plain", ("correct", "200")),
    Case("test_protocol", "plain", ("correct", "40", "60", SHORT_OF_WRAP)),
    Case("test_protocol", "plain", ("correct", "40", "60", LONG_IDLE)),
    Case("test_protocol", "thread", ("correct", "20")),
    Case("test_protocol", "address", ("correct", "20")),
    Case("test_protocol", "aarch64", ("correct", "10")),
    Case("test_p2p", "plain", ("correct", "200")),
    Case("test_p2p", "plain", ("correct", "40", "60", "0xfffffffd")),
    Case("test_p2p", "thread", ("correct", "20")),
    Case("test_p2p", "address", ("correct", "20")),
    Case("test_failure", "plain", ("correct",)),
    Case("test_failure", "address", ("correct",)),
    *(Case(program, build) for program in IN_TWO_BUILDS for build in ("plain", "address")),
    # Negative controls: a check that lets its planted bug pass is no check.
    *(
        Case("test_protocol", "thread", (variant,), "ThreadSanitizer: data race")
        for variant in (
            *(f"relaxed_release_of_{word}" for word in PUBLISHED),
            *(f"relaxed_acquire_of_{word}" for word in PUBLISHED),
            "relaxed_set_once",
        )
    ),
    # One seed in four breaks a group, and few of those show it: of 20 seeds none did at times.
    Case(
        "test_protocol",
        "thread",
        ("relaxed_acquire_of_poison", "100"),
        "ThreadSanitizer: data race",
    ),
    *(
        Case("test_p2p", "thread", (f"relaxed_{side}_of_{word}",), "ThreadSanitizer: data race")
        for side in ("release", "acquire")
        for word in PAIRS
    ),
    Case("test_p2p", "plain", ("unawaited_receiver", "200", "2"), "FAILED|WRONG"),
    # Few of the drawn transfers answer in a kept bay: 200 seeds missed the bug in 3 of 34 runs.
    Case("test_p2p", "plain", ("written_kept_bays", "4000", "2"), "FAILED|WRONG"),
    Case(
        "test_moves", "address", ("unchecked_places",), "AddressSanitizer|runtime error|Assertion"
    ),
    Case("test_failure", "plain", ("unchained_stamps",), "WRONG"),
    Case("test_failure", "plain", ("unwatched_copies",), "WRONG"),
    *(
        Case("test_protocol", "plain", (variant, "200", "2"), "FAILED|WRONG")
        for variant in (
            "overwriting_set_once",
            "equality_wait",
            "single_line",
            "single_slot",
            "unchecked_done",
            "unawaited_readers",
            "unclaimed_segments",
        )
    ),
    Case("test_protocol", "plain", ("narrow_wait", "200", "2", LONG_IDLE), "FAILED|WRONG"),
    *(Case("test_relacy", "relacy", (scenario, "correct")) for scenario in WEAK_MEMORY),
    *(
        Case("test_relacy", "relacy", (scenario, f"relaxed_{side}_of_{word}"), "RELACY")
        for scenario, words in WEAK_MEMORY.items()
        for word in words
        for side in ("release", "acquire")
    ),
    Case("test_relacy", "relacy", ("sleep", "no_membarrier"), "RELACY: DEADLOCK"),
    Case("test_relacy", "relacy", ("rest", "no_membarrier"), "RELACY: DEADLOCK"),
    Case("test_relacy", "relacy", ("rest", "no_look_before_sleep"), "RELACY: DEADLOCK"),
]


class Compiler:
    """Compiles each source of a tree and links each program once per build."""

    def __init__(self, folder: Path, root: Path = ROOT, flags: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.root = root
        self.flags = flags
        self.done: set[Path] = set()

    def program(self, name: str, build_name: str) -> Path:
        build = BUILDS[build_name]
        sources = [self.root / f"tests/protocol/native/{name}.cpp"]
        for pattern in PROGRAMS[name]:
            matches = sorted(self.root.glob(pattern))
            assert matches, f"no source matches {pattern}"
            sources += matches
        flags = ["-std=c++20", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra"]
        command = [build.compiler, *flags, *build.flags, *self.flags]
        folder = self.folder / build_name
        folder.mkdir(exist_ok=True)
        includes = [f"-I{self.root / 'csrc'}", f"-I{self.root / 'kernels'}"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(
                    self.make,
                    [*command, *self.watch(source, build), *includes, "-c", str(source)],
                    folder / f"{source.stem}.o",
                )
                for source in sources
            ]
            objects = [str(job.result()) for job in jobs]
        return self.make([*command, *objects, *build.link], folder / name)

    @staticmethod
    def watch(source: Path, build: Build) -> tuple[str, ...]:
        return () if source.stem == "relacy_machine" else build.watched

    def make(self, command: list[str], target: Path) -> Path:
        if target not in self.done:
            result = run([*command, "-o", str(target)], COMPILE_LIMIT_S)
            assert result.returncode == 0, result.stdout
            self.done.add(target)
        return target


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("native"))


@pytest.mark.proof(*CPP)
@pytest.mark.native
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join((case.program, case.build, *case.args)),
)
def test_native(case: Case, compiler: Compiler) -> None:
    build = BUILDS[case.build]
    need(build.compiler, *build.runner[:1], *filter(None, [build.header]))
    binary = compiler.program(case.program, case.build)
    done = run([*build.runner, str(binary), *case.args], RUN_LIMIT_S)
    assert_caught(done, case.caught_by)


def test_the_table_of_mutations_is_true() -> None:
    caught = {(case.variant, CHECKERS[case.build]) for case in CASES if case.caught_by}
    assert caught == {row for row in mutations() if row[1] in CHECKERS.values()}
