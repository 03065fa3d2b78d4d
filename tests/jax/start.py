# SPDX-License-Identifier: Apache-2.0
"""JAX on a rank of the tests."""

from typing import Any

from tests.support.harness import Rank

COMPILE_S = 300.0  # XLA compiles on every rank, and a loaded machine delays one of them


def start_jax(rank: Rank) -> tuple[Any, Any]:
    """Return JAX and fastcoll's verbs for it, with arrays of 64 bits."""
    import jax

    import fastcoll.jax

    jax.config.update("jax_enable_x64", True)
    rank.comm.set_timeout(COMPILE_S / 3)
    return jax, fastcoll.jax
