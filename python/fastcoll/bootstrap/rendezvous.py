# SPDX-License-Identifier: Apache-2.0
"""Connect the ranks of one node by sockets, so that they can pass each other file descriptors.

Decides which ranks connect, and which peers are accepted. Sockets are abstract, so no file stays
behind. A peer has to be of the same user and to know the random token. The sockets stay open for
the life of the group: the kernel closes them when a peer dies. Must not know the descriptors.
"""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.farewell import MOST_BYTES, farewell_in, farewell_of, say_farewell, why_gone
from fastcoll.bootstrap.identity import Hello
from fastcoll.bootstrap.mesh import Mesh, peer_credentials
from fastcoll.bootstrap.os_errors import REFUSALS
from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError

_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"=I{_TOKEN_BYTES}s")
_SOCKET = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
_RETRY_S = 0.002
# How often a rank that waits for connections asks whether the missing ranks are gone.
_LOOK_S = 0.1
# How long a rank that fails goes on answering peers that are about to connect.
_LINGER_S = 1.0


class SideChannel:
    """Knowledge of ranks from another source than their connections. This class has none."""

    def is_gone(self, peer: int) -> bool:
        """Return whether a rank is known to be gone."""
        del peer
        return False

    def leave_farewell(self, farewell: bytes, deadline: Deadline) -> None:
        """Keep a farewell for ranks that come when this one is gone."""

    def farewell_from(self, peer: int, deadline: Deadline) -> bytes:
        """Return the farewell that a rank left, or b""."""
        del peer, deadline
        return b""


_NO_CHANNEL = SideChannel()


