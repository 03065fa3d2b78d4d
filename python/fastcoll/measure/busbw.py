# SPDX-License-Identifier: Apache-2.0
"""Bandwidths as nccl-tests defines them (its doc/PERFORMANCE.md).

`size_bytes` is the larger of a rank's input and output. For all_reduce, reduce and broadcast it is
the tensor; for reduce_scatter and scatter the input; for all_gather and gather the output.
For all_to_all it is either side, for sendrecv the sent message. `*_gbps` is 10^9 bytes a second.

The algbw is size / time. The busbw is algbw times the share of the size that every rank must move
at least. So it can be held against the bandwidth of one link for any number of ranks.
"""

from collections.abc import Callable

_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda world_size: 2 * (world_size - 1) / world_size,
    **dict.fromkeys(
        ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"),
        lambda world_size: (world_size - 1) / world_size,
    ),
    **dict.fromkeys(("reduce", "broadcast", "sendrecv"), lambda _: 1.0),
    "barrier": lambda _: 0.0,
}
VERBS = tuple(_FACTORS)


def bus_factor(verb: str, world_size: int) -> float:
    """Return busbw / algbw.

    Raises:
        ValueError: the verb is unknown.
    """
    if verb not in _FACTORS:
        raise ValueError(f"unknown verb {verb!r}; one of {', '.join(VERBS)}")
    return _FACTORS[verb](world_size)


def algbw_gbps(size_bytes: int, time_us: float) -> float:
    """Return the bytes of one call over its time."""
    return size_bytes / time_us / 1e3 if time_us > 0 else 0.0


def busbw_gbps(verb: str, size_bytes: int, time_us: float, world_size: int) -> float:
    """Return algbw corrected by `bus_factor`."""
    return algbw_gbps(size_bytes, time_us) * bus_factor(verb, world_size)
