# SPDX-License-Identifier: Apache-2.0
"""The checker: the faults that it must catch; it neither misses nor invents any."""

from pathlib import Path

import pytest
from hypothesis import given as given_drawn
from hypothesis import settings
from hypothesis import strategies as st

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.checker import ScheduleError, check
from fastcoll_model.schedule import ROOTED, VERBS, Copy, Reduce, Schedule, Signal, Span, Step, Wait
from tests.model.mutations import Interleavings, mutants

pytestmark = pytest.mark.proof("python/fastcoll_model")

# Mistakes that change nothing: one copies the same value from elsewhere, another swaps two steps
# that have nothing to do with each other.
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
SLOWEST = ("all_reduce", "bidirectional_ring")
ALL = [(verb, algorithm) for verb in VERBS for algorithm in algorithms_of(verb)]
SMALL = [pair for pair in ALL if pair != SLOWEST]


def scratch(rank: int, start: int = 0, count: int = 1) -> Span:
    return Span(rank, "scratch", start, count)


def given(rank: int, start: int = 0, count: int = 1) -> Span:
    return Span(rank, "input", start, count)


def result(rank: int, start: int = 0, count: int = 1) -> Span:
    return Span(rank, "output", start, count)


def two_ranks(*steps: list[Step], verb: str = "all_reduce", num_blocks: int = 1) -> Schedule:
    """Return a schedule with the steps of rank 0 and of rank 1."""
    return Schedule(verb, "by hand", len(steps), num_blocks, lambda rank, _: iter(steps[rank]))


def exchange(me: int) -> list[Step]:
    """Return a right schedule: an all_reduce of one block between two ranks."""
    peer = 1 - me
    return [
        Copy(scratch(me), given(me)),
        Signal(peer),
        Wait(peer),
        Reduce(result(me), (scratch(0), scratch(1))),
    ]


def test_the_right_one_passes() -> None:
    proof = check(two_ranks(exchange(0), exchange(1)))
    assert proof.orders == {0: "0 + 1"}
    assert proof.rank_order
    assert proof.same_on_all_ranks
    assert (proof.num_steps, proof.num_signals, proof.blocks_in) == (8, 2, [1, 1])


def without(steps: list[Step], i: int) -> list[Step]:
    return steps[:i] + steps[i + 1 :]


def test_a_dropped_wait() -> None:
    steps = without(exchange(1), 2)
    with pytest.raises(
        ScheduleError, match=r"rank 1 step 2 .*(before it is written|not be written)"
    ):
        check(two_ranks(exchange(0), steps))


def test_a_dropped_signal_is_a_deadlock_that_names_who_waits() -> None:
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 step 2 \(wait for rank 1\).*rank 1 has ended"
    ):
        check(two_ranks(exchange(0), without(exchange(1), 1)))


def test_a_cycle_of_waits() -> None:
    steps = [[Wait(1 - me), *without(exchange(me), 2)] for me in (0, 1)]
    text = r"deadlock: rank 0 step 0 \(wait for rank 1\), rank 1 step 0 \(wait for rank 0\), and so"
    with pytest.raises(ScheduleError, match=text):
        check(two_ranks(*steps))


def test_a_signal_nobody_waits_for() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 step 4 \(signal rank 1\): nobody waits"):
        check(two_ranks([*exchange(0), Signal(1)], exchange(1)))


def test_a_wrong_order_is_not_the_same_bits() -> None:
    steps = [*exchange(1)[:3], Reduce(result(1), (scratch(1), scratch(0)))]
    proof = check(two_ranks(exchange(0), steps))
    assert not proof.rank_order
    assert not proof.same_on_all_ranks


def test_a_contribution_counted_twice() -> None:
    steps = [*exchange(1)[:3], Reduce(result(1), (scratch(0), scratch(1), scratch(1)))]
    with pytest.raises(
        ScheduleError,
        match=r"rank 1 ends .*counts twice block 0 of rank 1, written by rank 1 step 3",
    ):
        check(two_ranks(exchange(0), steps))


def test_a_contribution_missing() -> None:
    steps = [*exchange(1)[:3], Copy(result(1), scratch(0))]
    with pytest.raises(ScheduleError, match=r"rank 1 ends .*lacks block 0 of rank 1"):
        check(two_ranks(exchange(0), steps))


def pipeline(*, credit: bool) -> Schedule:
    """Return a schedule in which rank 0 gives two blocks through one slot of scratch."""
    back = [Wait(1)] if credit else []
    giver = [
        Copy(scratch(0), given(0, 0)),
        Signal(1),
        *back,
        Copy(scratch(0), given(0, 1)),
        Signal(1),
    ]
    giver.append(Copy(result(0, 0, 2), given(0, 0, 2)))
    taker: list[Step] = []
    for block in (0, 1):
        taker += [Wait(0), Copy(result(1, block), scratch(0))]
        taker += [Signal(0)] if credit and block == 0 else []
    return two_ranks(giver, taker, verb="broadcast", num_blocks=2)


