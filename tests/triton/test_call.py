# SPDX-License-Identifier: Apache-2.0
"""A call without meaning is refused before anything is launched, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll_kernels import epilogues, one_shot, reduce, two_shot
from fastcoll_kernels.call import Launch
from fastcoll_kernels.workspace import SIGNAL_BYTES, Verdict, Workspace
from tests.support.programs import run_python

F32 = torch.zeros(64)
FP8 = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
TABLE = torch.zeros(2, dtype=torch.int64)


def space(**options: Any) -> Workspace:
    verdict = torch.zeros(3, dtype=torch.int32)
    known = {"signals": TABLE, "scratch": TABLE, "scratch_bytes": 1 << 16, "verdict": verdict}
    return Workspace(**{**known, "rank": 0, **options})


def rows(out: torch.Tensor) -> Any:
    return epilogues.quantise_rows(out, torch.zeros(out.shape[:-1]))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "op": (lambda: one_shot.all_reduce(F32, space(), "BAND"), "BAND of torch.float32: need one of"),
    "avg": (lambda: one_shot.all_reduce(F32.bool(), space(), "AVG"), "AVG of torch.bool"),
    "dtype": (lambda: one_shot.all_reduce(FP8.to(torch.float8_e5m2fnuz), space()), "no kernel for"),
    "strides": (lambda: one_shot.all_reduce(F32[::2], space()), "contiguous.*strides"),
    "out": (lambda: one_shot.all_reduce(F32, space(), out=F32[:9]), "need 9 elements, got 64"),
    "parts": (lambda: two_shot.reduce_scatter(F32, F32, space()), "need 128 elements, got 64"),
    "cast": (lambda: one_shot.all_reduce(F32, space(), out=F32.int()), "only floats can be cast"),
    "tile": (
        lambda: one_shot.all_reduce(F32, space(), launch=Launch(block=4096)),
        "needs 524288 bytes of scratch for 16 channels; there are 65536",
    ),
    "channels": (lambda: one_shot.all_reduce(F32, space(), launch=Launch(17)), "17 channels"),
    "block": (lambda: Launch(block=100), "block=100: need a power of two"),
    "warps": (lambda: Launch(num_warps=0), "num_warps=0"),
    "no rows": (
        lambda: one_shot.all_reduce(F32[0], space(), out=F32[0], epilogue=rows(FP8)),
        "need rows",
    ),
    "complex": (
        lambda: one_shot.all_reduce(F32.cfloat(), space(), epilogue=epilogues.scale(2.0)),
        "an epilogue of torch.complex64",
    ),
    "sources": (lambda: reduce.reduce([], F32), "nothing to reduce"),
    "scales": (lambda: epilogues.quantise_rows(FP8, torch.zeros(7)), r"scales: .* shape \(8,\)"),
    "fp8": (lambda: epilogues.quantise_rows(F32, torch.zeros(1)), "out: need contiguous"),
    "residual": (lambda: epilogues.add_rms_norm(F32, F32[:9], F32), "residual: need"),
    "rank": (lambda: space(rank=2), "rank 2 of 2"),
    "world": (lambda: space(signals=TABLE[:1]), "1 addresses of signals, 2 of scratch"),
    "table": (lambda: space(signals=F32), "signals: need int64"),
    "verdict": (lambda: space(verdict=F32), "verdict: need int32"),
    "many": (lambda: space(num_channels=65), "num_channels=65: 1 to 64"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str) -> None:
    call, reason = MISTAKES[name]
    with pytest.raises(ValueError, match=reason):
        call()


@pytest.mark.slow
def test_the_library_does_not_import_triton() -> None:
    """It takes a second, and is not always there."""
    code = "import fastcoll, sys; print(*{'triton', 'fastcoll_kernels'} & set(sys.modules))"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_words_are_as_documented() -> None:
    """See kernels/README.md: a verdict is 1 + missing + 16 (rank + 16 channel)."""
    word = 1 + 5 + 16 * (3 + 16 * 7)
    broken = space(verdict=torch.tensor([word, 40, 38], dtype=torch.int32)).broken()
    assert broken == Verdict(rank=3, missing=5, channel=7, expected=40, seen=38)
    assert space().broken() is None
    assert SIGNAL_BYTES == 4416
