# SPDX-License-Identifier: Apache-2.0
"""The thread that polls MPI: as long as there are lanes, often after a start, never afterwards."""

import os
import threading
import time
from itertools import pairwise

import pytest

from fastcoll.nodes.carriers.mpi import MpiCarrier
from fastcoll.nodes.carriers.mpi_progress import LONGEST_PAUSE_S, PROGRESS, MpiProgress
from tests.proofs import LIBRARY

pytestmark = pytest.mark.proof(*LIBRARY)
SOON_S = 5.0  # on a busy machine


class Communicator:
    """Counts its polls."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.polls = 0
        self.times: list[float] = []
        self.is_free = False
        self._error = error

    def Iprobe(self, tag: int) -> bool:  # noqa: N802 - mpi4py's name
        assert tag >= 0
        assert not self.is_free
        self.times.append(time.monotonic())
        self.polls += 1
        if self._error is not None:
            raise self._error("a peer is lost")
        return False

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self.is_free = True


def wait_for_polls(communicator: Communicator, number: int) -> None:
    wanted, end = communicator.polls + number, time.monotonic() + SOON_S
    while communicator.polls < wanted:
        assert time.monotonic() < end, f"{communicator.polls} of {wanted} polls"
        time.sleep(1e-3)


def wait_for_end(progress: MpiProgress) -> None:
    end = time.monotonic() + SOON_S
    while progress._thread is not None:
        assert time.monotonic() < end
        time.sleep(1e-3)


def pauses(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_mpi_is_polled_until_the_last_lane_is_gone() -> None:
    progress, first, second = MpiProgress(), Communicator(), Communicator()
    progress.add(first)
    progress.add(second)
    wait_for_polls(first, 3)
    progress.remove(first)
    polls = first.polls
    wait_for_polls(second, 3)
    progress.remove(second)
    wait_for_end(progress)
    assert first.polls == polls, "a communicator that may be free was polled"
    progress.add(first)
    wait_for_polls(first, 3)
    progress.remove(first)
    wait_for_end(progress)


@pytest.mark.parametrize("leave", ["close", "abandon"])
def test_a_lane_is_polled_until_its_rank_leaves(leave: str) -> None:
    communicator = Communicator()
    carrier = MpiCarrier(None, communicator)
    wait_for_polls(communicator, 2)
    getattr(carrier, leave)()
    wait_for_end(PROGRESS)
    assert communicator.is_free == (leave == "close")


def test_a_start_makes_polls_frequent_again() -> None:
    progress, communicator = MpiProgress(), Communicator()
    progress.add(communicator)
    wait_for_polls(communicator, 2)
    wait_for_polls(communicator, 5)
    rare = pauses(communicator.times[-4:])
    progress.note_start()
    start = communicator.polls
    wait_for_polls(communicator, 9)
    often = pauses(communicator.times[start + 1 :])  # behind the one that the start itself makes
    progress.remove(communicator)
    # A busy machine makes pauses longer, but hardly all of them.
    assert min(rare) > 0.9 * LONGEST_PAUSE_S, rare
    assert min(often) < 0.5 * LONGEST_PAUSE_S, often


def test_an_error_of_mpi_does_not_end_the_polls() -> None:
    progress, communicator = MpiProgress(), Communicator(RuntimeError)
    progress.add(communicator)
    wait_for_polls(communicator, 3)
    progress.remove(communicator)
    wait_for_end(progress)


def test_no_poll_follows_the_end_of_the_program() -> None:
    progress, communicator = MpiProgress(), Communicator()
    progress.add(communicator)
    wait_for_polls(communicator, 1)
    progress._end()
    polls = communicator.polls
    assert progress._thread is None
    time.sleep(3 * LONGEST_PAUSE_S)
    assert communicator.polls == polls


def test_a_forked_child_starts_without_lanes() -> None:
    progress, communicator = MpiProgress(), Communicator()
    progress.add(communicator)
    with progress._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            progress._end()
            os._exit(0 if not progress._communicators and threading.active_count() == 1 else 1)
    end = time.monotonic() + SOON_S
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(1e-2)
    assert os.waitstatus_to_exitcode(found[1]) == 0
    progress.remove(communicator)
