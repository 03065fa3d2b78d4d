# SPDX-License-Identifier: Apache-2.0
"""The memory of a user's array, and the dense copies that replace strided ones.

Decides which tensors and arrays are taken and how overlap is judged. Must not know verbs or
ranks.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from fastcoll.calls.foreign import as_tensor, has_dlpack, is_foreign, on_cpu
from fastcoll.calls.odd_tensors import refuse_odd, without_memory
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import FROM_TORCH, ITEMSIZE, MOVED, DType

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

_FROM_NUMPY = {dtype.name: dtype for dtype in DType}
_SHARING_WORK = 100_000  # steps to search for an overlap of strided arrays before assuming one


@dataclass(frozen=True, slots=True)
class ArrayView:
    """One array argument."""

    source: Array  # the user's array; of other libraries' ones, a tensor or NumPy's on its memory
    dtype: DType
    ptr: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]  # bytes between neighbours, by dimension
    numel: int
    dense: bool  # the elements lie one after another, in C order, as they mean
    writable: bool
    device: int = -1  # index of the GPU they lie on; -1 for the CPU
    # Where the library of an array of CuPy's kind works now; None: torch's current one.
    stream: int | None = None
    # Of PREMUL_SUM: a dense copy has the elements times this. None: as they are.
    factor: object = None
    kind: str = ""  # the user's type, if it is another library's

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def kind_of_elements(self) -> str:
        """The name of the user's dtype, also of one that is moved as integers."""
        is_moved = isinstance(self.source, torch.Tensor) and self.source.dtype in MOVED
        return str(self.source.dtype).removeprefix("torch.") if is_moved else self.dtype.name


def view(array: object, name: str, *, gpu: bool = False) -> ArrayView:
    """Return the memory and layout of a user's array.

    Args:
        array: A tensor on the CPU or a CUDA device, a NumPy array, or an array of CuPy's kind. On
            the CPU, too, one of a library with `__dlpack__`, as JAX.
        name: The argument's name, for error texts.
        gpu: Whether the verb runs on GPUs; else a tensor there is refused, as its address means
            nothing to a CPU.

    Raises:
        UsageError: It is none of these.
        UnsupportedError: It lies where fastcoll can't reach, or its dtype is unknown.
    """
    if isinstance(array, torch.Tensor):
        return _view_tensor(array, name, gpu)
    if isinstance(array, np.ndarray):
        return _view_numpy(array, name)
    if gpu and is_foreign(array):
        return _view_foreign(array, name)
    if has_dlpack(array):
        return _view_dlpack(array, name)
    raise UsageError(
        f"{name} must be a torch tensor or a NumPy array, not {type(array).__name__}: "
        f"{_suggest_call(array, name)}"
    )


def _suggest_call(array: object, name: str) -> str:
    """Return what a program can do with an object that is no array here."""
    if is_foreign(array):
        return f"this call takes none on a GPU; pass a copy on the CPU, as {name}.get() of CuPy"
    if isinstance(array, int | float | complex | list | tuple) or hasattr(array, "__array__"):
        return f"make one that receives the result, as {name} = torch.tensor({name})"
    return "Python objects go by all_gather_object, broadcast_object_list and their fellows"


def _view_foreign(array: Any, name: str) -> ArrayView:
    facts = array.__cuda_array_interface__
    found = _view_tensor(as_tensor(array, name), name, gpu=True)
    return replace(found, stream=facts.get("stream"), writable=not facts["data"][1])


def _view_dlpack(array: Any, name: str) -> ArrayView:
    found, kind = on_cpu(array, name), type(array).__name__
    if isinstance(found, np.ndarray):
        return replace(_view_numpy(found, name), kind=kind)
    # torch does not say whether the owner lets the elements be written.
    return replace(_view_tensor(found, name, gpu=False), kind=kind, writable=False)


def _view_tensor(tensor: torch.Tensor, name: str, gpu: bool) -> ArrayView:
    refuse_odd(tensor, name, gpu)
    dtype = FROM_TORCH.get(tensor.dtype, MOVED.get(tensor.dtype))
    if dtype is None:
        raise _unknown_dtype(name, tensor.dtype)
    itemsize = tensor.element_size()
    is_zero = tensor._is_zerotensor()  # all zeros without memory: autograd makes such
    return ArrayView(
        source=tensor,
        dtype=dtype,
        ptr=0 if is_zero else _address(tensor, name),
        shape=tuple(tensor.shape),
        strides_bytes=tuple(stride * itemsize for stride in tensor.stride()),
        numel=tensor.numel(),
        dense=tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or is_zero),
        writable=not is_zero,
        device=tensor.device.index if tensor.is_cuda else -1,
    )


