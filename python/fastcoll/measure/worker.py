# SPDX-License-Identifier: Apache-2.0
"""A rank process: `python -m fastcoll.measure.worker CONFIG_JSON RANK`.

Decides the order within a command (idle clock, barrier, window) and the reaction when a library
refuses. The library and the buffers are chosen in libraries.py.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fastcoll.measure.engines import ENGINES
from fastcoll.measure.gpu_peers import GPU_LIBRARIES
from fastcoll.measure.gpu_variants import GPU_VARIANTS
from fastcoll.measure.libraries import LIBRARIES
from fastcoll.measure.library import Library, WorkerConfig
from fastcoll.measure.oneccl import OneCcl, OneCclLoop
from fastcoll.measure.protocol import Line, Reply, connect, parse_prepare

_ALL: dict[str, Callable[[WorkerConfig], Library]] = {
    **LIBRARIES,
    **ENGINES,
    "oneccl": OneCcl,
    "oneccl_loop": OneCclLoop,
    **GPU_LIBRARIES,
    **GPU_VARIANTS,
}


class Worker:
    """One library and the commands it is given."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._cpu_at_reply_s = time.process_time()

    def run(self, command: str) -> Reply:
        """Run one command; a library's refusal is a reply with "error"."""
        idle_cpu_s = time.process_time() - self._cpu_at_reply_s
        word, *words = command.split()
        try:
            reply = self._run(word, words)
        except Exception as error:
            reply = {"error": _refusal(error)}
        reply["idle_cpu_s"] = idle_cpu_s
        self._cpu_at_reply_s = time.process_time()
        return reply

    def _run(self, word: str, words: list[str]) -> dict[str, Any]:
        library = self.library
        if word == "prepare":
            return {"num_wrong": library.prepare(parse_prepare(words, library.world_size))}
        if word == "time":
            iterations, num_windows = map(int, words)
            return {"seconds": [self._window(iterations) for _ in range(num_windows)]}
        if word == "choose":
            library.choose(words[0], int(words[1]))
            return {}
        if word == "terms":
            return library.terms()
        if word == "flag":
            library.barrier()
            return {"seconds": library.one_way_flag(int(words[0]))}
        if word == "release":
            library.release()
            return {}
        raise ValueError(f"unknown command {word!r}")

    def _window(self, iterations: int) -> float:
        self.library.barrier()
        return self.library.loop(iterations)


def _refusal(error: Exception) -> str:
    """Return an error's first line; the rest is a trace, which has no place in a table."""
    kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0][:300]


def serve(line: Line, library: Library) -> None:
    """Answer commands until told to quit or until the other end is gone."""
    worker = Worker(library)
    line.send_reply({"version": library.version(), "pid": os.getpid()})
    while (command := line.receive()) not in ("", "quit"):
        line.send_reply(worker.run(command))


def main(arguments: list[str]) -> None:
    """Pin, join the group, serve."""
    config = WorkerConfig(**json.loads(arguments[0]), rank=int(arguments[1]))
    if config.cpus is not None:
        os.sched_setaffinity(0, {config.cpus[config.rank]})
    torch.set_num_threads(1)
    line = connect(config.socket_path, config.rank)
    try:
        library = _ALL[config.library](config)
    except Exception as error:
        line.send_reply({"error": _refusal(error)})
        raise SystemExit(1) from error
    serve(line, library)
    line.close()
    library.close()


if __name__ == "__main__":
    main(sys.argv[1:])
