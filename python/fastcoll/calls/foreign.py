# SPDX-License-Identifier: Apache-2.0
"""Arrays that are neither torch's nor NumPy's: CuPy's on GPUs, JAX's and others' on the CPU.

Decides how a tensor is laid on their memory, and the stream of a call on them. It is the stream in
which their library works now. Must not know verbs or ranks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fastcoll.errors import UnsupportedError

_LEGACY = 1  # the interface's name of the default stream, as 0 would say nothing
_UNORDERED = -1  # of DLPack's protocol: the consumer orders the streams itself
_CPU = 1  # DLPack's code
_ERRORS = (AssertionError, AttributeError, BufferError, RuntimeError, TypeError, ValueError)


class Placed(Protocol):
    """An argument, as far as streams go."""

    @property
    def stream(self) -> int | None:
        """The stream that its library works in; None: torch's current one."""


def is_foreign(array: object) -> bool:
    """Return whether it is an array of CuPy's kind."""
    return not isinstance(array, torch.Tensor) and hasattr(array, "__cuda_array_interface__")


def as_tensor(array: Any, name: str) -> torch.Tensor:
    """Return a tensor on the same memory of a GPU, which keeps the array alive.

    Raises:
        UnsupportedError: There can be none.
    """
    kind = type(array).__name__
    try:
        if hasattr(array, "__dlpack__"):  # it knows more types and other devices
            tensor = torch.from_dlpack(array.__dlpack__(stream=_UNORDERED))
        else:
            tensor = torch.as_tensor(array, device="cuda")
    except _ERRORS as error:
        raise UnsupportedError(f"{name}, a {kind}, can't be taken as a tensor: {error}") from error
    if tensor.numel() and tensor.data_ptr() != array.__cuda_array_interface__["data"][0]:
        raise UnsupportedError(
            f"{name}, a {kind}, is on another GPU than torch's current one, so torch copied it: "
            "call torch.cuda.set_device first"
        )
    return tensor


def has_dlpack(array: object) -> bool:
    """Return whether it is an array of a library that shares memory by DLPack."""
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


def on_cpu(array: Any, name: str) -> torch.Tensor | np.ndarray[Any, Any]:
    """Return NumPy's array on the same memory of the CPU, a tensor where NumPy lacks the type.

    It waits until the elements are there, and keeps the array alive.

    Raises:
        UnsupportedError: There can be none, or the memory is not the CPU's.
    """
    kind = type(array).__name__
    try:
        device = int(array.__dlpack_device__()[0])
        if device == _CPU:
            try:
                return np.from_dlpack(array)
            except (BufferError, RuntimeError):
                return torch.from_dlpack(array)
    except _ERRORS as error:
        raise UnsupportedError(f"{name}, a {kind}, can't be taken as an array: {error}") from error
    raise UnsupportedError(
        f"{name}, a {kind}, is on a device of DLPack's type {device}; it must be on the CPU"
    )


def stream_of(arrays: Sequence[Placed], device: int) -> Any:
    """Return the stream in which a call on these arrays runs; None: torch's current one."""
    pointer = next((one.stream for one in arrays if one.stream is not None), None)
    return None if pointer is None else _stream(pointer, device)


def _stream(pointer: int, device: int) -> Any:
    if pointer == _LEGACY:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def on_producers_stream(arrays: Sequence[Placed], device: int) -> Iterator[None]:
    """Let their stream be the current one.

    A call may have tensors, too, or arrays of several libraries. Then it comes behind the current
    work of all their streams, and they go on behind it. Nothing else is ordered: a stream that is
    being captured can't wait for one that is not.
    """
    main = stream_of(arrays, device)
    if main is None:
        yield
        return
    current = torch.cuda.current_stream(device)
    pointers = {one.stream for one in arrays}
    others = [current if one is None else _stream(one, device) for one in pointers]
    others = [one for one in others if one.cuda_stream != main.cuda_stream]
    for one in others:
        main.wait_stream(one)
    with torch.cuda.stream(main):
        yield
    for one in others:
        one.wait_stream(main)
