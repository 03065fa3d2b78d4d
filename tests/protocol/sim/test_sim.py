# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU kernels in the simulator: correct ones, and ones with a planted bug.

Decides which programs are built and which run must pass or be caught. A program's own source says
what it checks.
"""

import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.proofs import KERNELS
from tests.support.programs import (
    UNDER_THREAD_SANITIZER,
    assert_caught,
    build,
    compile_all,
    need,
    run,
)

ROOT = Path(__file__).parents[3]
COMPILE_LIMIT_S = 300
RUN_LIMIT_S = 480

# Kernels read the same bytes as packs and as elements, which nvcc allows.
FLAGS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", *(f"-I{ROOT / name}" for name in ("csrc", "kernels", "bench/gpu"))),
)
SCHEDULER, SIMULATOR = "csrc/sim/scheduler.cpp", "tests/protocol/sim/simulate.cpp"
INPUTS = (*KERNELS, "tests/protocol/native/*.h", "bench/gpu/*.cuh")  # and this folder
RACE = "ThreadSanitizer: data race"
WRONG_OR_STUCK = "WRONG|DEADLOCK"
# A wait: the rank, the peer, and the word.
STUCK = (
    r"DEADLOCK[\s\S]*rank \d+, block \d+, thread \d+ waits for rank \d+ \(.+\): "
    r"expected (0x)?[0-9a-f]+, seen (0x)?[0-9a-f]+"
)


@dataclass(frozen=True)
class Case:
    """One run of `simulate`. `caught_by`: how the planted bug must show; "" must pass."""

    variant: str
    schedule: str
    num_seeds: int
    caught_by: str = ""
    tsan: bool = False
    only: str = ""  # "algorithm verb": nothing else


CASES = [
    Case("shapes", "uniform", 1),
    Case("misplaced", "uniform", 2),
    Case("unchecked_places", "uniform", 2, WRONG_OR_STUCK),
    Case("uncompared_places", "uniform", 8, WRONG_OR_STUCK, only="multimem all_reduce"),
    Case("misplaced_parts", "uniform", 8, WRONG_OR_STUCK, only="multimem reduce_scatter"),
    Case("uncompared_places", "uniform", 8, WRONG_OR_STUCK, only="multimem all_gather"),
    Case("uncompared_places", "uniform", 8, WRONG_OR_STUCK, only="multimem broadcast"),
    Case("swapped_parts", "uniform", 8, WRONG_OR_STUCK, only="direct all_to_all"),
    Case("swapped_parts", "uniform", 8, WRONG_OR_STUCK, only="one_shot reduce_scatter"),
    Case("swapped_parts", "uniform", 8, WRONG_OR_STUCK, only="ring reduce_scatter"),
    Case("overlaps", "uniform", 60),
    Case("ignored_turns", "uniform", 60, WRONG_OR_STUCK),
    Case("old_state", "uniform", 60, WRONG_OR_STUCK),
    Case("probes", "uniform", 40),
    Case("switch_without_halves", "uniform", 40, WRONG_OR_STUCK, only="probes"),
    Case("switch_without_signs", "uniform", 40, WRONG_OR_STUCK, only="probes"),
    Case("switch_without_longs", "uniform", 40, WRONG_OR_STUCK, only="probes"),
    Case("switch_without_words", "uniform", 40, WRONG_OR_STUCK, only="probes"),
    Case("switch_without_signs", "uniform", 5, WRONG_OR_STUCK, only="multimem all_reduce"),
    Case("racks", "uniform", 2),
    Case("racks", "starving", 1),
    Case("racks_absent", "uniform", 1),
    Case("forgotten_ranks", "uniform", 1, WRONG_OR_STUCK, only="racks"),
    Case("gauges", "uniform", 40),
    Case("gauges_astray", "uniform", 5, WRONG_OR_STUCK),
    Case("partials", "uniform", 400),
    Case("partials_in_wrong_order", "uniform", 5, WRONG_OR_STUCK),
    Case("published", "uniform", 40),
    Case("published", "uniform", 10, tsan=True),
    Case("published_unmet", "uniform", 40, WRONG_OR_STUCK),
    Case("ll", "uniform", 6),
    Case("ll", "starving", 3),
    Case("ll_crowded", "uniform", 1, WRONG_OR_STUCK),
    Case("loads", "uniform", 1),
    Case("loads_by_packs", "uniform", 1, "WRONG: a planted copy"),
    Case("loads_by_parts", "uniform", 1, "WRONG: a planted copy"),
    Case("correct", "uniform", 60),
    Case("correct", "starving", 60),
    Case("correct", "uniform", 30, only="multimem all_reduce"),
    Case("correct", "starving", 30, only="multimem reduce_scatter"),
    Case("correct", "starving", 30, only="multimem all_gather"),
    Case("correct", "starving", 30, only="multimem broadcast"),
    Case("correct", "uniform", 5, tsan=True, only="multimem broadcast"),
    # Seed 6 starts so many threads that ThreadSanitizer's records of them take 7 GB.
    Case("correct", "uniform", 5, tsan=True, only="multimem reduce_scatter"),
    Case("correct", "uniform", 8, tsan=True),
    Case("correct", "starving", 8, tsan=True),
    Case("gauges", "uniform", 10, tsan=True),
    # A rank that never arrives; ranks that call different things (tests/protocol/sim/failures.h).
    Case("absent", "uniform", 6),
    Case("unreported", "uniform", 1, WRONG_OR_STUCK),
    Case("aborted", "uniform", 6),
    Case("aborted", "uniform", 2, tsan=True),
    Case("unheard_aborts", "uniform", 1, STUCK),
    Case("mismatch", "uniform", 6),
    Case("overlaps", "uniform", 10, tsan=True),
    # Negative controls. The first two compute the right numbers all the same: x86 and one thread.
    Case("relaxed_arrive", "uniform", 12, RACE, tsan=True),
    Case("relaxed_wait", "uniform", 12, RACE, tsan=True),
    Case("unawaited_stream", "uniform", 10, WRONG_OR_STUCK),
    Case("late_await", "uniform", 20, WRONG_OR_STUCK, only="one_shot all_reduce"),
    Case("late_await", "uniform", 12, RACE, tsan=True, only="direct all_gather"),
    Case("early_start", "starving", 30, STUCK),
    Case("no_sync_before_arrive", "uniform", 60, WRONG_OR_STUCK),
    Case("no_sync_before_arrive", "uniform", 12, RACE, tsan=True),
    Case("no_sync_after_wait", "uniform", 60, WRONG_OR_STUCK),
    Case("single_buffer", "starving", 60, WRONG_OR_STUCK),
    Case("unchecked_previous", "starving", 100, WRONG_OR_STUCK),
    Case("equality_wait", "starving", 60, STUCK),
    Case("unacknowledged", "starving", 60, WRONG_OR_STUCK),
    Case("unacknowledged", "starving", 60, WRONG_OR_STUCK, only="ring reduce_scatter"),
    Case("unacknowledged", "uniform", 12, RACE, tsan=True, only="ring reduce_scatter"),
    Case("no_exit", "starving", 60, WRONG_OR_STUCK),
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """`programs(tsan)` is the simulator with the kernels, with or without ThreadSanitizer."""
    need("g++")

    @functools.cache
    def program(tsan: bool) -> Path:
        folder = tmp_path_factory.mktemp("sim")
        # The scheduler must not order the fibers: it is never instrumented.
        scheduler = ["g++", *FLAGS, *["-DFASTCOLL_SIM_TSAN"] * tsan]
        objects = compile_all(scheduler, [ROOT / SCHEDULER], folder, COMPILE_LIMIT_S)
        command = ["g++", *FLAGS, *["-g1", "-fsanitize=thread"] * tsan]
        build(command, [ROOT / SIMULATOR], folder / "simulate", COMPILE_LIMIT_S, objects)
        return folder / "simulate"

    return program


@pytest.mark.proof(*INPUTS)
@pytest.mark.native
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: (
        "-".join(filter(None, (case.variant, str(case.num_seeds), case.schedule, case.only)))
        + ("-tsan" if case.tsan else "")
    ),
)
def test_simulated_kernels(case: Case, programs: Callable[[bool], Path]) -> None:
    command = [str(programs(case.tsan)), case.variant, case.schedule, "1"]
    command += [str(case.num_seeds), case.only]
    done = run([*(UNDER_THREAD_SANITIZER if case.tsan else ()), *command], RUN_LIMIT_S)
    assert_caught(done, case.caught_by)


@pytest.mark.native
def test_the_proofs_name_all_that_is_compiled() -> None:
    need("g++")
    done = run(["g++", *FLAGS, "-MM", SCHEDULER, SIMULATOR], COMPILE_LIMIT_S, cwd=ROOT)
    sources = {
        (ROOT / name).resolve().relative_to(ROOT).as_posix()
        for name in shlex.split(done.stdout.replace("\\\n", ""))  # a folder may have a space
        if name.endswith((".cpp", ".h", ".cuh", ".inc"))
    }
    assert "csrc/dtypes.h" in sources
    assert "kernels/cuda/ring.cuh" in sources
    folder = "tests/protocol/sim"
    named = {
        path.relative_to(ROOT).as_posix()
        for pattern in (*INPUTS, folder)
        for place in ROOT.glob(pattern)
        for path in (place, *place.rglob("*"))
    }
    assert sources <= named
