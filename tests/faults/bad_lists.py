# SPDX-License-Identifier: Apache-2.0
"""Mistakes in lists, parts and split sizes; see bad_arguments.py."""

import torch
from torch.distributed import ReduceOp

from tests.faults.bad_arguments import UNSUPPORTED, USAGE, Mistake


def mistakes_of_lists(world: int) -> dict[str, Mistake]:
    """Lists, roots and parts that are refused."""
    some, line = torch.ones(4), torch.arange(8.0 * world)
    rows = [torch.ones(4) for _ in range(world)]
    return {
        "too few outputs": (
            lambda c: c.all_gather(rows[1:], some),
            USAGE,
            ("tensor_list", "ranks"),
        ),
        "no list": (lambda c: c.all_gather(line, some), USAGE, ("tensor_list", "list")),
        "own size differs": (
            lambda c: c.all_gather([torch.ones(5) for _ in rows], some),
            USAGE,
            ("tensor_list", "5", "4"),
        ),
        "dtypes": (
            lambda c: c.all_gather([r.double() for r in rows], some),
            USAGE,
            ("dtype", "float64"),
        ),
        "gather, no list": (
            lambda c: c.gather(some, None, c.rank),
            USAGE,
            ("gather_list", "NoneType"),
        ),
        "gather, list elsewhere": (
            lambda c: c.gather(some, rows, (c.rank + 1) % world),
            USAGE,
            ("gather_list", "only"),
        ),
        "gather_single, none": (
            lambda c: c.gather_single(some, None, c.rank),
            USAGE,
            ("gather_tensor", "NoneType"),
        ),
        "gather_single, size": (
            lambda c: c.gather_single(some, torch.ones(5 * world), c.rank),
            USAGE,
            ("part of gather_tensor", "5", "4"),
        ),
        "gather_single, other's part": (
            lambda c: (
                c.gather_single(line[4 * (c.rank - 1) :][:4], line[: 4 * world], c.rank)
                if c.rank
                else c.gather_single(line[1:5], line[: 4 * world], c.rank)
            ),
            USAGE,
            ("overlap",),
        ),
        "gather_single, not quite its part": (
            lambda c: c.gather_single(line[4 * c.rank :][:8:2], line[::2], c.rank),
            USAGE,
            ("overlap",),
        ),
    }


def mistakes_of_roots(world: int) -> dict[str, Mistake]:
    """Roots that are none, and parts of several sizes."""
    some, rows = torch.ones(4), [torch.ones(4) for _ in range(world)]
    return {
        "gather, root": (lambda c: c.gather(some, rows, world), USAGE, ("dst", f"{world}")),
        "scatter, root": (lambda c: c.scatter(some, rows, "0"), USAGE, ("src", "'0'")),
        "scatter, uneven": (
            lambda c: c.scatter(
                torch.ones(1), [torch.ones(1 + (r != c.rank)) for r in range(world)], c.rank
            ),
            USAGE,
            ("scatter", "one size"),
        ),
        "reduce, root": (lambda c: c.reduce(some, -1), USAGE, ("dst", "-1")),
        "reduce, ring": (
            lambda c: c.reduce(some, 0, algorithm="chain"),
            UNSUPPORTED,
            ("reduce", "two_shot"),
        ),
    }


