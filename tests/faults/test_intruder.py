# SPDX-License-Identifier: Apache-2.0
"""A stranger at the door: who connects to a rank's socket without the token gets nowhere.

Needs no knowledge of the library: the socket is found as the kernel lists it.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastcoll
from tests.support.harness import TIMEOUT_S, Pool, Rank, Setup
from tests.support.waiting import wait_until


def addresses(pid: int) -> list[tuple[str, int]]:
    """Abstract Unix sockets that a process listens on, with their types."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, _, inode, *path = line.split()
        listens = int(flags, 16) & 0x10000
        if inode in inodes and listens and path and path[0].startswith("@"):
            found.append(("\0" + path[0][1:], int(kind, 16)))
    return found


def intrude(address: tuple[str, int], message: bytes) -> socket.socket:
    """Connect, say something, and stay."""
    stranger = socket.socket(socket.AF_UNIX, address[1])
    stranger.settimeout(2)
    stranger.connect(address[0])
    if message:
        stranger.sendall(message)
    return stranger


def make_group(rank: Rank) -> list[float]:
    if rank.rank == 1:
        rank.wait_for("intruded")
    comm = fastcoll.init(
        store=rank.store, rank=rank.rank, world_size=rank.world_size, timeout_s=TIMEOUT_S
    )
    tensor = torch.tensor([rank.rank + 1.0])
    comm.all_reduce(tensor)
    return tensor.tolist()


def find_doors(pool: Pool) -> list[tuple[str, int]]:
    """Where rank 0 waits for rank 1, which comes when it is told to."""
    doors: list[tuple[str, int]] = wait_until(lambda: addresses(pool.pids[0]))
    return doors


MESSAGES = {
    "nothing": b"",
    "one byte": b"x",
    "zeros": bytes(24),
    "noise": bytes(range(256)) * 4,
    "a rank and no token": (1).to_bytes(8, "little") + bytes(16),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_stranger_is_ignored(fresh_pool: Callable[..., Pool], kind: str) -> None:
    pool = fresh_pool(2, Setup(init=False))
    pool.start(make_group)
    doors = find_doors(pool)
    strangers = [intrude(door, MESSAGES[kind]) for door in doors for _ in range(3)]
    pool.tell("intruded")
    try:
        assert pool.finish() == [[3.0], [3.0]]
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_hangs_up(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False))
    pool.start(make_group)
    for door in find_doors(pool):
        for message in MESSAGES.values():
            intrude(door, message).close()
    pool.tell("intruded")
    assert pool.finish() == [[3.0], [3.0]]
