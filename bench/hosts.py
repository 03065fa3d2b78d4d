# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with a link between them.

The link is a pair of virtual interfaces, with a rate if wanted (tbf), or a relay in user space that
has a delay too, which not every kernel can give an interface. Needs root and the tools ip and tc;
`why_not` says what is missing.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "fastcoll0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 65000  # few large packets: the relay is Python


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Return why there can be no hosts here, "" if there can."""
    try:
        with Hosts():
            return ""
    except OSError as error:
        return str(error)


class Hosts:
    """Two network namespaces; leaving the context removes them."""

    def __init__(self, rate_mbit: float = 0, delay_ms: float = 0) -> None:
        """Choose the link; without a delay it is the kernel's, without a rate as fast as it can."""
        self.names = tuple(f"fastcoll-{os.getpid()}-{host}" for host in "ab")
        self._rate_mbit = rate_mbit
        self._delay_ms = delay_ms
        self._relay: Any = None

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            if self._delay_ms:
                self._start_relay()
            else:
                here, there = self.names
                pair = ("type", "veth", "peer", "name", LINK, "netns", there)
                _run("ip", "link", "add", LINK, "netns", here, *pair)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
                _run("ip", "-n", name, "link", "set", LINK, "up")
            if self._rate_mbit and not self._delay_ms:
                self.set_rate(self._rate_mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and with them the link."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.join()
        for name in self.names:
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", name)

    def set_rate(self, rate_mbit: float) -> None:
        """Limit a link without a delay."""
        shape = ("tbf", "rate", f"{rate_mbit:.0f}mbit", "burst", "512k", "latency", "50ms")
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", *shape)

    def cut(self) -> None:
        """Take the link down."""
        _run("ip", "-n", self.names[1], "link", "set", LINK, "down")

    def sent_bytes(self) -> list[int]:
        """Return how many bytes each host has sent over the link so far."""
        counters = []
        for name in self.names:
            [link] = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", "dev", LINK))
            counters.append(int(link["stats64"]["tx"]["bytes"]))
        return counters

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a Python program on a host."""
        # Not `ip netns exec`: the child shall be the program itself, to be killed.
        words = [sys.executable, *argv]
        entering = {"GLOO_SOCKET_IFNAME": LINK, **env}
        return subprocess.Popen(
            words,
            env={**os.environ, **entering},
            text=True,
            preexec_fn=lambda: enter(self.names[host]),
            **options,
        )

    def start_ranks(
        self, hosts: Sequence[int], argv: Sequence[str], port: int, **options: Any
    ) -> "list[subprocess.Popen[str]]":
        """Start a program as one rank on each of some hosts, as torchrun would."""
        world = {"WORLD_SIZE": str(len(hosts)), "MASTER_PORT": str(port)}
        address = ADDRESSES[hosts[0]]
        return [
            self.start(host, argv, {"RANK": str(rank), "MASTER_ADDR": address, **world}, **options)
            for rank, host in enumerate(hosts)
        ]

    def _start_relay(self) -> None:
        context = multiprocessing.get_context("fork")
        ready, told = context.Pipe()
        args = (self.names, self._rate_mbit, self._delay_ms, told)
        self._relay = context.Process(target=_relay, args=args, daemon=True)
        self._relay.start()
        if not ready.poll(10) or (problem := ready.recv()):
            raise OSError(f"no TUN device: {problem if ready.poll() else 'no answer'}")


def enter(name: str) -> None:
    """Move this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(fd)


def _tunnel(name: str) -> int:
    """Open a TUN device in a namespace."""
    enter(name)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", LINK.encode(), _IFF_TUN | _IFF_NO_PI))
    _run("ip", "link", "set", LINK, "mtu", str(_MTU))
    return fd


def _relay(names: Sequence[str], rate_mbit: float, delay_ms: float, told: Any) -> None:
    """Pass packets on, each direction at a rate and after a delay."""
    try:
        ends = [_tunnel(name) for name in names]
    except OSError as error:
        told.send(str(error))
        return
    told.send("")
    s_per_byte = 8e-6 / rate_mbit if rate_mbit else 0.0
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when the last packet of a direction has left
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=time.monotonic() + 1)
        ready, _, _ = select.select(ends, [], [], max(0.0, due - time.monotonic()))
        for end in ready:
            side = ends.index(end)
            with contextlib.suppress(BlockingIOError):
                packet = os.read(end, _MTU + 100)
                free[side] = max(time.monotonic(), free[side]) + len(packet) * s_per_byte
                queues[side].append((free[side] + delay_ms / 1e3, packet))
        now = time.monotonic()
        for side, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # its link is down, or nobody takes it
                    os.write(ends[1 - side], queue.popleft()[1])
