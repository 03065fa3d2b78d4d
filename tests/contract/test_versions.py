# SPDX-License-Identifier: Apache-2.0
"""Autograd and the verbs: a call counts as a write of its outputs, and of nothing else."""

import re

import pytest
import torch

from fastcoll.api import VERBS as DECLARED
from tests.support.harness import Pools, Rank, attempt
from tests.support.written import KNOWN, VERBS, make_known


def saved(rank: Rank, name: str) -> list[str]:
    """A tensor that autograd needs is written, in a first call and in a known one; or read."""
    verb, comm, wrong = VERBS[name], rank.comm, []
    gives = verb.reads in (None, rank.rank)
    gets = verb.writes in (None, rank.rank)
    for turn in range(KNOWN + 1):
        given, got = verb.tensors(rank.world_size, torch.float32)
        leaves = [one.clone().requires_grad_() for one in (given, got)]
        given, got = (leaf * 1 for leaf in leaves)
        losses = [(one * one).sum() for one in (given, got)]
        with torch.no_grad():
            verb.call(comm, given, got)
        read, written = (attempt(loss.backward) for loss in losses)
        if gives and read.kind:
            wrong.append(f"turn {turn}: what was read only: {read.text}")
        if gets and (written.kind != "RuntimeError" or "inplace operation" not in written.text):
            wrong.append(f"turn {turn}: nothing was said of what was written: {written}")
        if not gets and written.kind:
            wrong.append(f"turn {turn}: what was not written: {written.text}")
    return wrong


def test_every_declared_verb_is_here() -> None:
    found = {name for text in VERBS for name in re.findall(r"\w+", text)}
    assert set(DECLARED) - found == {"barrier"}


@pytest.mark.parametrize("name", VERBS)
def test_autograd_sees_what_is_written(pools: Pools, name: str) -> None:
    assert pools(2).run(saved, name) == [[], []]


def without_versions(rank: Rank, name: str) -> list[bool]:
    """Leaves outside of no_grad, as torch.distributed takes them; and tensors without a version."""
    verb, world = VERBS[name], rank.world_size
    given, got = verb.tensors(world, torch.float32)
    leaf, other = given.clone().requires_grad_(), got.clone().requires_grad_()
    make_known(verb, rank.comm, given, got)
    make_known(verb, rank.comm, leaf, other)
    with torch.inference_mode():
        inner, outer = (torch.zeros_like(one).copy_(one) for one in (given, got))
        outer.zero_()
        make_known(verb, rank.comm, inner, outer)
        return [torch.equal(other.detach(), got), torch.equal(outer, got)]


@pytest.mark.parametrize("name", VERBS)
def test_leaves_and_inference_tensors_are_taken(pools: Pools, name: str) -> None:
    assert pools(2).run(without_versions, name) == [[True, True]] * 2
