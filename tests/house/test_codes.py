# SPDX-License-Identifier: Apache-2.0
"""The numbers that Python and C++ share, and the errors that travel between them."""

import pickle

import pytest
import torch
from torch.distributed import ReduceOp

import fastcoll
from fastcoll import _C, errors, types
from tests.support import oracle


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (types.DType, _C.dtype_names),
        (types.Op, _C.op_names),
        (types.Wire, _C.wire_names),
        (types.Verb, _C.verb_names),
        (types.Algorithm, _C.algorithm_names),
    ],
)
def test_codes_are_the_same_in_both_languages(ours: type, theirs: object) -> None:
    assert [member.name for member in ours] == list(theirs())
    assert [member.value for member in ours] == list(range(len(ours)))


def test_every_dtype_is_torchs_of_the_same_name() -> None:
    for dtype in types.DType:
        kind = getattr(torch, dtype.name)
        assert types.TORCH_DTYPES[dtype] is kind
        assert types.FROM_TORCH[kind] is dtype
        assert types.ITEMSIZE[dtype] == kind.itemsize == oracle.itemsize(dtype.name)
    assert {dtype.name for dtype in types.DType} == set(oracle.DTYPES)


def test_operations_are_torchs() -> None:
    assert fastcoll.ReduceOp is ReduceOp
    for op in types.Op:
        assert types.REDUCE_OPS[op] == getattr(ReduceOp, op.name)
        assert int(getattr(ReduceOp, op.name)) == op.value


def test_what_means_something_is_what_the_oracle_says() -> None:
    for dtype in types.DType:
        names = {op.name for op in types.supported_ops(dtype)}
        assert names == set(oracle.ops_of(dtype.name))
        for op in types.supported_ops(dtype):
            assert types.order_matters(dtype, op) == oracle.order_matters(dtype.name, op.name)


def test_errors_have_one_base_and_survive_a_pickle() -> None:
    for name in errors.__all__:
        kind = getattr(fastcoll, name)
        assert kind is getattr(errors, name)
        assert issubclass(kind, fastcoll.FastcollError)
        assert issubclass(kind, RuntimeError)
    lost = pickle.loads(pickle.dumps(errors.PeerLostError("gone", [3])))
    assert (str(lost), lost.ranks) == ("gone", (3,))
    assert errors.CollectiveTimeout("late").ranks == ()


def test_simd_levels_end_with_the_baseline() -> None:
    levels = _C.simd_levels()
    assert levels[-1] == "baseline"
    assert _C.simd_level() in levels
    with pytest.raises(fastcoll.UsageError, match="no-such-level"):
        _C.set_simd_level("no-such-level")
