# SPDX-License-Identifier: Apache-2.0
"""The resources that this process holds, to be compared before and after a test; and limits."""

import contextlib
import gc
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.harness import LATE_S

Held = tuple[list[str], int]  # the kinds of descriptors; the number of mappings of shared memory


def list_held() -> Held:
    """Return what this process holds, when all garbage is collected."""
    gc.collect()
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            kinds.append(str(entry.readlink()).split(":")[0])
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return sorted(kinds), Path("/proc/self/maps").read_text().count("memfd:")


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Let this process have no more than so much of a resource, as RLIMIT_AS."""
    limits = resource.getrlimit(what)
    resource.setrlimit(what, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, limits)


def describe_more_held(before: Held) -> str:
    """Return what is held now and was not before, in words; threads may take a moment to let go."""
    end = time.monotonic() + LATE_S
    while (after := list_held()) != before and time.monotonic() < end:
        time.sleep(0.02)
    return "" if after == before else f"held {before} before and {after} after"


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread be started: there are no addresses for its stack."""
    end, threads = threading.Event(), list[threading.Thread]()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used_bytes + (1 << 20)):
        try:
            with contextlib.suppress(RuntimeError):
                while True:  # those for which there are stacks of threads that have ended
                    thread = threading.Thread(target=end.wait)
                    thread.start()
                    threads.append(thread)
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join()