class Listener:
    """This rank's listening socket, under a random name, and the token that peers must show."""

    def __init__(self) -> None:
        self.address = f"fastcoll-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self._socket = socket.socket(*_SOCKET)
        self._socket.bind("\0" + self.address)
        self._socket.listen(128)
        self._nameless: dict[int, socket.socket] = {}  # by descriptor; rank not known yet
        # Closed to free a descriptor, so that a peer can be told that none is left.
        self._spare = self._socket.dup()

    def close(self) -> None:
        """Close the socket and the connections whose rank is not known yet; others stay."""
        self._socket.close()
        self._spare.close()
        for connection in self._nameless.values():
            connection.close()

    def connect(
        self,
        rank: int,
        hellos: Sequence[Hello],
        deadline: Deadline,
        channel: SideChannel = _NO_CHANNEL,
    ) -> Mesh:
        """Connect to all lower ranks and accept all higher ranks. Collective.

        A rank that fails tells all others why; they raise the same. One that comes when it is gone
        finds its reason in the channel, where that keeps one.

        Raises:
            CollectiveTimeout: A peer did not come in time.
            PeerLostError: A peer died on the way.
        """
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                sockets[peer] = _call(rank, peer, hellos[peer], deadline)
            higher = range(rank + 1, len(hellos))
            arrivals = self._arrivals(rank, hellos, higher, sockets, deadline, channel.is_gone)
            for peer, connection in arrivals:
                sockets[peer] = connection
                _send_token(connection, rank, peer, hellos[peer].token)
            for peer in range(rank):
                _read_reply(sockets[peer], peer, self.token, deadline)
        except BaseException as failure:
            asking = Deadline(min(_LINGER_S, deadline.left_s()))
            error = _find_reason(failure, channel, asking)
            self._send_farewells(rank, hellos, sockets, deadline, error)
            say_farewell((one.fileno() for one in sockets.values()), rank, error)
            channel.leave_farewell(farewell_of(rank, error), Deadline(asking.limit_s))
            for connection in sockets.values():
                connection.close()
            if error is failure:
                raise
            raise error from failure
        return Mesh.of_sockets(rank, len(hellos), sockets)

    def _arrivals(
        self,
        rank: int,
        hellos: Sequence[Hello],
        expected: Iterable[int],
        connected: Mapping[int, socket.socket],
        deadline: Deadline,
        is_gone: Callable[[int], bool] = lambda peer: False,
    ) -> Iterator[tuple[int, socket.socket]]:
        """Accept until all expected ranks are connected; others are turned away without delay.

        Ranks that are connected already are watched meanwhile, as one of them may give up.
        """
        missing = set(expected)
        talking: set[int] = set()  # those that are past this step and wait for us in the next
        while missing:
            watched = {one.fileno(): peer for peer, one in connected.items()}
            poll = select.poll()
            for fd in {self._socket.fileno(), *self._nameless, *watched} - talking:
                poll.register(fd, select.POLLIN)
            if deadline.passed():
                raise CollectiveTimeout(
                    f"init (rank {rank}) waited {deadline.limit_s:g} s for ranks "
                    f"{sorted(missing)} to connect",
                    sorted(missing),
                )
            events = poll.poll(min(deadline.left_s(), _LOOK_S) * 1000 + 1)
            if not events and (gone := [peer for peer in missing if is_gone(peer)]):
                raise PeerLostError(f"init (rank {rank}): ranks {gone} are gone", gone)
            # Connected peers come first: a rank that gives up takes one at a time.
            for fd, _ in sorted(events, key=lambda event: event[0] == self._socket.fileno()):
                if fd == self._socket.fileno():
                    self._accept_connection()
                elif fd in watched:
                    _require_living(connected[watched[fd]], watched[fd])
                    talking.add(fd)
                else:
                    connection = self._nameless.pop(fd)
                    peer = self._identify_peer(connection, hellos)
                    if peer in missing:
                        missing.remove(peer)
                        yield peer, connection
                    else:
                        connection.close()

    def _accept_connection(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            if not self._nameless:  # one of which may make room
                raise
            time.sleep(_RETRY_S)
            return
        connection.setblocking(False)
        self._nameless[connection.fileno()] = connection

    def _send_farewells(
        self,
        rank: int,
        hellos: Sequence[Hello],
        sockets: Mapping[int, socket.socket],
        deadline: Deadline,
        error: BaseException,
    ) -> None:
        """Connect to the ranks that are not at fault and not connected yet, and tell them why."""
        self._spare.close()
        missing = set(range(len(hellos))) - {rank, *sockets, *getattr(error, "ranks", ())}
        linger = Deadline(min(_LINGER_S, deadline.left_s()))
        for peer in (one for one in missing if one < rank):
            with contextlib.suppress(FastcollError, *REFUSALS):
                _refuse_peer(_call(rank, peer, hellos[peer], linger), rank, error)
        higher = [peer for peer in missing if peer > rank]
        with contextlib.suppress(CollectiveTimeout, *REFUSALS):
            for _, connection in self._arrivals(rank, hellos, higher, {}, linger):
                _refuse_peer(connection, rank, error)

    def _identify_peer(self, connection: socket.socket, hellos: Sequence[Hello]) -> int:
        """Return the rank that a connection proves to be, or -1."""
        try:
            message = connection.recv(_GREETING.size + 1)
        except OSError:
            return -1
        if len(message) != _GREETING.size:
            return -1
        peer, token = _GREETING.unpack(message)
        known = hmac.compare_digest(token, bytes.fromhex(self.token))
        _, uid = peer_credentials(connection)
        return int(peer) if known and peer < len(hellos) and uid == hellos[peer].uid else -1


def _call(rank: int, peer: int, hello: Hello, deadline: Deadline) -> socket.socket:
    """Connect to a lower rank and present its token."""
    connection = socket.socket(*_SOCKET)
    try:
        while True:
            try:
                connection.setblocking(False)
                connection.connect("\0" + hello.address)
                break
            except BlockingIOError:  # its backlog is full for the moment
                if deadline.passed():
                    raise _late(rank, peer, deadline) from None
                time.sleep(_RETRY_S)
        _, uid = peer_credentials(connection)
        if uid != hello.uid:
            raise PeerLostError(
                f"rank {peer}'s socket belongs to uid {uid}, not {hello.uid}", [peer]
            )
        _send_token(connection, rank, peer, hello.token)
    except OSError as error:
        connection.close()
        raise PeerLostError(
            f"init (rank {rank}): rank {peer} is gone, and left no reason: {error}", [peer]
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _find_reason(failure: BaseException, channel: SideChannel, deadline: Deadline) -> BaseException:
    """Return the farewell of a rank that this one found lost, if it left one, else the failure."""
    for peer in failure.ranks if isinstance(failure, PeerLostError) else ():
        if reason := farewell_in(channel.farewell_from(peer, deadline)):
            return reason
    return failure


def _refuse_peer(connection: socket.socket, rank: int, error: BaseException) -> None:
    """Tell a peer why this rank gives up, and hang up."""
    say_farewell([connection.fileno()], rank, error)
    connection.close()


def _send_token(connection: socket.socket, rank: int, peer: int, token: str) -> None:
    """Show a peer that I know its token."""
    try:
        connection.send(_GREETING.pack(rank, bytes.fromhex(token)))
    except OSError as error:
        raise why_gone(connection.fileno(), peer) from error


def _require_living(connection: socket.socket, peer: int) -> None:
    """Raise the reason for which a peer gave up, or its loss, if its message says so."""
    try:
        message = connection.recv(MOST_BYTES, socket.MSG_PEEK)
    except OSError:
        message = b""
    if not message or farewell_in(message):
        raise why_gone(connection.fileno(), peer)


def _read_reply(connection: socket.socket, peer: int, token: str, deadline: Deadline) -> None:
    """Wait for a lower rank's proof that it knows my token."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not deadline.wait(lambda wait_s: poll.poll(wait_s * 1000)):
        raise CollectiveTimeout(
            f"init waited {deadline.limit_s:g} s for rank {peer} to answer", [peer]
        )
    _require_living(connection, peer)
    message = connection.recv(MOST_BYTES)
    if not hmac.compare_digest(message, _GREETING.pack(peer, bytes.fromhex(token))):
        raise PeerLostError(f"init: rank {peer} does not know this rank's token", [peer])


def _late(rank: int, peer: int, deadline: Deadline) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"init (rank {rank}) waited {deadline.limit_s:g} s to connect to rank {peer}", [peer]
    )
