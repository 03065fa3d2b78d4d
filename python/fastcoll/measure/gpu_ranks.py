# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of this process, for tests and measurements on few GPUs.

Decides which device and stream a rank has and in which thread its functions run. Several ranks
may share a device: their kernels are resident together, which separate processes' are not.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.group.communicator import Communicator


@dataclass
class GpuRank:
    """A rank, as the function that runs on it sees it; the stream is the current one there."""

    rank: int
    world_size: int
    device: torch.device
    comm: Communicator
    stream: torch.cuda.Stream | None = None

    def synchronize(self) -> None:
        """Wait until everything in this rank's stream is over."""
        if self.stream is not None:
            self.stream.synchronize()


_one_at_a_time = threading.Lock()  # torch's captures of several threads would mix


def capture(me: GpuRank, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture the launches of `body` in the rank's stream, for replays at any time. Collective.

    Nothing of the group may run, as a capture waits for the device. Without the upload a graph
    would take its resources at its first launch. That launch could wait for a kernel that waits for
    this rank. So no rank goes on before every rank has uploaded its graph.
    """
    graph = capture_alone(me, body)
    me.comm.barrier()
    return graph


def capture_alone(me: GpuRank, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Do the same for a rank; no kernel of another one may run before this is over."""
    with _one_at_a_time:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may do as they like meanwhile.
        with torch.cuda.graph(graph, stream=me.stream, capture_error_mode="thread_local"):
            body()
        upload(graph, me.stream or torch.cuda.current_stream())
    return graph


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Let a captured graph have all that it needs of its device, and wait for that."""
    from fastcoll.native import _cuda  # only now: without GPUs there may be no such extension

    _cuda.upload_graph(graph.raw_cuda_graph_exec(), stream.cuda_stream)
    stream.synchronize()


class GpuRanks:
    """A group of rank threads."""

    def __init__(self, devices: Sequence[str], timeout_s: float = 30.0) -> None:
        """Make a group with one rank for each of `devices` ("cuda:0"; "cpu" for rehearsals)."""
        store = dist.HashStore()
        self.world_size = len(devices)
        self._threads = [ThreadPoolExecutor(1, f"rank{rank}") for rank in range(self.world_size)]
        self._ranks: list[GpuRank] = []
        self.failed = False  # something raised on a rank: the group may be broken
        for name in {name for name in devices if torch.device(name).type == "cuda"}:
            # The device's context, which may take many seconds, before anything is waited for.
            torch.zeros(1, device=name)

        def start_rank(rank: int) -> GpuRank:
            device = torch.device(devices[rank])
            comm = Communicator.from_store(store, rank, self.world_size, timeout_s=timeout_s)
            assert isinstance(comm, Communicator)  # threads are on one node
            me = GpuRank(rank, self.world_size, device, comm)
            try:
                if device.type == "cuda":
                    me.stream = _prepare_rank_on_gpu(comm, device)
            except BaseException:
                comm.close()
                raise
            return me

        self._ranks = self._collect(start_rank, list(range(self.world_size)))

    def _collect(self, function: Callable[..., Any], firsts: Sequence[Any], *args: Any) -> Any:
        jobs = [
            thread.submit(function, first, *args)
            for thread, first in zip(self._threads, firsts, strict=True)
        ]
        failed, self.failed = self.failed, True  # also if the wait is broken off
        wait(jobs)
        problems = [(rank, job.exception()) for rank, job in enumerate(jobs) if job.exception()]
        if problems:
            text = "\n".join(
                f"rank {rank}: {''.join(traceback.format_exception(error))}"
                for rank, error in problems
            )
            raise RuntimeError(f"{len(problems)} ranks failed\n{text}") from problems[0][1]
        self.failed = failed
        return [job.result() for job in jobs]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return the values in rank order.

        Raises:
            RuntimeError: It raised on a rank; the text has every rank's traceback.
        """

        def in_stream(me: GpuRank) -> Any:
            with _stream(me):
                return function(me, *args)

        return list(self._collect(in_stream, self._ranks))

    def close(self) -> None:
        """Close the group and end the threads."""
        for thread, me in zip(self._threads, self._ranks, strict=False):
            thread.submit(me.comm.close)
        for thread in self._threads:
            thread.shutdown()


def _prepare_rank_on_gpu(comm: Communicator, device: torch.device) -> torch.cuda.Stream:
    """Make this thread's rank ready for calls on its GPU; return the rank's own stream.

    Now: to allocate later could mean to wait for kernels that run. And in a stream of its own: in
    the default one, which all threads share, the ranks' kernels would wait for each other's end.
    """
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        comm.all_reduce(torch.zeros(1, device=device))
    stream.synchronize()
    comm.check()
    return stream


@contextlib.contextmanager
def _stream(me: GpuRank) -> Iterator[None]:
    if me.stream is None:
        yield
        return
    with torch.cuda.stream(me.stream):
        yield
