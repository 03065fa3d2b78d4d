# SPDX-License-Identifier: Apache-2.0
"""Explores the models of this folder with spin: every interleaving, and every planted bug is found.

Decides how many ranks and calls are explored. A model's own source explains it.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import mutations, need, run

HERE = Path(__file__).parent
LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One exploration. `mutation`: the switch of a planted bug, which must be found."""

    model: str
    settings: tuple[str, ...] = ()
    mutation: str = ""


def signalling(ranks: int, calls: int, verbs: str, *more: str, mutation: str = "") -> Case:
    chosen = sum(1 << KINDS.index(verb) for verb in verbs.split())
    settings = (f"RANKS={ranks}", f"CALLS={calls}", f"VERBS={chosen}", *more)
    return Case("signalling", settings, mutation)


def with_bugs(model: str, mutations: str, *settings: str) -> list[Case]:
    """Return a model as it is, and with each of its bugs."""
    return [Case(model, settings, mutation) for mutation in ("", *mutations.split())]


# In the order of signalling.pml's bits.
KINDS = (
    "barrier",
    "inline_reduce",
    "one_shot",
    "two_shot",
    "symmetric_gather",
    "inline_broadcast",
    "staged_broadcast",
    "symmetric_broadcast",
)
ALL = " ".join(KINDS)
FEW_SLOTS = ("DEPTH=3", "SLOTS=4", "FEW=2")  # of which a two_shot takes fewer than other calls
SLEEPING_BUGS = "NO_SECOND_LOOK NO_BARRIER WAKE_BEFORE_CLEAR LATE_LOOK_AT_WAKE UNCOMPARED_SLEEP"

CASES = [
    # Two ranks make every sequence of three calls, and of four of some kinds.
    signalling(2, 3, ALL),
    signalling(2, 4, "barrier one_shot inline_broadcast staged_broadcast"),
    # Three ranks.
    signalling(3, 2, ALL),
    signalling(3, 4, "barrier inline_broadcast"),
    signalling(3, 4, "one_shot staged_broadcast"),
    signalling(3, 3, "two_shot symmetric_broadcast"),
    signalling(3, 3, "barrier symmetric_gather staged_broadcast"),
    signalling(2, 4, "one_shot two_shot staged_broadcast", *FEW_SLOTS),
    signalling(3, 3, "two_shot staged_broadcast", *FEW_SLOTS),
    # Four ranks; with one line each, the second call uses it again.
    signalling(4, 2, "inline_reduce inline_broadcast", "DEPTH=1"),
    signalling(4, 3, "barrier symmetric_gather", "DEPTH=1"),
    # One rank stops for ever, anywhere.
    signalling(2, 2, ALL, "STOPS"),
    signalling(3, 2, "inline_reduce inline_broadcast", "STOPS"),
    # Bugs.
    signalling(2, 3, "barrier", mutation="SINGLE_LINE"),
    signalling(2, 3, "one_shot", mutation="SINGLE_SLOT"),
    signalling(2, 2, "two_shot", mutation="EQUALITY_WAIT"),
    signalling(2, 3, "one_shot inline_broadcast", mutation="UNCHECKED_DONE"),
    signalling(2, 3, "two_shot staged_broadcast", mutation="UNCHECKED_DONE"),
    signalling(2, 3, "two_shot staged_broadcast", *FEW_SLOTS, mutation="ALL_SLOTS_CLAIMED"),
    signalling(2, 3, "one_shot staged_broadcast", mutation="EARLY_CONSUME"),
    signalling(2, 3, "symmetric_broadcast", mutation="NO_ACKNOWLEDGEMENT"),
    signalling(2, 3, "inline_reduce", mutation="EARLY_ARRIVE"),
    signalling(2, 4, "inline_broadcast", mutation="NO_DONE"),
    *with_bugs("sleeping", SLEEPING_BUGS),
    *with_bugs("verdict", "NUMBER_BEFORE_TEXT NO_ARBITER OVERWRITING", "RANKS=3"),
    *with_bugs("survivors", "SURVIVORS_UNCOMPARED SURVIVORS_UNHEARD HELD_BEFORE_TAKEN", "RANKS=3"),
]


def explore(case: Case, folder: Path) -> str:
    """Return the output of spin's verifier."""
    switches = [f"-D{name}" for name in (*case.settings, case.mutation) if name]
    shutil.copy(HERE / f"{case.model}.pml", folder)
    # A bug is found sooner than a better program is compiled. The compiler takes 2.5 s longer with
    # -O2 than with -O1, and no exploration gets a second quicker.
    level = "-O0" if case.mutation else "-O1"
    compiler = ["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2048"]
    for command in (
        ["spin", "-a", *switches, f"{case.model}.pml"],
        [*compiler, "-o", "pan", "pan.c"],
    ):
        done = run(["env", "-C", str(folder), *command], LIMIT_S)
        assert done.returncode == 0, done.stdout
    return run(["env", "-C", str(folder), "./pan", "-m100000", "-n"], LIMIT_S).stdout


@pytest.mark.proof
@pytest.mark.native
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join((case.model, *case.settings, case.mutation)),
)
def test_model(case: Case, tmp_path: Path) -> None:
    need("spin", "gcc")
    said = explore(case, tmp_path)
    found = re.search(r"errors: (\d+)", said)
    assert found, said
    if case.mutation:
        assert int(found[1]) > 0, f"the planted bug went unseen:\n{said}"
        assert re.search("assertion violated|invalid end state", said), said
    else:
        assert int(found[1]) == 0, said
        # Cut short by the limit of depth or of memory, it would have proven nothing.
        assert not re.search("max search depth too small|out of memory|not completed", said), said


def test_the_table_of_mutations_is_true() -> None:
    caught = {(case.mutation, "model") for case in CASES if case.mutation}
    assert caught == {row for row in mutations() if row[1] == "model"}
