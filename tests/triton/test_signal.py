# SPDX-License-Identifier: Apache-2.0
"""Every wait ends, and memory is reused only when everybody is through with it.

Decides which bugs are planted to show that these tests see them. The interpreter can see wrong
values and hangs; memory order is looked after in test_compile.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.triton import mutants, ranks
from tests.triton.ranks import Case, World
from tests.triton.test_collectives import WAYS, problems

pytestmark = [pytest.mark.proof("kernels"), pytest.mark.long]

# Delays that make a rare order of events the usual one. Rank 0 dawdles until a peer is ahead of it;
# where the peer may not run ahead, it dawdles for a while.
_DAWDLE = """
    late = 0
    while (own_rank(group) == 0) & (late < 200) & (load_acquire(own + {word}) - {reached} < 0):
        late += 1
"""
_MEET_WORD = "MEET + tl.program_id(0) * MAX_WORLD + 1"
_BEFORE_WAITS = "    alive = 1\n"
_BEHIND_WAITS = "    tl.debug_barrier()  # so that no thread reads ahead of the acquire\n"
_OWN = "    own = own_words(group)\n"
_AHEAD_IN_MEET = _OWN + _DAWDLE.format(word=_MEET_WORD, reached="(epoch + 1)")
DAWDLE_BEFORE_WAITS: mutants.Bug = (("signal.py", _BEFORE_WAITS, _AHEAD_IN_MEET + _BEFORE_WAITS),)
DAWDLE_BEHIND_WAITS: mutants.Bug = (("signal.py", _BEHIND_WAITS, _AHEAD_IN_MEET + _BEHIND_WAITS),)
EQUALITY_WAIT: mutants.Bug = (("signal.py", "(seen - target < 0)", "(seen - target != 0)"),)
PLAIN_COMPARE: mutants.Bug = (("signal.py", "(seen - target < 0)", "(seen < target)"),)
SINGLE_BUFFER: mutants.Bug = (("one_shot.py", "(epoch >> 1) & 1)", "0)"),)
UNSEEN_POISON: mutants.Bug = (
    ("signal.py", "if load_acquire(own_words(group) + POISON) != 0:", "if polls != 0:"),
)


def calls(algorithm: str, count: int) -> list[Case]:
    return [
        Case(algorithm, "all_reduce", "float32", 100, "SUM", 64, 1, turn) for turn in range(count)
    ]


@pytest.fixture
def run(interpreters: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`run(world_size, cases, bugs, ...)` makes calls with bugs planted, in memory of their own."""

    def start(
        world_size: int, cases: Sequence[Case], bugs: Sequence[mutants.Bug] = (), **options: Any
    ) -> Any:
        number = len(list(tmp_path.iterdir()))
        folder = tmp_path / str(number)
        folder.mkdir()
        package = mutants.plant(folder, f"{tmp_path.name}_{number}", *bugs)
        world = World(str(folder), world_size, package, **options)
        return interpreters(world_size)(ranks.perform, world, cases)

    return start


@pytest.mark.parametrize("delay", [DAWDLE_BEFORE_WAITS, DAWDLE_BEHIND_WAITS])
def test_a_fast_peer_may_be_ahead(run: Callable[..., Any], delay: mutants.Bug) -> None:
    cases = [*calls("one_shot", 2), *calls("two_shot", 2), *calls("one_shot", 2)]
    assert problems(cases, run(2, cases, [delay])) == []


@pytest.mark.slow
def test_an_equality_wait_is_caught(run: Callable[..., Any]) -> None:
    bugs = [DAWDLE_BEFORE_WAITS, EQUALITY_WAIT]
    verdict = run(2, calls("two_shot", 2), bugs, limits_s=(2.0, 60.0))[0].verdict
    assert verdict is not None
    assert verdict[:2] == (0, 1)
    assert verdict[3] < verdict[4], "the peer is ahead, and still waited for"


@pytest.mark.parametrize(
    "algorithm", ["one_shot", pytest.param("two_shot", marks=pytest.mark.slow)]
)
def test_words_wrap(run: Callable[..., Any], algorithm: str) -> None:
    cases = calls(algorithm, 4)
    assert problems(cases, run(2, cases, words_before=2**31 - 2)) == []


@pytest.mark.parametrize("bugs", [(), (PLAIN_COMPARE,)], ids=["right", "plain"])
def test_a_word_before_the_wrap_is_behind(
    run: Callable[..., Any], bugs: tuple[mutants.Bug, ...]
) -> None:
    options = {"limits_s": (1.0, 60.0), "absent": (1,), "words_before": 2**31 - 1}
    verdict = run(2, calls("one_shot", 1), bugs, **options)[0].verdict
    assert (verdict is None) == bool(bugs), "a wait for a rank that never comes"


def test_a_single_buffer_is_caught(run: Callable[..., Any]) -> None:
    cases = calls("one_shot", 4)
    reports = run(2, cases, [DAWDLE_BEHIND_WAITS, SINGLE_BUFFER])
    assert "wrong" in "".join(problems(cases, reports))


def mixed(algorithm: str, verb: str, count: int) -> list[Case]:
    dtypes = ("float32", "int32", "float8_e4m3fn", "bfloat16", "float64")
    return [
        Case(algorithm, verb, dtypes[turn % 5], 400, "SUM", 64, 2, turn) for turn in range(count)
    ]


@pytest.mark.parametrize(
    ("algorithm", "verb"),
    [WAYS[0], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])],
)
def test_a_rank_that_never_arrives(run: Callable[..., Any], algorithm: str, verb: str) -> None:
    """Rank 3 waits for 2 in vain; the others learn of it, long before their own limit."""
    cases = mixed(algorithm, verb, 8)
    reports = run(4, cases, limits_s=(120.0, 120.0, 120.0, 1.0), absent=(2,))
    for rank in (0, 1, 3):
        verdict = reports[rank].verdict
        assert verdict is not None
        assert verdict[:3] == (3, 2, 0), "rank 3 misses rank 2 on channel 0"
        assert (verdict[3] > 0) == (rank == 3), "who waited in vain itself"
        for case, got in zip(cases, reports[rank].outputs, strict=True):
            if case.dtype in oracle.FLOATS:
                assert (got == oracle.FLOATS[case.dtype].canonical_nan).all(), case


@pytest.mark.slow
def test_poison_that_goes_unseen_is_caught(run: Callable[..., Any]) -> None:
    cases = mixed("one_shot", "all_reduce", 1)
    reports = run(4, cases, [UNSEEN_POISON], limits_s=(4.0, 4.0, 4.0, 1.0), absent=(2,))
    assert reports[0].verdict[3] > 0, "rank 0 has waited to its own limit"
