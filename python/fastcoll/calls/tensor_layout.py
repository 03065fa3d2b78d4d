# SPDX-License-Identifier: Apache-2.0
"""Shows C++ the types of torch and NumPy, and the layout of torch's tensors by samples.

Decides the sample tensors and the facts that go with them. Must not know how the fast path uses
them; see csrc/python/tensor_layout.h.
"""

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fastcoll.native import _C
from fastcoll.types import REDUCE_OPS

_Sample = tuple[torch.Tensor, int, int, int, int, int, int, int]


def learn_tensor_layout() -> bool:
    """Let C++ learn the layout of this torch's tensors.

    Returns:
        Whether all of it was found. If not, C++ reads no tensor: every call takes the Python path,
        which is slower and gives the same results.
    """
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            return _C.learn_tensor_layout(tuple(_samples()))
    except (AttributeError, RuntimeError, TypeError):  # a torch that answers otherwise
        return False


def _samples() -> list[_Sample]:
    """Return samples that differ in every fact to be found; see csrc/python/tensor_layout.h."""
    plain = torch.zeros(5, device="cpu")
    with torch.inference_mode():
        inference = torch.zeros(6, device="cpu")
    numbers = torch.zeros(7, device="cpu", dtype=torch.complex64)
    # Its memory is not torch's: elsewhere the address of the memory stands in the storage twice.
    borrowed = torch.from_numpy(np.zeros(8, np.int16))
    for times, tensor in ((3, plain), (7, numbers), (4, borrowed)):
        for _ in range(times):
            tensor.zero_()
    apart = plain.data  # the same storage, a counter of its own
    for _ in range(9):
        apart.zero_()
    return [
        _sample(plain, 1),
        _sample(inference, 0),
        _sample(plain.detach(), 1),
        _sample(torch._neg_view(plain), 1),
        _sample(apart, 2),
        _sample(numbers.conj(), 3),
        _sample(borrowed[2:], 4),
    ]


def _sample(tensor: torch.Tensor, counter: int) -> _Sample:
    """Return a tensor with torch's answers about it; tensors of one `counter` share theirs."""
    storage = tensor.untyped_storage()
    return (
        tensor,
        tensor._cdata,
        storage._cdata,
        storage.data_ptr(),
        storage.nbytes(),
        torch._C._dispatch_keys(tensor).raw_repr(),
        counter,
        tensor._version if counter else 0,
    )


def learn_gpu_keys(device: int) -> bool:
    """Let C++ learn the dispatch keys of tensors on a GPU.

    Returns:
        Whether torch told them. If not, C++ takes no call on GPUs.
    """
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            plain = _empty_on(device)
            with torch.inference_mode():
                inference = _empty_on(device)
            keys = [torch._C._dispatch_keys(one).raw_repr() for one in (plain, inference)]
    except (AssertionError, AttributeError, RuntimeError, TypeError):
        return False
    _C.learn_gpu_keys(*keys)
    return True


def _empty_on(device: int) -> torch.Tensor:
    return torch.empty(0, device=f"cuda:{device}")


def show_types() -> bool:
    """Show C++ the types of a call's arguments; return whether it knows this torch's tensors."""
    reads_tensors = learn_tensor_layout()
    _C.set_tensor_types((torch.Tensor, torch.nn.Parameter))
    _C.set_numpy_type(np.ndarray)
    _C.set_numpy_integers(tuple({np.dtype(code).type for code in np.typecodes["AllInteger"]}))
    _C.set_reduce_ops(REDUCE_OPS)
    return reads_tensors
