# SPDX-License-Identifier: Apache-2.0
"""The oracle's bits in long sequences and of large messages: ranks as threads.

Every verb, dtype, operation, algorithm, size and root: the sites on GPUs of tests/contract.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fastcoll.measure.gpu_ranks import GpuRanks
from tests.contract.test_gpu_parts import gathers, messages, shuffles
from tests.gpu.work import check, exchange, on_device
from tests.support import perform
from tests.support.calls import REDUCTIONS, Call
from tests.support.draw import VERBS
from tests.support.sites import GPU

Threads = Callable[[int], GpuRanks]
LARGE = (32 << 20) // 4 + 3
MOVED = LARGE // 4


def mixed_calls() -> list[Call]:
    """Calls of all verbs that take turns."""
    site = replace(GPU, world=4, most=30)
    return [call for turn in zip(*map(site.small_calls, VERBS), strict=False) for call in turn]


def large_calls() -> list[Call]:
    names = GPU.limits.algorithms
    calls = [on_device("all_reduce", "float32", LARGE, algorithm=name) for name in names]
    return calls + [on_device(verb, "float32", MOVED) for verb in ("all_gather", "all_to_all")]


def test_a_long_sequence_of_mixed_calls(threads: Threads) -> None:
    check(threads(4), mixed_calls())


def test_one_rank_gets_its_own_bits(threads: Threads) -> None:
    site = replace(GPU, world=1, most=60)
    check(threads(1), [call for verb in REDUCTIONS for call in site.small_calls(verb)])


def test_a_large_message(threads: Threads) -> None:
    check(threads(4), large_calls())
    assert threads(4).run(exchange, [(MOVED // 6, "float32")], messages) == [[]] * 4


def test_collectives_and_messages_take_turns(threads: Threads) -> None:
    kinds = [(size, dtype) for size in (5, 9000) for dtype in ("float16", "int64")]
    assert threads(4).run(exchange, kinds * 3, shuffles, messages, gathers) == [[]] * 4


def test_the_comparison_sees_a_wrong_bit(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one bit of what is expected of rank 1 is wrong."""
    right = perform.expected

    def wrong(*args: object) -> object:
        found = [want.copy() for want in right(*args)]  # type: ignore[arg-type]
        found[1][3] ^= 1
        return found

    monkeypatch.setattr(perform, "expected", wrong)
    with pytest.raises(AssertionError, match=r"1 wrong results:\nrank 1 of 2: 1 of 1000 words"):
        check(threads(2), [on_device("all_reduce", "int32", 1000)])
