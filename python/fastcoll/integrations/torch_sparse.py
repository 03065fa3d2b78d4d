# SPDX-License-Identifier: Apache-2.0
"""The sum of sparse tensors over the ranks, as Gloo has it.

Decides how a sparse sum becomes gathers of indices and values. Must not know how these are
carried out.
"""

from functools import partial

import torch

from fastcoll.calls.group import BaseGroup
from fastcoll.calls.work import Work
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import ReduceOp


def sum_sparse(
    comm: BaseGroup, tensor: torch.Tensor, op: object, async_op: bool, limit_s: float | None
) -> Work | None:
    """Sum COO tensors of one shape over all ranks, in place. Collective.

    Every rank gathers the non-zero elements of all ranks and adds them up in rank order. So a rank
    moves as many bytes as all non-zero elements have.

    Raises:
        UnsupportedError: `op` is not SUM.
        UsageError: The shapes differ between the ranks; every rank raises it.
        DesyncError: The dtypes or numbers of dimensions differ.
    """
    if op != ReduceOp.SUM:
        raise UnsupportedError(f"sparse tensors can be summed; {op} has no meaning for them")
    steps = partial(_sum, comm, tensor, limit_s)
    return comm.issue_steps(steps, [tensor], "all_reduce of a sparse tensor", async_op)


def _sum(comm: BaseGroup, tensor: torch.Tensor, limit_s: float | None) -> None:
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    rows = comm.gather_words([mine._nnz(), mine.sparse_dim(), *mine.shape], limit_s)
    counts = [row[0] for row in rows]
    if any(row[1:] != rows[0][1:] for row in rows):
        shapes = "; ".join(f"rank {rank} has {tuple(row[2:])}" for rank, row in enumerate(rows))
        raise UsageError(f"sparse tensors of one shape can be summed, but {shapes}")
    shape = values.shape[1:]
    element_bytes = (
        mine.sparse_dim() * indices.element_size() + shape.numel() * values.element_size()
    )
    all_indices, all_values = comm.allocated(
        lambda: (
            [indices.new_empty((mine.sparse_dim(), count)) for count in counts],
            [values.new_empty((count, *shape)) for count in counts],
        ),
        sum(counts) * element_bytes,
    )
    comm.all_gather(all_indices, indices, timeout_s=limit_s)
    comm.all_gather(all_values, values, timeout_s=limit_s)
    whole = (torch.cat(all_indices, 1), torch.cat(all_values), mine.shape)
    total = torch.sparse_coo_tensor(*whole, check_invariants=False)
    tensor.copy_(total.coalesce())