def _is_masked(array: object) -> bool:
    """Return whether an array has a mask; numpy.ma is not imported for that."""
    masked = sys.modules.get("numpy.ma")  # a masked array exists only where it was imported
    return masked is not None and isinstance(array, masked.MaskedArray)


def _address(tensor: torch.Tensor, name: str) -> int:
    """Return where a tensor's elements lie, all of them.

    FSDP and users free a tensor's memory by resizing its storage; it keeps its shape then.
    """
    try:
        ptr, held_bytes = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError as error:  # of torch.func's tensors
        raise without_memory(tensor, name) from error
    if tensor.numel() == 0:
        return ptr
    last = sum(
        stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if held_bytes < needed_bytes:
        raise UsageError(
            f"{name} needs {needed_bytes} bytes, but its storage has {held_bytes}: it was freed or "
            "resized"
        )
    if ptr == 0:
        raise without_memory(tensor, name)
    return ptr


def _view_numpy(array: np.ndarray[Any, Any], name: str) -> ArrayView:
    if _is_masked(array):
        raise UnsupportedError(
            f"{name} is a masked array, whose mask would be ignored; pass {name}.filled(value)"
        )
    # By name, so that the bfloat16 and float8 of ml_dtypes are taken too.
    dtype = _FROM_NUMPY.get(array.dtype.name)
    if dtype is None:
        raise _unknown_dtype(name, array.dtype)
    if not array.dtype.isnative:
        raise UnsupportedError(
            f"{name} has dtype {array.dtype}, in the other byte order than this machine; pass "
            f"{name}.astype({dtype.name!r})"
        )
    return ArrayView(
        source=array,
        dtype=dtype,
        ptr=array.ctypes.data,
        shape=array.shape,
        strides_bytes=array.strides,
        numel=array.size,
        dense=array.flags.c_contiguous,
        writable=array.flags.writeable,
    )


def premultiplied(array: ArrayView, factor: object) -> ArrayView:
    """Return an input of PREMUL_SUM, of which a scaled copy is reduced."""
    return replace(array, dense=False, factor=factor)


def refuse_moved(array: ArrayView, name: str) -> None:
    """Raise UnsupportedError if elements of this type can only be moved."""
    if array.kind_of_elements != array.dtype.name:
        raise _unknown_dtype(name, array.source.dtype)


def _unknown_dtype(name: str, dtype: object) -> UnsupportedError:
    return UnsupportedError(
        f"{name} has dtype {dtype}; supported are {', '.join(d.name for d in DType)}"
    )


def check_output(output: ArrayView, name: str) -> None:
    """Check that every element of an output can be written.

    Raises:
        UsageError: It is read-only, or several of its elements share memory.
    """
    if not output.writable and output.kind:
        raise UsageError(
            f"{name}, of type {output.kind}, can't be written, as JAX's arrays can't; give a tensor"
            " or a NumPy array for the result. The verbs of fastcoll.jax return new arrays"
        )
    if isinstance(output.source, torch.Tensor) and output.source._is_zerotensor():
        raise UsageError(
            f"{name} is a tensor of torch's zeros without memory; pass torch.zeros_like({name})"
        )
    if not output.writable:
        raise UsageError(f"{name} is read-only")
    if not output.dense and _overlaps_itself(output):
        raise UsageError(
            f"{name} is expanded, or its strides are such that its elements share memory; pass "
            f"{name}.clone()"
        )


def _overlaps_itself(array: ArrayView) -> bool:
    if array.numel == 0:  # NumPy has all strides 0 then
        return False
    dims = [
        (abs(stride), size)
        for size, stride in zip(array.shape, array.strides_bytes, strict=True)
        if size > 1
    ]
    reach = ITEMSIZE[array.dtype]  # of all elements along the smaller strides
    nested = True
    for stride, size in sorted(dims):
        nested &= stride >= reach
        reach += stride * (size - 1)
    if nested or any(stride == 0 for stride, _ in dims):
        return not nested
    # Elements along one dimension lie between those along another: rare, so they are counted.
    places = np.zeros(1, np.int64)
    for stride, size in dims:
        places = (places[:, None] + stride * np.arange(size)).reshape(-1)
    return bool((np.diff(np.sort(places)) < ITEMSIZE[array.dtype]).any())


def count_writes(arrays: Iterable[ArrayView]) -> None:
    """Tell autograd that a call is about to write arrays, as torch's in-place functions do.

    A backward pass that needs their former values then raises.
    """
    for array in arrays:
        tensor = array.source
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def check_overlap(first: ArrayView, second: ArrayView, what: str) -> None:
    """Check that two arrays do not overlap in part; the very same elements are fine.

    Raises:
        UsageError: They overlap in part.
    """
    same = (first.ptr, first.shape, first.strides_bytes)
    if same == (second.ptr, second.shape, second.strides_bytes) or not overlap(first, second):
        return
    if first.dense and second.dense and (first.ptr, first.numel) == (second.ptr, second.numel):
        return
    raise UsageError(f"{what} overlap in part; pass separate memory, or the same for both")


def overlap(first: ArrayView, second: ArrayView) -> bool:
    """Return whether two arrays share an element; True if that is too hard to find out."""
    if first.numel == 0 or second.numel == 0:
        return False
    if 0 in (first.ptr, second.ptr):  # zeros without memory
        return False
    if first.dense and second.dense:
        return (
            first.ptr < second.ptr + second.num_bytes and second.ptr < first.ptr + first.num_bytes
        )
    try:
        return np.shares_memory(_bounds(first), _bounds(second), max_work=_SHARING_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def check_apart(outputs: Sequence[ArrayView], inputs: Sequence[ArrayView]) -> None:
    """Check that outputs overlap neither each other nor an input.

    Raises:
        UsageError: They do.
    """
    arrays = [*outputs, *inputs]
    if not _extents_meet(arrays, len(outputs)):
        return
    for index, output in enumerate(outputs):
        if any(overlap(output, other) for other in arrays[index + 1 :]):
            raise UsageError("an output overlaps another output or an input; pass separate memory")


def _extents_meet(arrays: Sequence[ArrayView], num_outputs: int) -> bool:
    """Return whether an output may overlap anything; cheap, and sometimes true for nothing."""
    extents = []
    for index, array in enumerate(arrays):
        if array.numel == 0:
            continue
        steps = [
            stride * (size - 1)
            for stride, size in zip(array.strides_bytes, array.shape, strict=True)
        ]
        low = array.ptr + sum(min(step, 0) for step in steps)
        high = array.ptr + sum(max(step, 0) for step in steps) + ITEMSIZE[array.dtype]
        extents.append((low, high, index < num_outputs))
    end_of_any = end_of_outputs = 0
    for low, high, is_output in sorted(extents):
        if low < (end_of_any if is_output else end_of_outputs):
            return True
        end_of_any = max(end_of_any, high)
        end_of_outputs = max(end_of_outputs, high) if is_output else end_of_outputs
    return False


class _Interface:
    """NumPy's view of memory that is looked at, never touched."""

    def __init__(self, array: ArrayView) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (array.ptr, True),
            "typestr": f"|V{ITEMSIZE[array.dtype]}",
            "shape": array.shape,
            "strides": array.strides_bytes,
        }


def _bounds(array: ArrayView) -> np.ndarray[Any, Any]:
    return np.asarray(_Interface(array))


def dense_copy(array: ArrayView, *, fill: bool) -> ArrayView:
    """Return a dense array of the same shape: with the elements, or empty for results."""
    source = array.source
    copy: Array
    if isinstance(source, torch.Tensor):
        copy = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        if fill:
            copy.copy_(source.detach())
        if array.factor is not None:  # in the array's type, as NCCL has it
            copy.mul_(torch.as_tensor(array.factor, dtype=source.dtype, device=source.device))
    else:
        copy = np.empty(source.shape, dtype=source.dtype)
        if fill:
            copy[...] = source
        if array.factor is not None:
            copy *= np.asarray(array.factor, source.dtype)
    return view(copy, "copy", gpu=array.device >= 0)


def copy_back(array: ArrayView, dense: ArrayView) -> None:
    """Write the elements of a dense copy where the user wants them."""
    target, result = array.source, dense.source
    if isinstance(target, torch.Tensor) and isinstance(result, torch.Tensor):
        target.detach().copy_(result)
    elif isinstance(target, np.ndarray):
        target[...] = result
