# SPDX-License-Identifier: Apache-2.0
"""Objects that one rank can't pack: an error on all ranks, and the group goes on."""

import dataclasses
from typing import Any

import pytest

from tests.contract.test_objects import every_verb, how
from tests.support.backends import TorchGroup
from tests.support.harness import LATE_S, Attempt, Rank, attempt
from tests.support.sites import Site, each_kind


class UntoldError(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Unpicklable:
    """Refuses to be packed, by pickle and by torch."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def pack_in_vain(rank: Rank, weights_only: bool, error: type, text: str) -> list[Attempt]:
    """Rank 1 gives each verb an object that can't be packed; then all verbs as usual."""
    comm = rank.comm.communicator() if isinstance(rank.comm, TorchGroup) else rank.comm
    me, world, safe = rank.rank, rank.world_size, how(weights_only)
    is_odd = me == 1
    mine: Any = Unpicklable(error(text)) if is_odd else me
    everything = ["kept"] * world
    given = [1] * (world - 1) + [mine] if is_odd else None
    found = [
        attempt(comm.all_gather_object, everything, mine, **safe),
        attempt(comm.gather_object, mine, [None] * world if me == 0 else None, 0, **safe),
        attempt(comm.broadcast_object_list, [mine], 1, **safe),
        attempt(comm.scatter_object_list, [None], given, 1, **safe),
    ]
    if me < 2:  # the receiver first names its sender, then takes anyone
        for source in (1, None):
            call = comm.recv_object_list if me == 0 else comm.send_object_list
            found.append(attempt(call, [mine], 0 if is_odd else source, **safe))
    assert everything == ["kept"] * world
    every_verb(dataclasses.replace(rank, comm=comm), 0)
    return found


HOLDS = "it holds a socket, " + "very " * 1000 + "large"


@pytest.mark.parametrize(
    ("weights_only", "error", "text", "told"),
    [
        (False, TypeError, HOLDS, "TypeError: it holds a socket, very very"),
        (True, TypeError, HOLDS, "TypeError: it holds a socket, very very"),
        (False, OSError, "no file \udcff", "OSError: no file ?"),  # a name that is no text
        (True, UntoldError, "", "UntoldError: its text raised ValueError"),
    ],
)
@each_kind
def test_what_one_rank_cannot_pack_is_an_error_on_all(
    site: Site, weights_only: bool, error: type, text: str, told: str
) -> None:
    rows = site.run(pack_in_vain, weights_only, error, text)
    assert [len(row) for row in rows] == [6, 6] + [4] * (site.world - 2)
    for row in rows:
        for one in row:
            assert one.kind == "UsageError", one
            assert told in one.text
            assert one.seconds < LATE_S
        for one in row[:4]:
            assert "rank 1: " in one.text
            assert "can still be used" in one.text
