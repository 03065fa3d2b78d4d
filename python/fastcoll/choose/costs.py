# SPDX-License-Identifier: Apache-2.0
"""The constants of the cost model on one kind of device.

Decides their names and units. The algorithms compute the cost of a call from them. Their values on
a machine come from shared.py, or from a tuning table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Alpha, beta and gamma of a machine (Hockney's model, with a term for the arithmetic)."""

    flag_us: float  # alpha: one rank's signal reaches another
    copy_us_per_byte: float  # beta: a copy in the rank's own memory
    peer_us_per_byte: float  # beta: a read of bytes that another rank wrote
    # Gamma: the extra cost of a peer's byte that is added, not copied.
    reduce_us_per_byte: float = 0.0
    # Alpha, for each rank that has no CPU of its own and waits to be scheduled.
    switch_us: float = 0.0