def test_a_buffer_used_again_too_early() -> None:
    check(pipeline(credit=True))
    with pytest.raises(
        ScheduleError,
        match=r"scratch\[0\].*(overwrites what may still be read by|not be written yet by) rank",
    ):
        check(pipeline(credit=False))


def test_a_peers_input_is_not_there_before_it_comes_nor_after_it_returns() -> None:
    take = Reduce(result(0), (given(0), given(1)))
    mine = Reduce(result(1), (scratch(0), given(1)))
    early = [Copy(scratch(0), given(0)), Signal(1), take]
    with pytest.raises(ScheduleError, match="rank 1's caller"):
        check(two_ranks(early, [Wait(0), mine]))
    late = [Copy(scratch(0), given(0)), Signal(1), Wait(1), take]
    with pytest.raises(ScheduleError, match=r"rank 0 step 3 .*rank 1 may have returned"):
        check(two_ranks(late, [Signal(0), Wait(0), mine]))
    check(two_ranks([*late, Signal(1)], [Signal(0), Wait(0), mine, Wait(0)]))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Copy(given(0), scratch(0)), "rank 0 step 1 .*writes to an input"),
        (Copy(result(0, 7), scratch(0)), r"rank 0's output has no block 7"),
        (Copy(scratch(0), given(0, 3)), r"rank 0's input has no block 3"),
        (Copy(scratch(5), scratch(0)), "there is no rank 5"),
        (Signal(9), "rank 0 step 1 .*no such rank"),
        (Wait(0, 3), "no such rank or channel"),
        (Copy(scratch(0, 0, 2), scratch(0)), "differ in length"),
        (Copy(scratch(0), scratch(-1)), "only a reduction"),
        (Copy(scratch(0), scratch(0, 4)), "before it is written"),
    ],
)
def test_steps_that_make_no_sense(step: Step, text: str) -> None:
    first, *others = exchange(0)
    with pytest.raises(ScheduleError, match=text):
        check(two_ranks([first, step, *others], exchange(1)))


def rejection(schedule: Schedule) -> str | None:
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def judge(name: str, mutant: Schedule) -> str:
    """Hold the checker's verdict on a mutant against all its interleavings, and return it."""
    verdict, fault = rejection(mutant), Interleavings(mutant).fault
    if verdict is None:
        assert fault is None, f"missed: {name}: {fault}"
        return "as good"
    if fault is None:
        # Two writes of equal values, or a read beside one: a race, if one that does no harm.
        assert verdict.endswith("no signal orders the two"), f"invented: {name}: {verdict}"
        return "harmless race"
    assert "rank" in verdict
    return "rejected"


def judged(schedule: Schedule) -> dict[str, str]:
    """Judge every mutant of a schedule."""
    made = list(mutants(schedule))
    found = {name: judge(name, mutant) for name, mutant in made}
    assert len(found) == len(made)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("verb", "algorithm"), SMALL)
def test_every_mutant_of_two_ranks_is_judged_right(verb: str, algorithm: str) -> None:
    """Plant a mistake at every step: rejected, or listed and right in all interleavings."""
    found = judged(build(verb, algorithm, 2))
    passed = {f"{verb} by {algorithm}: {k}: {v}" for k, v in found.items() if v != "rejected"}
    start = f"{verb} by {algorithm}: "
    listed = {line for line in EQUIVALENT.read_text().splitlines() if line.startswith(start)}
    assert passed == listed
    assert len(found) > 4 * len(passed)


@settings(max_examples=60, deadline=None)
@given_drawn(data=st.data())
def test_schedules_with_several_mistakes_are_judged_right(data: st.DataObject) -> None:
    """Judge schedules of two ranks with two or three mistakes, against all interleavings."""
    schedule = build(*data.draw(st.sampled_from(SMALL)), 2)
    for _ in range(data.draw(st.integers(2, 3))):
        names = list(mutants(schedule))
        if not names:
            break
        _, schedule = data.draw(st.sampled_from(names))
    judge("several", schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "algorithm"), ALL)
def test_every_mutant_of_three_ranks_is_judged_right(verb: str, algorithm: str) -> None:
    schedule = build(verb, algorithm, 3, root=1 if verb in ROOTED else 0)
    if schedule.num_channels * schedule.world_size > 4:
        schedule = build(verb, algorithm, 2)  # six channels and more: too many orders
    assert "rejected" in judged(schedule).values()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["one_shot", "tree", "recursive_doubling"])
def test_mutants_of_four_ranks_are_judged_right(algorithm: str) -> None:
    assert "rejected" in judged(build("all_reduce", algorithm, 4)).values()
