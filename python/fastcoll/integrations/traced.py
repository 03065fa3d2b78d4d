# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The functions that torch's compiler traces in place of fastcoll's.

Decides which calls can stand in a graph, as operators of `ops.py`; the others break the graph, and
run as ever. Imported only where the compiler is: see `compile.py`.

In a graph a tensor that requires grad gets one: the call is a step of the graph like any other.
Outside, the functions have no gradient. Autograd sees that they write their tensors, and a backward
pass that needs the former values raises. The differentiable functions there are those of `ops.py`.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fastcoll
from fastcoll.api import VERBS, moves, reductions
from fastcoll.api.groups import GroupLike
from fastcoll.integrations import graph_names, ops

_PREFIX = f"{fastcoll.__name__}."
# The compiler looks into these modules; vLLM traces its communicator with the model.
_TRACED = (
    __name__,
    ops.__name__,
    graph_names.__name__,
    "fastcoll.integrations.vllm_communicator",
)


def register() -> None:
    """Tell the compiler the function to trace in place of each of fastcoll's."""
    _skip_files()
    _import_all()
    _show_groups()
    _skip_functions()
    for constant in graph_names.CONSTANTS:
        torch.compiler.assume_constant_result(constant)
    for function, traced in (
        (reductions.all_reduce, all_reduce),
        (reductions.reduce_scatter_tensor, reduce_scatter_tensor),
        (moves.all_gather_into_tensor, all_gather_into_tensor),
        (moves.broadcast, broadcast),
        (moves.all_to_all_single, all_to_all_single),
    ):
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)


def _skip_files() -> None:
    """Let a call of fastcoll's Python functions break the graph: none of them is traced."""
    traced = {f"{name.rpartition('.')[2]}.py" for name in _TRACED}
    files = Path(fastcoll.__file__).parent.rglob("*.py")
    torch._dynamo.trace_rules.FORCE_SKIP_FILES.update(
        os.path.normpath(file) for file in files if file.name not in traced
    )


def _import_all() -> None:
    """Import what few programs need: the compiler skips only functions that are there by now."""
    for name in ("choose.schedules", "nodes.group", "nodes.making"):
        importlib.import_module(_PREFIX + name)


def _show_groups() -> None:
    """Let the compiler of torch 2.11 know groups in Python; later ones know every process group."""
    known: Any = getattr(torch._dynamo.variables.distributed, "ProcessGroupVariable", None)
    if known is not None:
        known.is_process_group = staticmethod(lambda value: isinstance(value, ProcessGroup))


def _skip_functions() -> None:
    """Let fastcoll's functions run uncompiled, with all that they call.

    The compiler meets every frame of a compiled program, also those that C++ starts. No file has
    the methods that dataclasses generate, and no rule by file covers functions of other packages.
    """
    types = torch._dynamo.types
    skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and name not in _TRACED:
            for function in _functions_of(module):
                torch._dynamo.eval_frame.set_code_exec_strategy(function.__code__, skip)
    for verb in VERBS.values():  # the modules hold the C functions of these names
        torch._dynamo.eval_frame.set_code_exec_strategy(verb.__code__, skip)


def _functions_of(holder: ModuleType | type) -> Iterator[FunctionType]:
    """Yield fastcoll's functions in a module or class, and in the classes that lie there."""
    for value in vars(holder).values():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, FunctionType):
            function = inspect.unwrap(value)
            # Not by __module__: decorators set it on functions of other packages.
            if str(function.__globals__.get("__name__")).startswith(_PREFIX):
                yield function
        elif isinstance(value, type) and value.__module__.startswith(_PREFIX):
            yield from _functions_of(value)


def _refuse(options: dict[str, object], source: object, target: object) -> None:
    """Break the graph at a call that can't stand in one.

    Such a call has options that no graph has, arrays, or tensors that do not fit together. The
    function itself then runs, and names the error.
    """
    asked = [name for name, value in options.items() if value and value != "auto"]
    if asked or not isinstance(source, Tensor) or not isinstance(target, Tensor):
        torch._dynamo.graph_break(
            msg="fastcoll: a call in a graph has tensors, and no async_op, then, algorithm, "
            "numerics or timeout_s"
        )
    elif source.dtype != target.dtype:
        torch._dynamo.graph_break(msg="fastcoll: input and output need one dtype")


def all_reduce(
    tensor: Tensor,
    op: object = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    out: Tensor | None = None,
    **options: object,
) -> None:
    target = tensor if out is None else out
    _refuse({"async_op": async_op, **options}, tensor, target)
    if target.shape != tensor.shape:
        torch._dynamo.graph_break(msg="fastcoll: out needs the shape of tensor")
    target.copy_(ops.all_reduce(tensor, op, group))


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: object = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    **options: object,
) -> None:
    _refuse({"async_op": async_op, **options}, input, output)
    part = ops.reduce_scatter(input.reshape(-1), op, group)
    output.copy_(part.reshape(output.shape))


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    **options: object,
) -> None:
    _refuse({"async_op": async_op, **options}, input_tensor, output_tensor)
    whole = ops.all_gather(input_tensor.reshape(-1), group)
    output_tensor.copy_(whole.reshape(output_tensor.shape))


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    **options: object,
) -> None:
    _refuse({"async_op": async_op, **options}, tensor, tensor)
    if src is None or "group_src" in options:  # perhaps 0
        torch._dynamo.graph_break(msg="fastcoll: a broadcast in a graph has a src")
    assert src is not None
    tensor.copy_(ops.broadcast(tensor, src, group))


def all_to_all_single(
    output: Tensor | None,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    **options: object,
) -> None:
    _refuse({"async_op": async_op, **options}, input, output)
    assert output is not None, "its size would be known after the call only: refused above"
    rows = ops.all_to_all(input, output_split_sizes, input_split_sizes, group)
    output.copy_(rows.reshape(output.shape))
