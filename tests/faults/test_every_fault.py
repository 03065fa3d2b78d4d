# SPDX-License-Identifier: Apache-2.0
"""Every fault of the catalogue at every place: each call that waits ends in the error it names.

At once, or at the limit where the fault can't be told from being slow. Then the ranks that are
left make a group. The catalogue is support/faults.py. Below: what looks like a fault and is none.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.backends import IS_COMPILED
from tests.support.calls import Call
from tests.support.fault_places import PLACES, Story, check_fault, run_fault, waits_at
from tests.support.faults import FAULTS, make_wait, raise_out_of_time
from tests.support.harness import LATE_S, OVER, Attempt, Outcome, Pools, Rank, attempt
from tests.support.perform import make, make_plain

MARKS: dict[str, Any] = {
    "one-node-two-odd": pytest.mark.long,
    "nodes-aabb": pytest.mark.long,
    "nodes-aabb-leader": pytest.mark.slow,
    "nodes-aab-whole": pytest.mark.long,
    "torch-compiled": IS_COMPILED,
}
AT_EVERY_PLACE = pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=MARKS.get(place, ()))
        for place in ("one-node", "nodes-aabb", "torch-python", "torch-compiled")
    ],
)


@pytest.fixture(scope="module")
def pool_at() -> Iterator[Pools]:
    """Ranks for this file alone, by place: they keep the groups that broke."""
    with closing(Pools(lambda place: PLACES[place].start())) as result:
        yield result


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(place, name, marks=MARKS.get(place, ()))
        for place, here in PLACES.items()
        for name in here.faults
    ],
)
def test_every_call_that_waits(pool_at: Pools, place: str, name: str) -> None:
    pool = pool_at(place)
    outcomes = run_fault(pool, PLACES[place], name)
    if FAULTS[name].is_deadly:
        pool.close()
    check_fault(PLACES[place], name, outcomes)


def leave_after_each(rank: Rank, waits: list[str], odd: int, rounds: int) -> list[str]:
    """Close a group right after its only call: some still copy what others leave behind."""
    errors = []
    for wait in waits * rounds:
        group = rank.comm.new_group()
        one = attempt(make_wait, group, wait, odd)
        group.close()
        errors += [f"{wait}: {one.text}"] if one.kind else []
    return errors


@pytest.mark.long
@AT_EVERY_PLACE
def test_who_left_after_its_part_is_no_loss(pool_at: Pools, place: str) -> None:
    here = PLACES[place]
    waits = list(waits_at(here.site))
    rounds = 2 if here.site.nodes else 10
    site = here.site.on(pool_at(place))
    found = site.run(leave_after_each, waits, here.odd[0], rounds)
    assert found == [[]] * here.site.world


def hear_a_signal_in_a_wait(rank: Rank, odd: int) -> list[tuple[Attempt, float]]:
    """An odd rank hears a signal while it waits for a work; the call goes on."""
    signal.signal(signal.SIGUSR2, raise_out_of_time)
    found = []
    for numel in (3, 50_000):
        for number in (signal.SIGINT, signal.SIGUSR2):
            group, call = rank.comm.new_group(), Call("all_reduce", "float32", numel)
            if number == signal.SIGUSR2:  # then the plan is known
                make_plain(group, call)
            event = f"{number} was heard with {numel} elements"
            if rank.rank != odd:
                rank.wait_for(event)
            tensor = torch.ones(numel)
            work = make(group, call, tensor, tensor, True)
            one = Attempt("", "", 0)
            if rank.rank == odd:
                timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
                # Both in one attempt: the signal may come before this rank waits.
                one = attempt(lambda: (timer.start(), work.wait()))  # noqa: B023
                rank.tell(event)
            work.wait()
            make(group, call, tensor, tensor)
            found.append((one, tensor[0].item()))
            group.close()
    return found


@AT_EVERY_PLACE
def test_a_signal_ends_the_wait_for_a_work_and_not_the_call(pool_at: Pools, place: str) -> None:
    here = PLACES[place]
    rows = here.site.on(pool_at(place)).run(hear_a_signal_in_a_wait, here.odd[0])
    for rank, row in enumerate(rows):
        assert {total for _, total in row} == {float(here.site.world**2)}
        kinds = ["KeyboardInterrupt", "OutOfTime"] * 2 if rank == here.odd[0] else [""] * 4
        assert [one.kind for one, _ in row] == kinds, row
        assert max(one.seconds for one, _ in row) < LATE_S, row


def test_a_fault_that_is_told_wrongly_is_seen() -> None:
    """Negative control of the check: silence, another error, a late one, another rank, no words."""
    place = PLACES["one-node"]
    told = Attempt("PeerLostError", "rank 1 is gone" + OVER, 0.1, (1,))
    rows = {wait: [told, told] for wait in place.waits(FAULTS["killed"])}

    def judge(one: Attempt) -> None:
        stories = [
            Story(rows, place.survivors([0, 2], 0)),
            Story({**rows, "barrier": [one, one]}, place.survivors([0, 2], 1)),
        ]
        outcomes = [Outcome(0, stories[0]), Outcome(1, exit_code=-9), Outcome(2, stories[1])]
        check_fault(place, "killed", outcomes)

    judge(told)
    for wrong in (
        Attempt("", "", 0),
        replace(told, kind="CollectiveTimeout"),
        replace(told, seconds=30),
        replace(told, ranks=(0, 1)),
        replace(told, text="somebody is gone" + OVER),
        replace(told, text="rank 1 is gone: destroy"),
    ):
        with pytest.raises(AssertionError):
            judge(wrong)
