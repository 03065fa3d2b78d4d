# SPDX-License-Identifier: Apache-2.0
"""Tensors that no call takes: a meta tensor, a sparse one, a subclass without memory, and others.

Decides what their errors advise. Must not know dtypes, verbs or ranks.
"""

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastcoll.errors import UnsupportedError, UsageError


def refuse_odd(tensor: torch.Tensor, name: str, gpu: bool) -> None:
    """Raise an error that says what to pass in place of a tensor, if no call can take it.

    Args:
        tensor: The tensor.
        name: The argument's name, for error texts.
        gpu: Whether the verb runs on GPUs.
    """
    if is_lazy(tensor):
        raise UsageError(
            f"{name} is a {type(tensor).__name__}, which has no shape yet: run its module once on "
            "an input, as a lazy module gets its shapes by that"
        )
    if tensor.is_meta:
        raise UnsupportedError(
            f"{name} is a meta tensor, which has no elements; make it on a device, as with "
            f"torch.empty_like({name}, device='cpu')"
        )
    if tensor.is_quantized:
        raise UnsupportedError(
            f"{name} is quantized; pass {name}.int_repr(), or {name}.dequantize() for a sum"
        )
    if tensor.device.type != "cpu" and not (gpu and tensor.is_cuda):
        places = "CPUs and CUDA devices" if gpu else "CPUs"
        raise UnsupportedError(
            f"{name} is on {tensor.device}; this verb takes tensors on {places}: pass {name}.cpu()"
        )
    if tensor.is_nested:
        raise UnsupportedError(f"{name} is a nested tensor; pass {name}.unbind() as a list")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} is {tensor.layout}; pass {name}.to_dense()")
    if isinstance(tensor, FakeTensor):
        raise UnsupportedError(
            f"{name} is a FakeTensor, which has no memory; where torch traces, as torch.export "
            "does, call the operators of fastcoll.integrations.ops"
        )
    if _is_wrapper(tensor):
        raise _is_subclass(tensor, name)


def _is_wrapper(tensor: object) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def without_memory(tensor: torch.Tensor, name: str) -> UnsupportedError:
    """Return the error of a tensor whose elements lie nowhere."""
    if is_functorch_wrapped_tensor(tensor) or type(tensor) is torch.Tensor:
        return UnsupportedError(
            f"{name} has no memory inside one of torch.func's transforms (vmap, grad, jvp, "
            "functionalize); use fastcoll.integrations.ops there, or call outside of them"
        )
    return _is_subclass(tensor, name)


def _is_subclass(tensor: torch.Tensor, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is a {type(tensor).__name__}, which has no memory of its own; pass the plain "
        "tensor inside (to_local() of a DTensor, get_data() of a MaskedTensor)"
    )
