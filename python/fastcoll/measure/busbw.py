# SPDX-License-Identifier: Apache-2.0
"""Bandwidths as nccl-tests defines them (its doc/PERFORMANCE.md).

`size_bytes` is the larger of what a rank gives and what it gets: the tensor of all_reduce and
broadcast, the input of reduce_scatter, the output of all_gather. `*_gbps` is 10^9 bytes a second.
algbw = size / time. busbw = algbw times the share of the size that every rank must move at least,
so that it can be held against the bandwidth of one link whatever the number of ranks.
"""

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


def bus_factor(verb: str, world_size: int) -> float:
    """Return busbw / algbw.

    Raises:
        ValueError: the verb is unknown.
    """
    if verb == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if verb in ("reduce_scatter", "all_gather"):
        return (world_size - 1) / world_size
    if verb == "broadcast":
        return 1.0
    if verb == "barrier":
        return 0.0
    raise ValueError(f"unknown verb {verb!r}; one of {', '.join(VERBS)}")


def algbw_gbps(size_bytes: int, time_us: float) -> float:
    """Return the bytes of one call over its time."""
    return size_bytes / time_us / 1e3 if time_us > 0 else 0.0


def busbw_gbps(verb: str, size_bytes: int, time_us: float, world_size: int) -> float:
    """Return algbw corrected by `bus_factor`."""
    return algbw_gbps(size_bytes, time_us) * bus_factor(verb, world_size)
