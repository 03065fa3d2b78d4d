# SPDX-License-Identifier: Apache-2.0
"""Two to four hosts on one machine: network namespaces with links between them.

The link of two hosts is a pair of virtual interfaces, with a rate if wanted (tbf), or a relay in
user space. The relay has a delay too, which not every kernel can give an interface. More hosts have
a link each to a switch, which is a bridge in a namespace of its own. Needs root and the tools ip
and tc; `why_not` names a missing one.

    python bench/hosts.py NAME COMMAND...     # run a command on a host, where launchers want ssh
"""

import contextlib
import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 5))
LINK = "fastcoll0"
_BRIDGE = "bridge0"
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 65000  # few large packets: the relay is Python
_numbers = itertools.count()
_Found = TypeVar("_Found")


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not(num_hosts: int = 2) -> str:
    """Return why there can be no such hosts here, "" if there can."""
    try:
        with Hosts(num_hosts=num_hosts):
            return ""
    except OSError as error:
        return str(error)


class Hosts:
    """Network namespaces; leaving the context ends their processes and removes them."""

    def __init__(self, rate_mbit: float = 0, delay_ms: float = 0, num_hosts: int = 2) -> None:
        """Choose the link; without a delay it is the kernel's, without a rate as fast as it can.

        The rate is that of each host's link; a delay is for two hosts only.
        """
        assert 2 <= num_hosts <= (2 if delay_ms else len(ADDRESSES))
        prefix = f"fastcoll-{os.getpid()}-{next(_numbers)}"
        self.names = tuple(f"{prefix}-{host}" for host in "abcd"[:num_hosts])
        self._switch = f"{prefix}-switch" if num_hosts > 2 else ""
        self._rate_mbit = rate_mbit
        self._delay_ms = delay_ms
        self._relay: Any = None

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return (*self.names, self._switch) if self._switch else self.names

    def __enter__(self) -> Self:
        try:
            for name in self._namespaces:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            if self._delay_ms:
                self._start_relay()
            elif self._switch:
                self._plug_in()
            else:
                here, there = self.names
                pair = ("type", "veth", "peer", "name", LINK, "netns", there)
                _run("ip", "link", "add", LINK, "netns", here, *pair)
            for name, address in zip(self.names, ADDRESSES, strict=False):
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
        """End the processes in the namespaces, and remove them and the links."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.join()
        for name in self._namespaces:
            with contextlib.suppress(OSError):
                for pid in _run("ip", "netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            # Not with the namespace, which lives for as long as a socket of it is open.
            with contextlib.suppress(OSError):
                _run("ip", "-n", name, "link", "del", LINK)
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", name)

    def set_rate(self, rate_mbit: float) -> None:
        """Set the rate at which each host sends over a link without a delay."""
        shape = ("tbf", "rate", f"{rate_mbit:.0f}mbit", "burst", "512k", "latency", "50ms")
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", *shape)

    def cut(self, host: int = 1) -> None:
        """Take a host's link down."""
        _run("ip", "-n", self.names[host], "link", "set", LINK, "down")

    def mend(self, host: int = 1) -> None:
        """Take a host's link up again."""
        _run("ip", "-n", self.names[host], "link", "set", LINK, "up")

    def sent_bytes(self) -> list[int]:
        """Return how many bytes each host has sent over its link so far."""
        return self._counted("tx")

    def received_bytes(self) -> list[int]:
        """Return how many bytes each host has been sent so far."""
        return self._counted("rx")

    def _counted(self, direction: str) -> list[int]:
        counters = []
        for name in self.names:
            [link] = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", "dev", LINK))
            counters.append(int(link["stats64"][direction]["bytes"]))
        return counters

    def inside(self, host: int, function: Callable[[], _Found]) -> _Found:
        """Call a function in a thread that is on a host, as are the sockets that it opens."""
        with ThreadPoolExecutor(1, initializer=enter, initargs=(self.names[host],)) as thread:
            return thread.submit(function).result()

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

    def _plug_in(self) -> None:
        """Connect each host to the switch."""
        _run("ip", "-n", self._switch, "link", "add", _BRIDGE, "up", "type", "bridge")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            pair = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "link", "add", LINK, "netns", name, *pair)
            _run("ip", "-n", self._switch, "link", "set", port, "up", "master", _BRIDGE)

    def _start_relay(self) -> None:
        context = multiprocessing.get_context("fork")
        ready, told = context.Pipe()
        args = (self.names, self._rate_mbit, self._delay_ms, told)
        self._relay = context.Process(target=_relay, args=args, daemon=True)
        self._relay.start()
        if not ready.poll(10) or (problem := ready.recv()):
            raise OSError(f"no TUN device: {problem if ready.poll() else 'no answer'}")


def enter(name: str) -> None:
    """Move this thread, and processes that it starts, to a network namespace."""
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
                with contextlib.suppress(OSError):  # its link is down, or no receiver
                    os.write(ends[1 - side], queue.popleft()[1])


def main(name: str, *command: str) -> None:
    """Become a command on a host, which is called as its namespace is."""
    libc = ctypes.CDLL(None, use_errno=True)
    enter(name)
    # Launchers know hosts by their names.
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), f"unshare {name}")
    socket.sethostname(name)
    os.execvp("sh", ["sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main(*sys.argv[1:])
