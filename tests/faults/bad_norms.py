# SPDX-License-Identifier: Apache-2.0
"""Mistakes in `then=RMSNorm(...)`; see bad_arguments.py."""

from typing import Any

import torch

import fastcoll
from tests.faults.bad_arguments import Call, Mistake


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (4, 64), dtype=dtype)


def summed(x: torch.Tensor, *args: Any, norm: Any = None, **options: Any) -> Call:
    """A sum of `x` with a norm, of all defaults if none is given."""
    then = fastcoll.RMSNorm() if norm is None else norm
    return lambda comm: comm.all_reduce(x, *args, then=then, **options)


def norm_of(**given: Any) -> Call:
    return summed(rows(), norm=fastcoll.RMSNorm(**given))


def coded(scales: torch.Tensor, dtype: torch.dtype = torch.int8) -> Call:
    return summed(rows(), norm=fastcoll.RMSNorm(scales=scales), out=rows(dtype=dtype))


def mistakes_of_norms(world: int) -> dict[str, Mistake]:
    """Norms that do not fit the rows, and rows that have no norm."""
    del world
    x = rows()
    return {
        "another class": (summed(x, norm=len), "Epilogue, not"),
        "a short weight": (norm_of(weight=rows(63)), "(63,) of float32; it needs (64,)"),
        "a weight of integers": (
            norm_of(weight=rows(64, dtype=torch.int32)),
            "needs (64,) of float32, float16, bfloat16",
        ),
        "a residual's shape": (norm_of(residual=rows(64)), "it needs (4, 64)"),
        "a residual's dtype": (
            norm_of(residual=rows(dtype=torch.bfloat16)),
            "of bfloat16; it needs (4, 64) of float32",
        ),
        "a strided residual": (norm_of(residual=rows(64, 4).t()), "not contiguous"),
        "a residual elsewhere": (
            norm_of(residual=rows().to("meta")),
            "UnsupportedError: meta tensor",
        ),
        "sums of another shape": (
            norm_of(residual=rows(), summed=rows(2, 128)),
            "summed of then has shape (2, 128)",
        ),
        "no rows": (summed(torch.tensor(1.0)), "no rows to normalise"),
        "rows of no columns": (summed(rows(4, 0)), "no rows to normalise"),
        "sums over the input": (
            summed(x, norm=fastcoll.RMSNorm(residual=rows(), summed=x)),
            "summed overlaps",
        ),
        "the residual is the input": (
            summed(x, norm=fastcoll.RMSNorm(residual=x)),
            "residual overlaps",
        ),
        "another operation": (
            summed(x, "max"),
            "UnsupportedError: SUM or AVG of float32, float16 or bfloat16, not MAX of float32",
        ),
        "another dtype": (
            summed(rows(dtype=torch.float64)),
            "UnsupportedError: not SUM of float64",
        ),
        "scales of another size": (coded(rows(3)), "(3,) of float32; it needs (4,)"),
        "scales without codes": (norm_of(scales=rows(4)), "is int8 or float8_e4m3fn"),
        "codes of another dtype": (coded(rows(4), torch.int16), "need one dtype"),
        "a negative eps": (
            lambda comm: norm_of(eps=-1.0)(comm),
            "eps must be a number from 0 on",
        ),
        "an eps in words": (lambda comm: norm_of(eps="small")(comm), "eps must be a number"),
        "an offset in words": (lambda comm: norm_of(offset="1")(comm), "offset must be a number"),
        "a weight that is no tensor": (
            lambda comm: fastcoll.RMSNorm(3),
            "weight must be a tensor ... int",
        ),
    }
