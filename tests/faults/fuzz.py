# SPDX-License-Identifier: Apache-2.0
"""Damaged bytes for everything that a rank reads from a socket, a store or a region.

    python -m tests.faults.fuzz --seconds 600

Messages are valid ones with bits turned, ends cut off and pieces repeated, or noise; with up to
four descriptors. Every message is refused by a FastcollError or ignored: no other exception, no
wait without an end, no descriptor that stays open. The seed of a failing round is printed.
"""

import argparse
import contextlib
import gc
import json
import mmap
import os
import random
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.records import write
from fastcoll import _C, DesyncError, DriverError, FastcollError, PeerLostError
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.farewell import say_farewell, why_gone
from fastcoll.bootstrap.identity import Terms, describe_rank, meet
from fastcoll.bootstrap.mesh import SHRINK_TAG, Mesh
from fastcoll.bootstrap.rendezvous import Listener
from fastcoll.bootstrap.shrink import shrink
from fastcoll.measure.results import provenance


def damage(chance: random.Random, message: bytes) -> bytes:
    """Turn bits, cut, repeat, or replace a message; sometimes leave it as it is."""
    data = bytearray(message)
    for _ in range(chance.choice([0, 1, 1, 2, 5])):
        way = chance.randrange(4)
        if way == 0 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif way == 1:
            del data[chance.randrange(len(data) + 1) :]
        elif way == 2:
            at = chance.randrange(len(data) + 1)
            data[at:at] = data[: chance.randrange(40)]
        else:
            data = bytearray(chance.randbytes(chance.randrange(80)))
    return bytes(data)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(chance: random.Random, to: socket.socket, message: bytes) -> None:
    """Send something with some descriptors; empty messages would be the end of the connection."""
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(chance.choice([0, 0, 1, 2, 4]))]
    with contextlib.suppress(OSError):
        socket.send_fds(to, [message or b"x"], fds)
    for fd in fds:
        os.close(fd)


def fuzz_greeting(chance: random.Random) -> None:
    """A stranger, or a peer with a damaged greeting, at a rank's door."""
    listener = Listener()
    ours, theirs = pair()
    try:
        hellos = [
            describe_rank(listener.address, listener.token, Terms("same_bits", "gloo"))
            for _ in range(3)
        ]
        greeting = struct.pack("=I16s", chance.randrange(5), bytes.fromhex(listener.token))
        message = damage(chance, greeting)
        ours.setblocking(False)
        send(chance, theirs, message)
        peer = listener._identify_peer(ours, hellos)
        # A peer that knows the token is let in as the rank that it says it is.
        assert peer == -1 or (message[4:] == greeting[4:] and 0 <= peer < 3)
    finally:
        ours.close()
        theirs.close()
        listener.close()


def fuzz_farewell(chance: random.Random) -> None:
    """Read the bytes that a peer that is gone has left in its socket."""
    ours, theirs = pair()
    ours.setblocking(False)
    with ours, theirs:
        say_farewell([theirs.fileno()], 1, PeerLostError("rank 2 hung up", [2]))
        message = ours.recv(4096)
        for _ in range(chance.randrange(4)):
            send(chance, theirs, damage(chance, message))
        theirs.close()
        error = why_gone(ours.fileno(), 1)
        assert isinstance(error, FastcollError)
        assert all(0 <= rank < 64 for rank in getattr(error, "ranks", ()))


def with_mesh(use: Callable[[Mesh, socket.socket], None]) -> None:
    ours, theirs = pair()
    ours.setblocking(False)
    mesh = Mesh(0, [-1, ours.detach()], [os.getpid(), os.getpid()], [-1, -1])
    try:
        use(mesh, theirs)
    finally:
        theirs.close()
        mesh.close()
        for packets in mesh.unread:
            for packet in packets:
                packet.close()


def open_null() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def fuzz_exchange(chance: random.Random) -> None:
    """A descriptor for the heap, from a peer that sends something else."""

    def use(mesh: Mesh, theirs: socket.socket) -> None:
        for _ in range(chance.randrange(1, 3)):
            message = chance.choice([struct.pack("=Q", 7), SHRINK_TAG])
            send(chance, theirs, damage(chance, message))
        theirs.close()
        with contextlib.suppress(FastcollError):
            for fd in mesh.exchange_fds(open_null, 7, Deadline(5)):
                os.close(fd)

    with_mesh(use)


