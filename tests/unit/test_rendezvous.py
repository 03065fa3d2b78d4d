# SPDX-License-Identifier: Apache-2.0
"""A rank's door: who stands before it when the rank gives up is told why."""

import socket
import threading
from collections.abc import Iterator

import pytest

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.farewell import farewell_in, farewell_of, say_farewell
from fastcoll.bootstrap.identity import Terms, describe_rank
from fastcoll.bootstrap.rendezvous import _GREETING, Listener, SideChannel
from fastcoll.errors import PeerLostError, UsageError


@pytest.fixture
def door() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def test_who_has_not_said_its_name_yet_hears_why_the_door_closes(door: Listener) -> None:
    """Rank 2 is let wait, as it says nothing; rank 1 gives up meanwhile."""
    hello = describe_rank(door.address, door.token, Terms("same_bits", "gloo"))
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            door.connect(0, [hello] * 3, Deadline(10))
        except BaseException as error:
            errors.append(error)

    one, two = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with one, two:
        for visitor in (two, one):
            visitor.settimeout(5)
            visitor.connect("\0" + door.address)
        rank_0 = threading.Thread(target=connect)
        rank_0.start()
        one.send(_GREETING.pack(1, bytes.fromhex(door.token)))
        assert one.recv(100), "rank 0's greeting"
        say_farewell([one.fileno()], 1, UsageError("no such bird"))
        one.close()
        two.send(_GREETING.pack(2, bytes.fromhex(door.token)))
        while (reason := farewell_in(two.recv(2048))) is None:
            pass  # who is quick is let in before
        rank_0.join()
    [mine] = errors
    for heard in (mine, reason):
        assert isinstance(heard, PeerLostError)
        assert heard.ranks == (1,)
        assert "no such bird" in str(heard)


class Known(SideChannel):
    """Has a farewell of each rank, and notes the one that this rank leaves."""

    def __init__(self, farewell: bytes) -> None:
        self.farewell, self.left = farewell, b""

    def leave_farewell(self, farewell: bytes, deadline: Deadline) -> None:
        self.left = farewell

    def farewell_from(self, peer: int, deadline: Deadline) -> bytes:
        return self.farewell


@pytest.mark.parametrize(
    ("farewell", "ranks", "said"),
    [
        (farewell_of(0, PeerLostError("rank 2 hung up", [2])), (2,), "rank 2 hung up"),
        (b"", (0,), "rank 0 is gone, and left no reason"),
    ],
    ids=["a reason", "none"],
)
def test_who_comes_to_a_closed_door_passes_on_what_is_known(
    door: Listener, farewell: bytes, ranks: tuple[int, ...], said: str
) -> None:
    gone, terms, known = Listener(), Terms("same_bits", "gloo"), Known(farewell)
    hellos = [describe_rank(one.address, one.token, terms) for one in (gone, door, door)]
    gone.close()
    with pytest.raises(PeerLostError, match=said) as caught:
        door.connect(1, hellos, Deadline(1), known)
    left = farewell_in(known.left)
    assert isinstance(left, PeerLostError)
    assert caught.value.ranks == left.ranks == ranks
    assert str(left) == str(caught.value)
