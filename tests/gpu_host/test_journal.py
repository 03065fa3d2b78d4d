# SPDX-License-Identifier: Apache-2.0
"""The notes of ranks about their calls on GPUs: two ranks, in one process."""

import os
from typing import Any

from fastcoll.gpu.journal import Journal, ToCome
from fastcoll.native import _C
from fastcoll.types import Algorithm, DType, Op, Verb


def plan(verb: Verb, numel: int = 0, dtype: DType = DType.float32) -> Any:
    kinds = int(verb), int(dtype), int(Op.SUM), int(Algorithm.direct)
    return _C.Plan(*kinds, numel, 0, 0, False, False, 0, 8)


BARRIER, BROADCAST = plan(Verb.barrier), plan(Verb.broadcast, 5)


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
        journal.core.write(BARRIER, f"train.py:{rank} in step")
    assert journals[0].difference(0, 1) == ""
    journals[0].core.write(BROADCAST, "train.py:7 in step")
    journals[1].core.write(BARRIER)
    for journal in journals:
        assert journal.difference(0, 1) == (
            f"collective 2: rank 0 called {BROADCAST!r} at train.py:7 in step, "
            f"rank 1 called {BARRIER!r}"
        )
        journal.core.close()


def test_who_made_every_call_and_ended_did_its_part() -> None:
    here, there = two_journals()
    for journal in (here, there):
        journal.core.write(BARRIER)
    here.core.write_message(True, 3, int(DType.float32), 1, 0)
    there.core.write_message(False, 3, int(DType.float32), 0, 0)
    assert not here.has_ended_calls(1), "its kernels may still run"
    there.core.finish()
    assert here.has_ended_calls(1)
    here.core.write_message(True, 4, int(DType.float32), 1, 0)
    assert not here.has_ended_calls(1), "it does not take the second message"
    there.core.write_message(False, 4, int(DType.float32), 0, 0)
    assert here.has_ended_calls(1)
    assert not here.has_ended_calls(1, ToCome(messages=[(True, 1)])), "a third message would wait"
    assert not here.has_ended_calls(1, ToCome(1)), "a second barrier would wait"
    there.core.write(BARRIER)
    assert here.has_ended_calls(1, ToCome(1))
    there.core.write_message(True, 4, int(DType.float32), 0, 0)
    assert here.has_ended_calls(1, ToCome(messages=[(False, 1)]))
    here.core.write(BARRIER)
    here.core.write(BARRIER)
    assert not here.has_ended_calls(1), "it does not come to the third barrier"
    for journal in (here, there):
        journal.core.close()


def test_a_damaged_entry_is_shown_as_unknown() -> None:
    mine = _C.GpuJournal.create(1)
    kept = os.dup(mine)
    journal = _C.GpuJournal(0, [mine])
    journal.write(BARRIER)
    journal.write_message(True, 3, int(DType.float32), 0, 0)
    entry_bytes, first_sent = 256, 64 + 8
    for entry in (1, first_sent + 1):
        os.pwrite(kept, b"\xff" * 32, entry * entry_bytes + 8)
    os.pwrite(kept, b"\xff" * 8, entry_bytes + 40)  # the length of its site
    os.close(kept)
    [(text, site)] = journal.calls(0).values()
    assert text == "something unknown"
    most = 4 * (entry_bytes - 64)  # a byte that can't be shown has four characters
    assert len(site) <= most
    assert journal.messages(0, True, 0) == {1: ("something unknown", "")}
    journal.close()
