# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""How torch's code generator takes the operators of `ops.py`: as collectives, like its own.

Inductor orders kernels by their inputs and by memory. That order may differ between ranks where
sizes do (split sizes, ragged batches). All ranks must make their calls in one order. Inductor
leaves the operators that it knows as collectives in the order of the program. Imported only where
the generator is: see `compile.py`.

The code calls an operator's body, not torch.ops, whose way through torch's dispatcher takes about
as long as a small all_reduce (c10d_direct.h).

Marking the operators as effects did not keep them in order (torch 2.13).
"""

from functools import partial
from typing import Any, cast

from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from fastcoll.integrations import ops


def register() -> None:
    """Register how each operator is lowered."""
    for operator in ops.OPERATORS:
        register_lowering(operator, type_promotion_kind=None)(partial(_collective, operator))


def _collective(operator: Any, x: ir.TensorBox, *terms: Any) -> ir.TensorBox | list[ir.TensorBox]:
    made = ir._CollectiveKernel.create_out_of_place(operator, x, *terms)
    if isinstance(made, list):
        _call_directly(operator, made[0].inputs[0])
        return [ir.TensorBox.create(one) for one in made]
    _call_directly(operator, made)
    return ir.TensorBox.create(cast(ir.IRNode, made))


def _call_directly(operator: Any, kernel: Any) -> None:
    kernel.python_kernel_name = f"torch.ops.fastcoll.{ops.DIRECT}.{operator.__name__.split('.')[0]}"
