# SPDX-License-Identifier: Apache-2.0
"""Probes of the system calls by which processes of this machine work together.

Decides how each ability is tried; a probe raises when it fails. Knows no tables and no fastcoll
groups.
"""

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NUM_BYTES = 4096
_WORD = b"fastcoll"
_MEMBARRIER_NUMBERS = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2

# The peer: gets a memory file over a socket, answers through the memory, and reads our memory.
_PEER = r"""
import ctypes, json, mmap, os, socket, sys
name, parent_pid, parent_address, size = json.loads(sys.argv[1])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect("\0" + name)
_, fds, _, _ = socket.recv_fds(connection, 16, 1)
shared = mmap.mmap(fds[0], size)
word = shared[:8]
shared[8:16] = word
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
into = ctypes.create_string_buffer(8)
local = Iovec(ctypes.addressof(into), 8)
remote = Iovec(parent_address, 8)
readv = libc.process_vm_readv
readv.restype = ctypes.c_ssize_t
count = readv(parent_pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
error = os.strerror(ctypes.get_errno()) if count != 8 else ""
mine = ctypes.create_string_buffer(word, 8)
connection.sendall(json.dumps([into.raw == word, error, ctypes.addressof(mine)]).encode())
connection.recv(1)
"""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class PeerFindings:
    """The results between this process and one it started."""

    shares_memory: bool
    # Whether the child could read this process. Ranks, which are siblings, need that.
    reads_us: bool
    reads_error: str  # why not
    read_by_us: bool  # whether this process could read its child


def sealed_memory() -> int:
    """Return a memory file that can neither shrink nor grow, after trying that it does not.

    Raises:
        OSError: The kernel refuses memory files or seals.
    """
    fd = os.memfd_create("fastcoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _NUM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    for num_bytes in (0, 2 * _NUM_BYTES):
        try:
            os.ftruncate(fd, num_bytes)
        except PermissionError:
            continue
        os.close(fd)
        raise OSError("a sealed memory file changed its size")
    return fd


@contextmanager
def _peer(name: str, address: int) -> Iterator[subprocess.Popen[bytes]]:
    told = json.dumps([name, os.getpid(), address, _NUM_BYTES])
    process = subprocess.Popen([sys.executable, "-S", "-c", _PEER, told], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def try_peer() -> PeerFindings:
    """Pass a memory file to a child process and read each other's memory.

    Raises:
        OSError: The child did not connect, or nothing could be passed.
    """
    name = f"fastcoll-doctor-{secrets.token_hex(8)}"
    fd = sealed_memory()
    mine = ctypes.create_string_buffer(_WORD, len(_WORD))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(20)
        listener.bind("\0" + name)
        listener.listen(1)
        with _peer(name, ctypes.addressof(mine)) as process, mmap.mmap(fd, _NUM_BYTES) as shared:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(20)
                shared[: len(_WORD)] = _WORD
                socket.send_fds(connection, [b"x"], [fd])
                reads_us, error, address = json.loads(connection.recv(4096))
                echoed = shared[len(_WORD) : 2 * len(_WORD)] == _WORD
                read_by_us = _read_memory(process.pid, address) == _WORD
    os.close(fd)
    return PeerFindings(echoed, reads_us, error, read_by_us)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _read_memory(pid: int, address: int) -> bytes:
    into = ctypes.create_string_buffer(len(_WORD))
    local = _Iovec(ctypes.addressof(into), len(_WORD))
    remote = _Iovec(address, len(_WORD))
    readv = _libc().process_vm_readv
    readv.restype = ctypes.c_ssize_t
    count = readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return into.raw if count == len(_WORD) else b""


# A rank of a group on GPUs: connects to the others over a store, reduces, prints the route.
_GPU_RANK = r"""
import sys
import torch
from torch.distributed import TCPStore
from fastcoll import Communicator
rank, port, num_gpus = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False)
with Communicator.from_store(store, rank, 2, timeout_s=30) as comm:
    tensor = torch.full((5000,), rank + 1.0, device=f"cuda:{rank % num_gpus}")
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    comm.check()
    if not bool((tensor == 3).all()):
        sys.exit("a wrong sum")
    print(comm.gpu_report())
"""


def try_gpu_ranks(num_gpus: int) -> str:
    """Reduce between two processes on GPUs and return their route.

    Raises:
        OSError: It did not work; the text is a rank's last message.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _GPU_RANK, str(rank), str(store.port), str(num_gpus)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in ranks]
    except subprocess.TimeoutExpired:
        raise OSError("two ranks on GPUs did not end within 90 s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        if process.returncode != 0:
            raise OSError(errors.strip().splitlines()[-1] if errors.strip() else "a rank failed")
    return f"works by {outputs[0][0].strip()}"


def membarrier() -> bool:
    """Return whether membarrier's global expedited form works, after calling it.

    Raises:
        OSError: The architecture's call number is not known here.
    """
    number = _MEMBARRIER_NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(f"no membarrier number known for {os.uname().machine}")
    call = _libc().syscall
    call.restype = ctypes.c_long
    registered: bool = call(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0
    return registered and call(number, _GLOBAL_EXPEDITED, 0, 0) == 0
