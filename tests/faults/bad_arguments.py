# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the arguments of calls: the call, and what its error says.

By subject, each mistake with a name. Every tensor is made anew for each use. Parts of the error's
text have " ... " in between. The error is a UsageError, unless the text begins with its class.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.types import DType

Call = Callable[[Any], Any]  # of a communicator
Mistake = tuple[Call, str]  # the call, and parts of the error's text
FOREIGN_DTYPES = {"float8_e8m0fnu", "complex32"} - {dtype.name for dtype in DType}


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 1, dtype=dtype)


def is_told(kind: str, text: str, wanted: str) -> bool:
    """Whether an error is of the class, and has the parts of the text, that a mistake names."""
    of_class, _, parts = wanted.rpartition("Error: ")
    is_kind = kind == f"{of_class or 'Usage'}Error"
    return is_kind and all(part in text for part in parts.split(" ... "))


def all_reduce(tensor: Any, *args: Any, **options: Any) -> Call:
    return lambda comm: comm.all_reduce(tensor, *args, **options)


def scatter(output: Any, given: Any) -> Call:
    return lambda comm: comm.reduce_scatter_tensor(output, given)


def gather(output: Any, given: Any) -> Call:
    return lambda comm: comm.all_gather_into_tensor(output, given)


def with_storage(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """As FSDP frees memory: the tensor keeps its shape."""
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def _copied(tensor: Any) -> Call:
    return lambda comm: fastcoll.from_tensor(tensor, group=comm)


def _reduced(comm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(tensor)
        return tensor

    return reduced


def _masked() -> Any:
    mask = torch.tensor([True, False])
    return torch.masked.masked_tensor(torch.ones(2), mask)  # type: ignore[no-untyped-call]


def _with_group(group: object) -> Call:
    return lambda comm: fastcoll.all_reduce(torch.ones(6), group=group)


def mistakes_of_options(world: int) -> dict[str, Mistake]:
    """Algorithms, numerics and limits."""
    del world
    six = filled(6)
    return {
        "unknown algorithm": (
            all_reduce(six, algorithm="fast"),
            "fast ... one_shot ... two_shot ... ring ... chain",
        ),
        "unknown schedule": (
            all_reduce(six, algorithm="schedule:rings"),
            "all_reduce has no schedule 'rings', did you mean ring? ... one_shot",
        ),
        "algorithm of moves": (all_reduce(six, algorithm="direct"), "UnsupportedError: direct"),
        "algorithm is no text": (all_reduce(six, algorithm=3), "algorithm ... 3"),
        "algorithm cannot be hashed": (all_reduce(six, algorithm=["ring"]), "algorithm"),
        "algorithm is None": (all_reduce(six, algorithm=None), "algorithm ... None"),
        "unknown numerics": (all_reduce(six, numerics="exact"), "numerics ... exact"),
        "numerics auto": (all_reduce(six, numerics="auto"), "numerics ... auto"),
        "limit 0": (all_reduce(six, timeout_s=0), "timeout_s ... 0"),
        "limit -1": (all_reduce(six, timeout_s=-1), "timeout_s ... -1"),
        "limit nan": (all_reduce(six, timeout_s=float("nan")), "timeout_s ... nan"),
        "limit of 2**1024": (all_reduce(six, timeout_s=2**1024), "timeout_s"),
        "limit auto": (all_reduce(six, timeout_s="auto"), "timeout_s ... auto"),
        "limit in text": (all_reduce(six, timeout_s="3"), "timeout_s ... '3'"),
        "limit True": (all_reduce(six, timeout_s=True), "timeout_s ... True"),
        "limit in text, as torch's": (
            lambda comm: fastcoll.barrier(comm, timeout="3"),  # type: ignore[arg-type]
            "number of seconds ... '3'",
        ),
        "limit of a monitored barrier": (
            lambda comm: comm.monitored_barrier(timedelta(0)),
            "number of seconds ... timedelta(0)",
        ),
        "two limits": (
            lambda comm: fastcoll.barrier(comm, timeout=timedelta(1), timeout_s=1),
            "timeout or timeout_s",
        ),
    }


def mistakes_of_wires(world: int) -> dict[str, Mistake]:
    """Formats between nodes, which are refused on one node too."""
    names = '"bf16", "int8", "fp8" or None'
    kinds = "works for float32, float16, bfloat16"

    def of(dtype: torch.dtype, wire: object, *args: Any) -> Call:
        return all_reduce(torch.ones(4).to(dtype), *args, wire=wire)

    return {
        "unknown": (of(torch.float32, "int4"), f"{names} ... 'int4'"),
        "a number": (of(torch.float32, 8), f"{names} ... not 8"),
        "of MAX": (of(torch.float32, "int8", "max"), "UnsupportedError: SUM and AVG, not for MAX"),
        "of float64": (of(torch.float64, "int8"), f"UnsupportedError: {kinds} ... float64"),
        "of integers": (of(torch.int32, "fp8"), f"UnsupportedError: {kinds} ... int32"),
        "of codes": (
            of(torch.float8_e4m3fn, "fp8"),
            f"UnsupportedError: {kinds} ... float8_e4m3fn",
        ),
        "no bytes saved": (
            of(torch.bfloat16, "bf16"),
            "UnsupportedError: saves no bytes of bfloat16",
        ),
        "of parts": (
            lambda comm: comm.reduce_scatter_tensor(filled(1), filled(world), wire="zip"),
            f"{names} ... 'zip'",
        ),
        "of a list": (
            lambda comm: comm.all_reduce_coalesced([torch.ones(1).bool()], wire="int8"),
            "UnsupportedError: tensor 0 of the list: wire",
        ),
    }


def mistakes_of_operations(world: int) -> dict[str, Mistake]:
    """Operations that mean nothing."""
    del world
    six = filled(6)
    op = dist.ReduceOp
    return {
        "AVG of booleans": (
            all_reduce(filled(6, dtype=torch.bool), op.AVG),
            "UnsupportedError: AVG ... bool ... SUM",
        ),
        "BAND of floats": (all_reduce(six, op.BAND), "UnsupportedError: BAND ... float32 ... SUM"),
        "MAX of complex": (
            all_reduce(filled(6, dtype=torch.complex64), op.MAX),
            "UnsupportedError: MAX ... complex64 ... SUM",
        ),
        "PREMUL_SUM": (all_reduce(six, op.PREMUL_SUM), "UnsupportedError: PREMUL_SUM ... SUM"),
        "op is a text": (all_reduce(six, "total"), "op ... total"),
        "op is a number": (all_reduce(six, 0), "op ... 0"),
        "op is None": (all_reduce(six, None), "op ... None"),
        "op cannot be hashed": (all_reduce(six, []), "op"),
    }


def mistakes_of_outputs(world: int) -> dict[str, Mistake]:
    """Outputs that do not fit, and elements that share memory."""
    del world
    six = filled(6)
    line = torch.arange(12.0)
    return {
        "out of another shape": (all_reduce(six, out=filled(5)), "out ... shape"),
        "out of as many elements": (all_reduce(six, out=filled(2, 3)), "out ... shape"),
        "out of another dtype": (
            all_reduce(six, out=filled(6, dtype=torch.int32)),
            "float32 ... int32",
        ),
        "out overlaps in part": (all_reduce(line[:6], out=line[1:7]), "overlap ... part"),
        "out overlaps every second": (all_reduce(line[:6], out=line[::2]), "overlap ... part"),
        "out overlaps backwards": (
            all_reduce(line[:6].view(2, 3), out=line[:6].view(3, 2).t()),
            "overlap ... part",
        ),
        "in place, elements shared": (
            all_reduce(filled(1).expand(6)),
            "tensor is expanded ... clone",
        ),
        "rows that overlap": (
            lambda comm: comm.all_reduce(torch.ones(8).as_strided((2, 3), (2, 1))),
            "elements share memory ... clone",
        ),
        "columns that overlap": (
            lambda comm: comm.all_reduce(torch.ones(13).as_strided((3, 4), (3, 2))),
            "elements share memory ... clone",
        ),
        "out, elements shared": (all_reduce(six, out=filled(1).expand(6)), "expanded ... clone"),
    }


def mistakes_of_tensors(world: int) -> dict[str, Mistake]:
    """Tensors and arrays of another layout, device or kind."""
    del world
    six = filled(6)
    fixed = np.ones(6, np.float32)
    fixed.setflags(write=False)
    return {
        "read-only": (all_reduce(fixed), "tensor is read-only"),
        "a list": (all_reduce([1.0]), "tensor ... list ... torch.tensor"),
        "elements shared in an array": (
            all_reduce(np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (4, 3), (4, 4))),
            "elements share memory ... clone",
        ),
        "meta": (
            all_reduce(torch.empty(6, device="meta")),
            "UnsupportedError: meta ... torch.empty_like",
        ),
        "quantised": (
            all_reduce(torch._empty_affine_quantized([6], scale=0.1, dtype=torch.qint8)),
            "UnsupportedError: quantized ... int_repr() ... dequantize()",
        ),
        "masked": (
            all_reduce(np.ma.masked_array(np.ones(6, np.float32), mask=[True] + 5 * [False])),
            "UnsupportedError: masked ... filled(value)",
        ),
        "without a shape": (
            all_reduce(torch.nn.UninitializedBuffer()),
            "UninitializedBuffer ... no shape yet",
        ),
        "sparse": (all_reduce(torch.eye(3).to_sparse()), "UnsupportedError: sparse ... to_dense"),
        "nested": (
            all_reduce(torch.nested.nested_tensor([six, filled(2)])),
            "UnsupportedError: nested ... unbind",
        ),
    }


def mistakes_of_arrays(world: int) -> dict[str, Mistake]:
    """Arrays of dtypes that are no numbers, and values that are no array."""
    del world
    arrays = {
        "records": np.zeros(3, "f4,i4"),
        "text": np.array(["a"]),
        "objects": np.array([None]),
        "dates": np.zeros(3, "datetime64[s]"),
    }
    values = {"None": None, "a scalar of NumPy's": np.float32(1)}
    return {
        **{name: (all_reduce(array), "UnsupportedError: dtype") for name, array in arrays.items()},
        **{name: (all_reduce(value), "NumPy array") for name, value in values.items()},
        "a number": (all_reduce(1.0), "NumPy array ... torch.tensor"),
        "an object": (all_reduce({"a": 1}), "NumPy array ... all_gather_object"),
    }


def mistakes_of_memory(world: int) -> dict[str, Mistake]:
    """Memory that is gone or that torch.func hides, and dtypes that no call takes."""
    six = filled(6)
    return {
        "freed": (all_reduce(with_storage(filled(6), 0)), "24 bytes ... has 0 ... freed"),
        "freed, strided": (all_reduce(with_storage(filled(2, 3).t(), 0)), "24 ... freed"),
        "storage cut short": (
            all_reduce(with_storage(filled(2, 4).t(), 28)),
            "32 bytes ... has 28",
        ),
        "out freed": (all_reduce(six, out=with_storage(filled(6), 0)), "out ... freed"),
        "inside vmap": (
            lambda comm: torch.vmap(_reduced(comm))(filled(2, 3)),
            "UnsupportedError: memory ... torch.func",
        ),
        "inside functionalize": (
            lambda comm: torch.func.functionalize(_reduced(comm))(six),
            "UnsupportedError: memory ... torch.func",
        ),
        "masked by torch": (
            all_reduce(_masked()),
            "UnsupportedError: tensor is a MaskedTensor ... get_data()",
        ),
        "other byte order": (
            all_reduce(np.ones(6, ">f4")),
            "UnsupportedError: byte order ... astype('float32')",
        ),
        **{
            name: (
                all_reduce(torch.empty(6, dtype=getattr(torch, name))),
                f"UnsupportedError: tensor has ... {name} ... float32 ... float8_e5m2",
            )
            for name in FOREIGN_DTYPES
        },
        **{
            f"{name} to bytes": (
                gather(filled(6 * world, dtype=torch.uint8), six.to(getattr(torch, name))),
                f"input_tensor is {name} and output_tensor is uint8",
            )
            for name in FOREIGN_DTYPES
        },
    }


def mistakes_of_parts(world: int) -> dict[str, Mistake]:
    """Sizes of parts, roots and groups."""
    six = filled(6)
    line = torch.arange(12.0)
    return {
        "input too small": (scatter(six, filled(6 * world + 1)), f"input ... {6 * world}"),
        "output too large": (scatter(filled(7), filled(6)), f"input ... {7 * world}"),
        "scatter, dtypes differ": (
            scatter(six, filled(6 * world, dtype=torch.float64)),
            "float32 ... float64",
        ),
        "scatter, overlap": (
            lambda comm: comm.reduce_scatter_tensor(line[1:3], line[: 2 * world]),
            "overlap ... part",
        ),
        "gathered too small": (
            gather(filled(6 * world - 1), six),
            f"output_tensor ... {6 * world}",
        ),
        "gather, dtypes differ": (
            gather(filled(6 * world, dtype=torch.int8), six),
            "float32 ... int8",
        ),
        "root too large": (lambda comm: comm.broadcast(six, world), f"src={world}"),
        "root negative": (lambda comm: comm.broadcast(six, -1), "src=-1"),
        "root is no number": (lambda comm: comm.broadcast(six, "0"), "src ... 0"),
        "root is a float": (lambda comm: comm.broadcast(six, 0.0), "src ... 0.0"),
        "group of another kind": (_with_group("world"), "group ... fastcoll.Group ... str"),
    }


def mistakes_of_other_calls(world: int) -> dict[str, Mistake]:
    """Symmetric memory, new groups, lists, batches and unknown arguments."""
    del world
    six = filled(6)
    return {
        "fraction of an element": (lambda comm: comm.empty([2.7]), "integers ... 2.7"),
        "shape is a fraction": (lambda comm: comm.empty(2.5), "integers ... 2.5"),
        "dtype is a text": (lambda comm: comm.empty(3, dtype="float32"), "torch.dtype ... float32"),
        "dtype is a number": (lambda comm: comm.empty(3, dtype=0.0), "torch.dtype ... 0.0"),
        "device is a number": (lambda comm: comm.empty(3, device=1.5), "torch.device ... 1.5"),
        "device has no kind": (lambda comm: comm.empty(3, device="0"), "torch.device ... '0'"),
        "less than nothing": (lambda comm: comm.empty(-1), "-1"),
        "dtype without a verb": (
            lambda comm: comm.empty(3, dtype=torch.float8_e8m0fnu),
            "UnsupportedError: float8_e8m0fnu",
        ),
        "peer as a text": (lambda comm: comm.peer_is_gone("0"), "peer must be a rank"),
        "no such peer": (lambda comm: comm.peer_is_gone(10**30), "peer ... is not a rank"),
        "fraction of a rank": (lambda comm: comm.new_group([0.5]), "ranks ... 0.5"),
        "rank as a text": (lambda comm: comm.new_group("0"), "ranks ... integers"),
        "ranks is a number": (lambda comm: comm.new_group(0), "ranks ... sequence"),
        "no such rank": (lambda comm: comm.new_group([0, 7]), "7"),
        "no ranks": (lambda comm: comm.new_group([]), "ranks"),
        "a rank twice": (lambda comm: comm.new_group([0, 0]), "twice"),
        "no list to scatter": (
            lambda comm: comm.reduce_scatter(six, None),
            "input_list ... NoneType",
        ),
        "no list of objects": (
            lambda comm: comm.broadcast_object_list(None, 0),
            "object_list ... NoneType",
        ),
        "no batch": (lambda comm: comm.batch_isend_irecv(None), "list ... NoneType"),
        "batch of something": (lambda comm: comm.batch_isend_irecv([six]), "fastcoll.P2POp"),
        "symmetric copy of a list": (_copied([1.0]), "tensor ... list"),
        "symmetric copy of a sparse one": (
            _copied(torch.eye(2).to_sparse()),
            "UnsupportedError: sparse",
        ),
        "no such option": (all_reduce(six, colour="red"), "TypeError: colour"),
        "no tensor": (lambda comm: comm.all_reduce(), "TypeError: tensor"),
    }