class Words:
    """The memory of a broken group; a peer has put something there, and may have set it."""

    def __init__(self, chance: random.Random) -> None:
        self.held = [0, chance.choice([0, 1, 2, 3, chance.getrandbits(64)])]
        self.survivors = chance.choice([0, 0, 0, 1, 2, 3, 7, chance.getrandbits(64)])

    def hold_parts(self, ranks: int) -> None:
        self.held[0] = ranks

    def parts_held(self) -> list[int]:
        return list(self.held)

    def decide_survivors(self, ranks: int) -> int:
        self.survivors = self.survivors or ranks
        return self.survivors


def fuzz_shrink(chance: random.Random) -> None:
    """The agreement, with a peer that damages its messages and words, and then dies."""

    def use(mesh: Mesh, theirs: socket.socket) -> None:
        for _ in range(chance.randrange(6)):
            send(chance, theirs, damage(chance, SHRINK_TAG))
        theirs.close()
        try:
            found = shrink(mesh, Words(chance), open_null, 0.05)
        except (PeerLostError, DesyncError, DriverError):
            return
        assert 0 in found.ranks
        assert set(found.ranks) <= {0, 1}
        assert len(found.region_fds) == len(found.ranks) == found.mesh.world_size
        found.mesh.close()
        for fd in found.region_fds:
            os.close(fd)

    with_mesh(use)


def fuzz_introduction(chance: random.Random) -> None:
    """Ranks describe themselves, damaged: another type, something missing, something more."""
    rows: list[Any] = [
        describe_rank("a", secrets.token_hex(16), Terms("fast", "gloo")).to_dict() for _ in range(3)
    ]
    row = rows[chance.randrange(3)]
    for _ in range(chance.randrange(3)):
        name = chance.choice(list(row))
        value = chance.choice([None, 1, "x", [], [1], ["x"], {}, True, 1.5, -1, 1 << 70])
        if chance.random() < 0.3:
            row.pop(name)
        else:
            row[chance.choice([name, name, "more"])] = value
    if chance.random() < 0.1:
        rows[0] = chance.choice([None, 3, [], "x"])
    with contextlib.suppress(FastcollError):
        meet(json.loads(json.dumps(rows)))


def fuzz_status(chance: random.Random) -> None:
    """A rank's region, as `fastcoll inspect` reads it from outside: noise behind a right magic."""
    pad_bytes = _C.region_bytes() - _C.K_NUM_SLOTS * _C.K_SLOT_BYTES
    fd = _C.memfd_create("fastcoll-region", _C.region_bytes())
    try:
        with mmap.mmap(fd, _C.region_bytes()) as region:
            region[:pad_bytes] = chance.randbytes(pad_bytes)
            for at in range(pad_bytes // 2, pad_bytes, 64):  # one of these begins the identity
                struct.pack_into("=Q", region, at, 0x66636F6C6C000002)
        status = _C.read_status(fd)
        assert all(isinstance(row["what"], str) for row in status["operations"])
    finally:
        os.close(fd)


TARGETS = (
    fuzz_greeting,
    fuzz_farewell,
    fuzz_exchange,
    fuzz_shrink,
    fuzz_introduction,
    fuzz_status,
)


def play(target: Callable[[random.Random], None], seed: int) -> None:
    """Play one round; an error says which one it was."""
    try:
        target(random.Random(seed))
    except BaseException as error:
        error.add_note(f"{target.__name__}, seed {seed}")
        raise


def num_fds() -> int:
    gc.collect()  # of what others have left
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> int:
    """Play rounds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--json", type=Path, help="where to leave a record of a run without finding"
    )
    options = parser.parse_args()
    gc.freeze()  # else each of the many collections looks through all modules
    end, seed, before = time.monotonic() + options.seconds, options.seed, num_fds()
    origin = provenance()
    while time.monotonic() < end:
        for target in TARGETS:
            play(target, seed)
            if num_fds() != before:
                raise AssertionError(f"{target.__name__}, seed {seed}: a descriptor stays open")
        seed += 1
    rounds = seed - options.seed
    print(f"{rounds} rounds of {len(TARGETS)} kinds from seed {options.seed}: no finding")
    if options.json:
        record = {
            "kind": "reliability",
            **origin,
            "settings": {"seed": options.seed, "targets": [one.__name__ for one in TARGETS]},
            "took_s": round(options.seconds),
            "counts": {"rounds": rounds},
            "findings": [],
        }
        write(record, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
