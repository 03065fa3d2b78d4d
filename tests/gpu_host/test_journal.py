# SPDX-License-Identifier: Apache-2.0
"""The notes of ranks about their calls on GPUs: two ranks, in one process."""

import os

from fastcoll.gpu.journal import Journal


def two_journals() -> list[Journal]:
    pages: list[int] = []

    def give(fd: int) -> list[int]:
        pages.append(fd)
        return []

    def take(fd: int) -> list[int]:
        os.close(fd)
        return [os.dup(one) for one in pages]

    for _ in range(2):
        Journal(0, 2, give)
    journals = [Journal(rank, 2, take) for rank in range(2)]
    for fd in pages:
        os.close(fd)
    return journals


def test_where_calls_are_made_is_shown_and_may_differ() -> None:
    journals = two_journals()
    for rank, journal in enumerate(journals):
        journal.write("barrier()", f"train.py:{rank} in step")
    assert journals[0].difference(0, 1) == ""
    journals[0].write("broadcast()", "train.py:7 in step")
    journals[1].write("barrier()")
    for journal in journals:
        assert journal.difference(0, 1) == (
            "collective 2: rank 0 called broadcast() at train.py:7 in step, rank 1 called barrier()"
        )
        journal.close()


def test_who_made_every_call_and_ended_did_its_part() -> None:
    here, there = two_journals()
    for journal in (here, there):
        journal.write("barrier()")
    here.write_message(True, 1, "float32, numel=3")
    there.write_message(False, 0, "float32, numel=3")
    assert not here.has_done_its_part(1), "its kernels may still run"
    there.finish()
    assert here.has_done_its_part(1)
    here.write_message(True, 1, "float32, numel=4")
    assert not here.has_done_its_part(1), "it does not take the second message"
    there.write_message(False, 0, "float32, numel=4")
    assert here.has_done_its_part(1)
    here.write("barrier()")
    assert not here.has_done_its_part(1), "it does not come to the second barrier"
    for journal in (here, there):
        journal.close()
