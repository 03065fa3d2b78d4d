# SPDX-License-Identifier: Apache-2.0
"""The resources that this process holds, to be compared before and after a test."""

import gc
import time
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


def describe_more_held(before: Held) -> str:
    """Return what is held now and was not before, in words; threads may take a moment to let go."""
    end = time.monotonic() + LATE_S
    while (after := list_held()) != before and time.monotonic() < end:
        time.sleep(0.02)
    return "" if after == before else f"held {before} before and {after} after"
