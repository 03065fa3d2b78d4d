# SPDX-License-Identifier: Apache-2.0
"""Where torch records a program, fastcoll's calls are refused, and its operators recorded."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastcoll
from fastcoll.api import VERBS
from fastcoll.integrations import ops
from tests.support.harness import Pool, Pools, Rank, attempt


def trace(function: Callable[..., object], given: torch.Tensor) -> Callable[..., torch.Tensor]:
    traced: Callable[..., torch.Tensor] = torch.jit.trace(function, given, check_trace=False)
    return traced


def record(function: Callable[..., object], given: torch.Tensor) -> Callable[..., torch.Tensor]:
    return make_fx(function)(given)


TRACERS = {"torch.jit.trace": trace, "make_fx": record}


def caller_of(verb: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that calls a verb; it needs no arguments to be refused."""

    def call(given: torch.Tensor) -> torch.Tensor:
        getattr(fastcoll, verb)()
        return given

    return call


def refused(rank: Rank, tracer: str) -> tuple[set[str], float]:
    """Return the verbs that a tracer let through, and the sum of a known call after it."""

    def once(given: torch.Tensor) -> torch.Tensor:
        result = given * 2
        fastcoll.all_reduce(result)
        return result

    once(torch.ones(3))
    missed = set()
    for verb in VERBS:
        error = attempt(TRACERS[tracer], caller_of(verb), torch.ones(3))
        if error.kind != "UsageError" or f"the program that {tracer} records" not in error.text:
            missed.add(verb)
    for call in (once, lambda given: rank.comm.all_reduce(given, async_op=True)):
        error = attempt(TRACERS[tracer], call, torch.ones(3))
        assert "call fastcoll.integrations.ops.all_reduce" in error.text, error
    return missed, once(torch.ones(3)).sum().item()


def recorded(rank: Rank, tracer: str) -> list[float]:
    """Return what a traced program gives that holds an operator, for other values."""
    program = TRACERS[tracer](lambda given: ops.all_reduce(given * 2) + 1, torch.ones(2))
    return program(torch.full((2,), rank.rank + 1.0)).tolist()


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("nodes", ["aa", pytest.param("ab", marks=pytest.mark.long)])
def test_a_tracer_refuses_calls_and_records_operators(
    pools: Pools, clusters: Callable[[str], Pool], nodes: str, tracer: str
) -> None:
    """The traced program left out the calls, without a word: it gave 21 for 61."""
    pool = clusters(nodes) if "b" in nodes else pools(len(nodes))
    assert pool.run(refused, tracer) == [(set(), 12.0)] * 2
    assert pool.run(recorded, tracer) == [[7.0, 7.0]] * 2


def faked(rank: Rank) -> str:
    with FakeTensorMode():
        return attempt(fastcoll.all_reduce, torch.ones(3)).text


def test_a_call_of_fake_tensors_names_the_operators(pools: Pools) -> None:
    """torch.export traces with them, so that no plain tensor could be passed."""
    for text in pools(2).run(faked):
        assert "fastcoll.integrations.ops" in text
