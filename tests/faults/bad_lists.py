# SPDX-License-Identifier: Apache-2.0
"""Mistakes in lists, parts, split sizes and transfers; see bad_arguments.py."""

import torch
from torch.distributed import ReduceOp

from tests.faults.bad_arguments import Mistake


def mistakes_of_lists(world: int) -> dict[str, Mistake]:
    """Lists, roots and parts that are refused."""
    some, line = torch.ones(4), torch.arange(8.0 * world)
    rows = [torch.ones(4) for _ in range(world)]
    return {
        "too few outputs": (lambda c: c.all_gather(rows[1:], some), "tensor_list ... ranks"),
        "no list": (lambda c: c.all_gather(line, some), "tensor_list ... list"),
        "own size differs": (
            lambda c: c.all_gather([torch.ones(5) for _ in rows], some),
            "tensor_list ... 5 ... 4",
        ),
        "dtypes": (lambda c: c.all_gather([r.double() for r in rows], some), "dtype ... float64"),
        "gather, no list": (lambda c: c.gather(some, None, c.rank), "gather_list ... NoneType"),
        "gather, list elsewhere": (
            lambda c: c.gather(some, rows, (c.rank + 1) % world),
            "gather_list ... only",
        ),
        "gather_single, none": (
            lambda c: c.gather_single(some, None, c.rank),
            "gather_tensor ... NoneType",
        ),
        "gather_single, size": (
            lambda c: c.gather_single(some, torch.ones(5 * world), c.rank),
            "part of gather_tensor ... 5 ... 4",
        ),
        "gather_single, other's part": (
            lambda c: (
                c.gather_single(line[4 * (c.rank - 1) :][:4], line[: 4 * world], c.rank)
                if c.rank
                else c.gather_single(line[1:5], line[: 4 * world], c.rank)
            ),
            "overlap",
        ),
        "gather_single, not quite its part": (
            lambda c: c.gather_single(line[4 * c.rank :][:8:2], line[::2], c.rank),
            "overlap",
        ),
    }


def mistakes_of_roots(world: int) -> dict[str, Mistake]:
    """Roots that are none, and parts of several sizes."""
    some, rows = torch.ones(4), [torch.ones(4) for _ in range(world)]
    return {
        "gather, root": (lambda c: c.gather(some, rows, world), f"dst ... {world}"),
        "scatter, root": (lambda c: c.scatter(some, rows, "0"), "src ... '0'"),
        "scatter, uneven": (
            lambda c: c.scatter(
                torch.ones(1), [torch.ones(1 + (r != c.rank)) for r in range(world)], c.rank
            ),
            "scatter ... one size",
        ),
        "reduce, root": (lambda c: c.reduce(some, -1), "dst ... -1"),
        "reduce, ring": (
            lambda c: c.reduce(some, 0, algorithm="chain"),
            "UnsupportedError: reduce ... two_shot",
        ),
    }


def mistakes_of_splits(world: int) -> dict[str, Mistake]:
    """Split sizes and overlapping memory that are refused."""
    some, line = torch.ones(4), torch.arange(8.0 * world)
    rows = [torch.ones(4) for _ in range(world)]
    single = lambda *args: lambda comm: comm.all_to_all_single(*args)  # noqa: E731
    return {
        "the same output twice": (lambda c: c.all_gather([some] * world, line[:4]), "overlap"),
        "output over input": (single(line, line), "overlap"),
        "output over a part of input": (
            single(line[: 4 * world], line[world : 5 * world]),
            "overlap",
        ),
        "rows": (single(torch.ones(world + 1), torch.ones(world + 1)), "rows ... split_sizes"),
        "sizes": (single(torch.ones(2 * world), torch.ones(world)), "elements"),
        "splits' sum": (single(line.clone(), line, None, [1] * world), "add up ... input"),
        "splits' number": (single(line.clone(), line, [8 * world], None), "output_split_sizes"),
        "splits below 0": (
            single(line.clone(), line, None, [8 * world + 1, -1, *[0] * (world - 2)]),
            "input_split_sizes",
        ),
        "splits no numbers": (single(line.clone(), line, None, ["a"] * world), "integers"),
        "to itself": (
            lambda c: c.all_to_all(
                [torch.ones(2) for _ in rows], [torch.ones(1 + (r != c.rank)) for r in range(world)]
            ),
            "this one ... expects 2",
        ),
        "no dimension": (single(torch.tensor(1.0), torch.tensor(1.0)), "dimension"),
        "expanded output": (
            lambda c: c.all_gather([torch.ones(1).expand(4)] * world, some),
            "expanded",
        ),
    }


