# SPDX-License-Identifier: Apache-2.0
"""The codes that Python and C++ share, and the request of a call.

Decides the numbers of dtypes, operations, wire formats, verbs and algorithms, and which operation
has a meaning for which dtype. The file csrc/dtypes.h holds the same numbers; a test pins them.
Knows nothing of groups, memory or processes.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

import torch
from torch.distributed import ReduceOp as ReduceOp

Numerics = Literal["same_bits", "fast"]
SingleCopy = Literal["never", "auto", "always"]


class DType(IntEnum):
    """Element types."""

    float32 = 0
    float64 = 1
    float16 = 2
    bfloat16 = 3
    float8_e4m3fn = 4
    float8_e5m2 = 5
    int8 = 6
    uint8 = 7
    int16 = 8
    int32 = 9
    int64 = 10
    bool = 11
    complex64 = 12
    complex128 = 13
    uint16 = 14
    uint32 = 15
    uint64 = 16


class Op(IntEnum):
    """Reductions, in the order of torch's RedOpType."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


# An operation as users give it: torch's object, or its name in lower case.
OpName = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
OpLike: TypeAlias = ReduceOp | ReduceOp.RedOpType | OpName


class Wire(IntEnum):
    """The formats in which elements cross between nodes; `none`: as they are."""

    none = 0
    bf16 = 1
    int8 = 2
    fp8 = 3


class Verb(IntEnum):
    """The verbs of calls."""

    all_reduce = 0
    reduce_scatter = 1
    all_gather = 2
    broadcast = 3
    barrier = 4
    all_to_all = 5
    gather = 6
    scatter = 7
    reduce = 8


class Algorithm(IntEnum):
    """The algorithms of calls."""

    one_shot = 0
    two_shot = 1
    ring = 2
    chain = 3
    direct = 4
    schedule = 5
    single_copy = 6
    multimem = 7
    nccl = 8
    copy_engine = 9


TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.name) for dtype in DType}
FROM_TORCH: dict[torch.dtype, DType] = {value: key for key, value in TORCH_DTYPES.items()}
# Types that are moved, as integers of their size, and never reduced.
_MOVED = {
    "float8_e8m0fnu": DType.uint8,
    "float4_e2m1fn_x2": DType.uint8,
    "float8_e4m3fnuz": DType.uint8,
    "float8_e5m2fnuz": DType.uint8,
    "complex32": DType.uint32,
}
MOVED: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in _MOVED.items() if hasattr(torch, name)
}
ITEMSIZE: dict[DType, int] = {key: value.itemsize for key, value in TORCH_DTYPES.items()}
# torch's members in the order of Op: the values that users pass as op=.
REDUCE_OPS = tuple(getattr(ReduceOp, op.name) for op in Op)
BY_NAME: dict[str, Op] = {op.name.lower(): op for op in Op}

FLOAT_DTYPES = frozenset(dtype for dtype in DType if dtype.name.startswith(("float", "bfloat")))
COMPLEX_DTYPES = frozenset(dtype for dtype in DType if dtype.name.startswith("complex"))


def accumulator(dtype: DType) -> DType:
    """Return the type that sums of `dtype` are held in until they are rounded."""
    return DType.float32 if dtype in FLOAT_DTYPES and ITEMSIZE[dtype] < 4 else dtype


def supported_ops(dtype: DType) -> tuple[Op, ...]:
    """Return the reductions that have a meaning for `dtype`."""
    if dtype in FLOAT_DTYPES:
        return (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
    if dtype in COMPLEX_DTYPES:
        return (Op.SUM, Op.AVG)
    return tuple(op for op in Op if op is not Op.AVG or dtype is not DType.bool)


def order_matters(dtype: DType, op: Op) -> bool:
    """Return whether the order of the ranks can change the bits of the result."""
    if op in (Op.MIN, Op.MAX):
        return False
    return dtype in FLOAT_DTYPES or dtype in COMPLEX_DTYPES


_NCCLS_INTEGERS = frozenset((DType.int8, DType.uint8, DType.int32, DType.int64))
_NCCLS_FLOATS = frozenset((DType.float16, DType.bfloat16, DType.float32, DType.float64))


def nccl_adds(dtype: DType, op: Op, *, any_order: bool) -> bool:
    """Return whether NCCL may reduce, and not only move the bytes to reduce.

    Its MIN and MAX of floats differ from fastcoll's where NaN or -0 is among the elements.
    """
    if dtype in _NCCLS_INTEGERS:
        return op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX)
    return dtype in _NCCLS_FLOATS and any_order and op in (Op.SUM, Op.AVG, Op.PRODUCT)


# Request.splits, csrc/plan.h
COUNTED = 1
_LIST_HASH_BITS = 40


def num_tensors(splits: int) -> int:
    """Return of how many tensors a message consists; 0 if it is no list."""
    return splits >> _LIST_HASH_BITS


REDUCTIONS = (Verb.all_reduce, Verb.reduce_scatter, Verb.reduce)
_GIVE_EACH_A_PART = (Verb.reduce_scatter, Verb.all_to_all, Verb.scatter)


SCHEDULE_PREFIX = "schedule:"  # of an algorithm that fastcoll_model builds


@dataclass(frozen=True, slots=True)
class Request:
    """One call as every rank of the group sees it: only fields that are equal on all ranks."""

    verb: Verb
    dtype: DType
    op: Op
    # Elements of the message. That is the tensor of all_reduce, reduce and broadcast, the output of
    # reduce_scatter and scatter, the input of all_gather and gather. In an all_to_all it is one
    # part, in an uneven all_gather all parts. It is 0 for barrier and where `splits` is COUNTED.
    # For a list of tensors it is that of all of them.
    numel: int
    root: int  # group rank that gives (broadcast, scatter) or gets (gather, reduce), else 0
    world_size: int
    algorithm: str  # "auto", the name of an Algorithm, or that of a schedule with its prefix
    numerics: Numerics
    num_cpus: int  # CPUs that the ranks have between them, agreed when the group was made
    # 0 for parts of one size. COUNTED where each rank knows the sizes of its own parts only. Else a
    # hash of all sizes; for a list its upper bits hold the number of tensors.
    splits: int = 0
    # Thread blocks that each rank may have on its GPU, agreed when the group set up its GPUs; 0
    # where the tensors are on CPUs.
    num_channels: int = 0
    ranks_per_gpu: int = 0  # the most ranks that share one GPU
    reaches_peers: bool = True  # whether kernels reach the memory of the peers' GPUs
    no_nccl: str = ""  # why NCCL can't carry between the GPUs; empty: it can
    no_multicast: str = ""  # why the GPUs' switch can't add; empty: it can
    # FASTCOLL_SINGLE_COPY; "never" where a rank can't read another one's memory, agreed when the
    # group was made.
    single_copy: SingleCopy = "never"
    cpu_vendor: str = ""  # the vendor of the node's CPUs, as `fastcoll.machine.cpu` reads it

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors lie on GPUs."""
        return self.num_channels > 0

    @property
    def is_scheduled(self) -> bool:
        """Whether it asks for a schedule of the model."""
        return self.algorithm.startswith(SCHEDULE_PREFIX)

    @property
    def staged_bytes(self) -> int:
        """Bytes that one rank publishes for its peers to read."""
        parts = self.world_size if self.verb in _GIVE_EACH_A_PART else 1
        return parts * self.numel * ITEMSIZE[self.dtype]