def mistakes_of_splits(world: int) -> dict[str, Mistake]:
    """Split sizes and overlapping memory that are refused."""
    some, line = torch.ones(4), torch.arange(8.0 * world)
    rows = [torch.ones(4) for _ in range(world)]
    single = lambda *args: lambda comm: comm.all_to_all_single(*args)  # noqa: E731
    return {
        "the same output twice": (
            lambda c: c.all_gather([some] * world, line[:4]),
            USAGE,
            ("overlap",),
        ),
        "output over input": (single(line, line), USAGE, ("overlap",)),
        "output over a part of input": (
            single(line[: 4 * world], line[world : 5 * world]),
            USAGE,
            ("overlap",),
        ),
        "rows": (
            single(torch.ones(world + 1), torch.ones(world + 1)),
            USAGE,
            ("rows", "split_sizes"),
        ),
        "sizes": (single(torch.ones(2 * world), torch.ones(world)), USAGE, ("elements",)),
        "splits' sum": (single(line.clone(), line, None, [1] * world), USAGE, ("add up", "input")),
        "splits' number": (
            single(line.clone(), line, [8 * world], None),
            USAGE,
            ("output_split_sizes",),
        ),
        "splits below 0": (
            single(line.clone(), line, None, [8 * world + 1, -1, *[0] * (world - 2)]),
            USAGE,
            ("input_split_sizes",),
        ),
        "splits no numbers": (
            single(line.clone(), line, None, ["a"] * world),
            USAGE,
            ("integers",),
        ),
        "to itself": (
            lambda c: c.all_to_all(
                [torch.ones(2) for _ in rows], [torch.ones(1 + (r != c.rank)) for r in range(world)]
            ),
            USAGE,
            ("this one", "expects 2"),
        ),
        "no dimension": (single(torch.tensor(1.0), torch.tensor(1.0)), USAGE, ("dimension",)),
        "expanded output": (
            lambda c: c.all_gather([torch.ones(1).expand(4)] * world, some),
            USAGE,
            ("expanded",),
        ),
    }


def mistakes_without_an_output(world: int) -> dict[str, Mistake]:
    """Calls that make their output, for which the ranks first gather sizes: refused before that."""
    line = torch.arange(8.0 * world)
    single = lambda *args: lambda comm: comm.all_to_all_single(*args)  # noqa: E731
    return {
        "no output, no splits": (single(None, line), USAGE, ("input_split_sizes",)),
        "no output, splits below 0": (
            single(None, line, None, [8 * world + 1, -1, *[0] * (world - 2)]),
            USAGE,
            ("input_split_sizes",),
        ),
        "no output, splits no numbers": (
            single(None, line, None, ["a"] * world),
            USAGE,
            ("integers",),
        ),
        "no output, no limit": (
            lambda c: c.all_to_all_single(None, line, None, [8] * world, timeout_s=0),
            USAGE,
            ("timeout_s",),
        ),
    }


def mistakes_of_coalesced_calls(world: int) -> dict[str, Mistake]:
    """Lists of tensors that one call does not take."""
    some, whole = torch.ones(4), torch.ones(4 * world)
    line = torch.ones(8 * world)
    return {
        "no list": (lambda c: c.all_reduce_coalesced(some), USAGE, ("tensors", "list", "Tensor")),
        "empty": (lambda c: c.all_reduce_coalesced([]), USAGE, ("tensors", "empty")),
        "lengths": (
            lambda c: c.all_gather_into_tensor_coalesced([whole], [some, some]),
            USAGE,
            ("inputs has 2", "outputs has 1"),
        ),
        "the same twice": (lambda c: c.all_reduce_coalesced([some, some]), USAGE, ("overlap",)),
        "overlap": (lambda c: c.all_reduce_coalesced([line[:5], line[4:]]), USAGE, ("overlap",)),
        "output over another's input": (
            lambda c: c.reduce_scatter_tensor_coalesced(
                [some, line[:4]], [line[: 4 * world], whole]
            ),
            USAGE,
            ("overlap",),
        ),
        "sizes": (
            lambda c: c.all_gather_into_tensor_coalesced([whole, torch.ones(1)], [some, some[:3]]),
            USAGE,
            ("tensor 1", "output_tensor"),
        ),
        "dtypes": (
            lambda c: c.reduce_scatter_tensor_coalesced([some], [whole.double()]),
            USAGE,
            ("tensor 0", "float64"),
        ),
        "operation": (
            lambda c: c.all_reduce_coalesced(
                [torch.ones(2), torch.ones(2, dtype=torch.bool)], ReduceOp.AVG
            ),
            UNSUPPORTED,
            ("tensor 1", "AVG", "bool"),
        ),
        "algorithm": (
            lambda c: c.all_reduce_coalesced([some], algorithm="chain"),
            UNSUPPORTED,
            ("lists", "one_shot", "two_shot"),
        ),
        "no tensor": (lambda c: c.all_reduce_coalesced([some, 3]), USAGE, ("tensor 1", "int")),
    }