def mistakes_without_an_output(world: int) -> dict[str, Mistake]:
    """Calls that make their output, for which the ranks first gather sizes: refused before that."""
    line = torch.arange(8.0 * world)
    single = lambda *args: lambda comm: comm.all_to_all_single(*args)  # noqa: E731
    return {
        "no output, no splits": (single(None, line), "input_split_sizes"),
        "no output, splits below 0": (
            single(None, line, None, [8 * world + 1, -1, *[0] * (world - 2)]),
            "input_split_sizes",
        ),
        "no output, splits no numbers": (single(None, line, None, ["a"] * world), "integers"),
        "no output, no limit": (
            lambda c: c.all_to_all_single(None, line, None, [8] * world, timeout_s=0),
            "timeout_s",
        ),
    }


def mistakes_of_coalesced_calls(world: int) -> dict[str, Mistake]:
    """Lists of tensors that one call does not take."""
    some, whole = torch.ones(4), torch.ones(4 * world)
    line = torch.ones(8 * world)
    return {
        "no list": (lambda c: c.all_reduce_coalesced(some), "tensors ... list ... Tensor"),
        "empty": (lambda c: c.all_reduce_coalesced([]), "tensors ... empty"),
        "lengths": (
            lambda c: c.all_gather_into_tensor_coalesced([whole], [some, some]),
            "inputs has 2 ... outputs has 1",
        ),
        "the same twice": (lambda c: c.all_reduce_coalesced([some, some]), "overlap"),
        "overlap": (lambda c: c.all_reduce_coalesced([line[:5], line[4:]]), "overlap"),
        "output over another's input": (
            lambda c: c.reduce_scatter_tensor_coalesced(
                [some, line[:4]], [line[: 4 * world], whole]
            ),
            "overlap",
        ),
        "sizes": (
            lambda c: c.all_gather_into_tensor_coalesced([whole, torch.ones(1)], [some, some[:3]]),
            "tensor 1 ... output_tensor",
        ),
        "dtypes": (
            lambda c: c.reduce_scatter_tensor_coalesced([some], [whole.double()]),
            "tensor 0 ... float64",
        ),
        "operation": (
            lambda c: c.all_reduce_coalesced(
                [torch.ones(2), torch.ones(2, dtype=torch.bool)], ReduceOp.AVG
            ),
            "UnsupportedError: tensor 1 ... AVG ... bool",
        ),
        "algorithm": (
            lambda c: c.all_reduce_coalesced([some], algorithm="chain"),
            "UnsupportedError: lists ... one_shot ... two_shot",
        ),
        "no tensor": (lambda c: c.all_reduce_coalesced([some, 3]), "tensor 1 ... int"),
    }


def mistakes_of_transfers(world: int) -> dict[str, Mistake]:
    """Ranks, tags, tensors and limits that no message can have."""
    some = torch.ones(3)
    return {
        "no such rank": (lambda c: c.send(some, world), f"dst={world}"),
        "a rank below 0": (lambda c: c.recv(some, -1), "src=-1"),
        "nobody": (lambda c: c.send(some, None), "dst"),
        "a tag of text": (lambda c: c.isend(some, world - 1, "a"), "tag"),
        "a tag below 0": (lambda c: c.irecv(some, world - 1, -1), "tag"),
        "a message in a list": (lambda c: c.send([1.0], 0), "list"),
        "room that is expanded": (lambda c: c.recv(torch.ones(1).expand(3), world - 1), "expanded"),
        "a limit of no time": (lambda c: c.send(some, world - 1, timeout_s=0), "timeout_s"),
    }


def mistakes_of_objects(world: int) -> dict[str, Mistake]:
    """Lists of objects that are no lists, or of another length."""
    return {
        "gathered in too long a list": (
            lambda c: c.all_gather_object([None] * (world + 1), 1),
            "object_list",
        ),
        "gathered in no list": (lambda c: c.gather_object(1, None, c.rank), "object_gather_list"),
        "a root of objects": (lambda c: c.broadcast_object_list([1], world), f"src={world}"),
        "scattered to no place": (
            lambda c: c.scatter_object_list([], [1] * world, c.rank),
            "output",
        ),
        "too few are scattered": (
            lambda c: c.scatter_object_list([None], [1] * (world - 1), c.rank),
            "input",
        ),
        "a tuple is sent": (lambda c: c.send_object_list((1, 2), 0), "object_list ... tuple"),
        "objects to no rank": (lambda c: c.send_object_list([1], world), f"dst={world}"),
        "received in no list": (lambda c: c.recv_object_list(None, 0), "object_list ... NoneType"),
    }
