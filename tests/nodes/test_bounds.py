# SPDX-License-Identifier: Apache-2.0
"""Reductions that the carrier may make: how far a result is from the exact one, by what is stated.

The unit u of a type is 2^-11 for float16, 2^-8 for bfloat16, 2^-24 for float32 and 2^-53 for
float64. With n ranks and m nodes, the error is at most

- SUM, half types, the default: (m + 1) u (|x_0| + |x_1| + ...)
- SUM, float32, float64, "fast": n u (|x_0| + |x_1| + ...)
- PRODUCT, half types, the default: 2 m u |x_0 x_1 ...|
- PRODUCT, float32, float64, "fast": n u |x_0 x_1 ...|

A node's result is rounded to the half type once, and so is each step of the carrier. Wider types
are rounded in each of n - 1 steps, whatever their order. One u more is for products of roundings.
"""

import numpy as np
import pytest
import torch

import fastcoll
from tests.nodes.test_verbs import Clusters
from tests.support import oracle
from tests.support.calls import REDUCTIONS, Call
from tests.support.harness import Pool, Rank
from tests.support.sites import across

LONG, SLOW = pytest.mark.long, pytest.mark.slow
MAPS = ["aabb", pytest.param("aaab", marks=LONG)]
MAPS += [pytest.param(nodes, marks=SLOW) for nodes in ("abc", "aabbcc")]
HALVES, WIDE = ("float16", "bfloat16"), ("float32", "float64")
NUMEL = 50_001  # beyond a packet: what travels in one has the same bits
OPS = ("SUM", "PRODUCT")


def numbers(dtype: str, op: str, numel: int, rank: int) -> np.ndarray:
    """The numbers that a rank gives; of a product neither 0 nor so much that it overflows."""
    rng = np.random.default_rng([rank, OPS.index(op)])
    values = rng.standard_normal(numel)
    if op == "PRODUCT":
        values = np.sign(values) * rng.uniform(0.5, 2, numel)
    return torch.tensor(values).to(getattr(torch, dtype)).double().numpy()


def perform(rank: Rank, verb: str, dtype: str, op: str, numerics: str | None) -> np.ndarray:
    """Make one call; where this rank gets nothing, nothing is returned."""
    comm, world = rank.comm, rank.world_size
    count = NUMEL * world if verb == "reduce_scatter" else NUMEL
    tensor = torch.tensor(numbers(dtype, op, count, rank.rank)).to(getattr(torch, dtype))
    how = getattr(fastcoll.ReduceOp, op)
    if verb == "reduce_scatter":
        output = tensor.new_empty(NUMEL)
        fastcoll.reduce_scatter_tensor(output, tensor, how, comm, numerics=numerics)
        return output.double().numpy()
    if verb == "reduce":
        fastcoll.reduce(tensor, world - 1, how, comm, numerics=numerics)
        return tensor.double().numpy() if rank.rank == world - 1 else np.empty(0)
    fastcoll.all_reduce(tensor, how, comm, numerics=numerics)
    return tensor.double().numpy()


def bound_and_exact(nodes: str, dtype: str, op: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    world, num_nodes, is_half = len(nodes), len(set(nodes)), dtype in HALVES
    unit = 2.0 ** -(oracle.FLOATS[dtype].mantissa_bits + 1)
    rows = [numbers(dtype, op, count, rank) for rank in range(world)]
    inputs = np.array(rows, np.longdouble)
    if op == "SUM":
        factor, exact, scale = num_nodes + 1, inputs.sum(0), np.abs(inputs).sum(0)
    else:
        factor, exact, scale = 2 * num_nodes, inputs.prod(0), np.abs(inputs.prod(0))
    return (factor if is_half else world) * unit * scale, exact


def check_bounds(pool: Pool, nodes: str, dtype: str) -> None:
    for verb in REDUCTIONS:
        for op in OPS:
            numerics = None if dtype in HALVES else "fast"
            results = pool.run(perform, verb, dtype, op, numerics)
            whole = np.concatenate(results) if verb == "reduce_scatter" else results[-1]
            bound, exact = bound_and_exact(nodes, dtype, op, whole.size)
            far = np.abs(whole - exact) / bound
            assert far.max() <= 1, f"{verb} {op}: {far.max():.3g} times the bound"
            if verb == "all_reduce":
                assert all((result == whole).all() for result in results), op
            if dtype in HALVES and verb != "reduce_scatter":  # where each rank adds nodes' results
                rounded = torch.tensor(exact.astype(float)).to(getattr(torch, dtype))
                once = rounded.double().numpy()
                assert (whole != once).any(), f"{verb} {op}: rounded once, not by the carrier"


@pytest.mark.parametrize("nodes", MAPS)
@pytest.mark.parametrize("dtype", [*HALVES, *WIDE])
def test_results_are_within_the_stated_bound(clusters: Clusters, nodes: str, dtype: str) -> None:
    check_bounds(clusters(nodes), nodes, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_average_of_half_types_has_the_same_bits(clusters: Clusters, dtype: str) -> None:
    """No carrier divides: what crosses are the nodes' sums with all their bits."""
    calls = [Call(verb, dtype, NUMEL, "AVG", numerics=None, seed=5) for verb in REDUCTIONS]
    across("aaab").on(clusters("aaab")).check(calls)
